"""Workflows: models as nodes, compiled into one plan."""
