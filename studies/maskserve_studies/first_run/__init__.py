"""The first run on a machine with a GPU."""
