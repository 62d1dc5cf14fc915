"""Nodes of workflows that run a model of their own."""
