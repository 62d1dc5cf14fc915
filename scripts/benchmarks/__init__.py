"""Parts that benchmarks share."""
