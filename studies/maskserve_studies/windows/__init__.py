"""Edits of photographs with and without a window round the mask."""
