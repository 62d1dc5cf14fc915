"""Z-Image: blocks of one stream, of which the first are the picture's alone."""
