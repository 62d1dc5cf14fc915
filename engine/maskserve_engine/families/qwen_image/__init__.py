"""Qwen-Image: what of it is not FLUX.1's. Its blocks are FLUX.1's double ones."""
