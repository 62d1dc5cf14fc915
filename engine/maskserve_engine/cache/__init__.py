"""Cached activations of templates: their priming, tiers and formats."""
