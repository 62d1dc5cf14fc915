"""The denoising engine: torch and diffusers."""
