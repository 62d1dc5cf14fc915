"""Models around the denoiser: loading, encoding, decoding."""
