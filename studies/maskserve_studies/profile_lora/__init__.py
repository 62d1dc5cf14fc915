"""The number of steps that an edit can run without its LoRA, judged on finished pictures (Katz)."""
