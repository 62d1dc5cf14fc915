"""Estimates for GPUs that nobody measured."""
