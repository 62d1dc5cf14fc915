"""Wait for an effect of another thread or process."""

from __future__ import annotations

import time
from typing import Any


def eventually(condition: str, check: Any, timeout_s: float = 60.0) -> float:
    """Wait until `check()` is true; returns the seconds it took."""
    began = time.monotonic()
    while not check():
        assert time.monotonic() - began < timeout_s, f"{condition}: not within {timeout_s:g} s"
        time.sleep(0.005)
    return time.monotonic() - began
