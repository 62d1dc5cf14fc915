"""Runs maskserve's workers on this host: one Triton each, started, watched, drained, stopped.

`maskserve serve` is the command; code uses `maskserve_serving.supervisor.Supervisor`.
"""
