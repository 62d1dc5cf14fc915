"""Decoding a part of the picture round the mask."""
