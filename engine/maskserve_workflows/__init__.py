"""Workflows: their language, plans, runs and node models."""
