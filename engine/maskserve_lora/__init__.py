"""LoRA files: their listing, content, loading and checks."""
