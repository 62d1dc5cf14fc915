"""Workflow nodes that run their own model."""
