"""The demo model: procedurally drawn scenes, their judge, and the training of a tiny FLUX Fill."""
