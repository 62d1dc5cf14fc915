"""Facts of a served model that follow from its folder's files: sizes, counts, latents, prices."""
