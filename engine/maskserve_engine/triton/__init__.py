"""The denoiser's Triton side."""
