"""Images, masks and sizes: what happens to an edit before and after the models."""
