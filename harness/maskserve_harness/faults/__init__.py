"""Faults done to a real worker on purpose, and what its clients see of them."""
