"""Edits of photographs, 512 x 512 pixels: wishes, drawing and judging."""
