"""FLUX.2 klein and dev, where they differ from FLUX.1. The blocks are the same, except for their
weights' names.
"""
