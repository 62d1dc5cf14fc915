"""Running maskserve's workers on this host: one Triton each, started, watched, drained, stopped.

`scripts/serve.py` is the command; tests and other scripts use `serving.supervisor.Supervisor`.
"""
