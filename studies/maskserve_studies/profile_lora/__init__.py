"""Steps without a LoRA, judged on finished pictures (Katz)."""
