"""Flow-matching transformers: what the rows of all such families share."""
