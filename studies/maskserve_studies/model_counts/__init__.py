"""FLOPs and bytes of published models, counted from their shapes."""
