"""LegoDiffusion's figures in virtual time."""
