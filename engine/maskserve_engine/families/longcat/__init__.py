"""LongCat-Image and LongCat-Image-Edit. Their blocks are FLUX.1's."""
