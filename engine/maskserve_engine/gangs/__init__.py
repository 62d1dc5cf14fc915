"""Rows in other processes: one for each device of the worker."""
