"""FLUX.3 klein: blocks for each mode of tokens, then blocks for all of them together."""
