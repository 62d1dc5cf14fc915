"""Routers: times of decisions, polls and passed edits."""
