"""Z-Image: blocks of one stream, the first of which see the picture only."""
