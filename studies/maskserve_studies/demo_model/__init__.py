"""Judges of the demo models, and their held-out edits by class."""
