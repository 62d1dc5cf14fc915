"""Flow-matching transformers; see `families/mmdit`."""
