"""Model specs that follow from a folder's files: sizes, counted work, latents, prices."""
