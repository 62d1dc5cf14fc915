"""FLUX.2 klein: what of it is not FLUX.1's. Blocks are, but for their weights' names."""
