"""Kernels and bytes of a step, counted without a GPU."""
