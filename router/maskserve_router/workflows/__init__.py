"""Workflows: their runs, how long these take, and the values between their nodes."""
