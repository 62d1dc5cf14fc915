"""Exclusion of a process's imports and loaded models from garbage collection."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collection_of_what_exists() -> Iterator[None]:
    """Exempt the objects of imports and loads from garbage collection. Collecting among them
    repeatedly would take a good part of a start, and a later full collection would delay a step.
    """
    gc.disable()
    try:
        yield
        gc.collect()
        gc.freeze()
    finally:
        gc.enable()
