"""Whole edits on a GPU, beside what people would run there instead."""
