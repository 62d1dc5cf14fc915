"""LoRA files: which there are, what they hold, how they are fetched and checked."""
