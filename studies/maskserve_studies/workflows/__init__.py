"""Workflows on a real router and node server."""
