"""Running maskserve's workers on this host: one Triton each, started, watched, drained, stopped.

`scripts/serve.py` is the command; tests and other scripts use `Supervisor` directly.
"""

from serving.errors import ServeError
from serving.options import ServeOptions
from serving.ports import free_base_port
from serving.supervisor import Supervisor

__all__ = ["ServeError", "ServeOptions", "Supervisor", "free_base_port"]
