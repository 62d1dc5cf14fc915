"""How many examples Hypothesis draws: some in `make test` and CI, all of them in `make test-full`.

They are drawn by the run's seed (tests/support/draws.py).
"""

from __future__ import annotations

import os
from typing import Any

from hypothesis import settings

WHOLE = os.environ.get("MASKSERVE_FULL") == "1"
_SHORT = 5
_LEAST = 10


def number(whole: int, least: int = _LEAST) -> int:
    """Of `whole` examples, those that this run draws."""
    return whole if WHOLE else min(whole, max(least, whole // _SHORT))


def examples(whole: int = 100, **more: Any) -> settings:
    """Settings of a test that draws `whole` examples where all are drawn."""
    return settings(max_examples=number(whole), **more)
