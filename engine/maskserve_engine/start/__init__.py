"""Construction of engines, and the share of a CPU's cores that each process gets."""
