"""Alternatives to maskserve, served by the same Triton and measured in the same run."""
