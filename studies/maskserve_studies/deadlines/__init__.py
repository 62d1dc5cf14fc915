"""Due times on eight simulated devices, compared with TetriServe."""
