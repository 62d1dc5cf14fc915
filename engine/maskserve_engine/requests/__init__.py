"""Accepted edits, from acceptance to their one final answer."""
