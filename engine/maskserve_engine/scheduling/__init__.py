"""The scheduler: the rows that take the next step."""
