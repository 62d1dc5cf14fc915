"""FLUX.1: FluxTransformer2DModel over rows packed without padding."""
