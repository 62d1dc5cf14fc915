"""The number of examples that Hypothesis draws: some in `make test` and CI, all in `make
test-full`.

The run's seed decides the examples (tests/support/draws.py).
"""

from __future__ import annotations

import os
from typing import Any

from hypothesis import settings

WHOLE = os.environ.get("MASKSERVE_FULL") == "1"
_SHORT = 5
_LEAST = 10


def number(whole: int, least: int = _LEAST) -> int:
    """The number of examples that this run draws out of `whole`."""
    return whole if WHOLE else min(whole, max(least, whole // _SHORT))


def examples(whole: int = 100, **more: Any) -> settings:
    """Settings of a test that draws `whole` examples in a full run."""
    return settings(max_examples=number(whole), **more)
