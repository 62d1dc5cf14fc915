"""A simulated cluster that serves masked edits."""
