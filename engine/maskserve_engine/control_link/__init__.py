"""Between a denoiser and a ControlNet service: what they tell one another, and by which way."""
