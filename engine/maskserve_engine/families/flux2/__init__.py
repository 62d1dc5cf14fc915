"""FLUX.2 klein, where it differs from FLUX.1. The blocks are the same, except for their weights'
names.
"""
