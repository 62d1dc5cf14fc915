"""What models are made of, over packed rows: linear, attention, modulation, cached keys."""
