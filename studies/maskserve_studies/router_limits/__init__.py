"""Limits of one router: workers, decisions, jobs."""
