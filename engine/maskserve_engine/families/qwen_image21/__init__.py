"""Qwen-Image-2.1: blocks of one stream, whose text and references see nothing of a row."""
