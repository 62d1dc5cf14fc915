"""Stable Diffusion 3.5: FLUX.1's double blocks, of a picture whose places lie in its tokens."""
