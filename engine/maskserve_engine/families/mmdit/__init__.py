"""Flow-matching transformers: rows, blocks and weights that their families share."""
