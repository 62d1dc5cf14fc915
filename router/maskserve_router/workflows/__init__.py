"""Workflow runs, their predicted times, and the values between their nodes."""
