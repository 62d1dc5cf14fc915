"""Communication of ranks that take a step together."""
