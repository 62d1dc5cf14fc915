"""Exclusion of a process's imports and loaded models from garbage collection."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collection_of_what_exists() -> Iterator[None]:
    """Around imports and loads: the collector leaves them alone. To look through them again and
    again meanwhile would take a good part of a start, and a full collection that did so later would
    hold up a step.
    """
    gc.disable()
    try:
        yield
        gc.collect()
        gc.freeze()
    finally:
        gc.enable()
