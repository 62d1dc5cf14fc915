"""The quality of cached edits: ways to run rows, metrics, reports."""
