"""Checkpoint files in the forms that people publish, turned into folders in diffusers format."""
