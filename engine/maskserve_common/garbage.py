"""Garbage collection around a process's start."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Turn garbage collection off for the block, and exempt all objects that exist at its end from
    later collections. Repeated collections among imports and loaded models would take a good part
    of a start, and a later full collection would delay a step.
    """
    gc.disable()
    try:
        yield
        gc.collect()
        gc.freeze()
    finally:
        gc.enable()
