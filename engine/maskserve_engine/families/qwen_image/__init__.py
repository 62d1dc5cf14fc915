"""Qwen-Image, where it differs from FLUX.1. Its blocks are FLUX.1's double ones."""
