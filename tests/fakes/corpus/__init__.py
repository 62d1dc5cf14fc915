"""The corpus of hostile and odd requests: one noun per file, put together in `collection`.

Everything in it is the same on every run: it is written by hand, or drawn by hypothesis from a
fixed seed.
"""
