"""The corpus of hostile and odd requests: one noun per file, put together in `collection`.

The corpus is the same on every run: cases are written by hand, or drawn by hypothesis from a fixed
seed.
"""
