"""Building blocks of models over packed rows: linear, attention, modulation, cached keys."""
