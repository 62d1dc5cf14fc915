"""Documents that follow the code, written by it."""
