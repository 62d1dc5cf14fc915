"""Chroma: FLUX.1's blocks, whose shifts, scales and gates come from a small model of the
timestep.
"""
