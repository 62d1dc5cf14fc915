"""Steps of models with random weights: their times, bytes, kernels and counts."""
