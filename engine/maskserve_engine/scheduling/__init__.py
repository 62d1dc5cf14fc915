"""Which rows take the next step."""
