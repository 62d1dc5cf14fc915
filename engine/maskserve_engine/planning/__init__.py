"""How long a step takes, and which kind each of its blocks should be (FlashPS §4.2)."""
