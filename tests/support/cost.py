"""The cost of code, counted and not timed, so that a busy machine changes nothing."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def lines_run(call: Callable[[], object]) -> int:
    """Number of Python lines that `call()` runs, in all functions, on this thread."""
    count = 0

    def trace(_frame: FrameType, event: str, _value: Any) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return count
