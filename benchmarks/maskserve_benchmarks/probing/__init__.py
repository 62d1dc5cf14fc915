"""Calls to a running worker with Triton's own client, for scripts and tests."""
