"""Whole edits: their parts, times and errors."""
