"""Qwen-Image-2.1: blocks of one stream, whose text and references do not depend on the row."""
