"""Stable Diffusion 3.5: FLUX.1's double blocks, with positions inside the picture's tokens."""
