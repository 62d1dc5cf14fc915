"""Messages and transports between a denoiser and a ControlNet service."""
