"""Whether kernels written in the Triton language can be used."""

from __future__ import annotations

import importlib.util
import logging
from functools import cache

_log = logging.getLogger(__name__)


@cache
def missing_triton() -> str | None:
    """Why they cannot; None if they can. Logged once."""
    if importlib.util.find_spec("triton") is not None:
        return None
    reason = "the package triton is not installed"
    _log.warning("cached activations are placed and heads turned in many small kernels: %s", reason)
    return reason
