"""Due times on eight simulated devices, beside TetriServe."""
