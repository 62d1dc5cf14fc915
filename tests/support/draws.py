"""The one seed of a run, and all that tests draw by it.

`--seed` sets it, and pytest's header and each run that failed print it. A test draws by the seed,
its own name and how often it has drawn, so it draws the same by itself as among all others. What
is drawn in a fixture of wider scope follows from the fixture's name instead. Hypothesis and the
global generators of Python, numpy and torch have the seed, too (`tests/conftest.py`).

A number in a test, such as `default_rng(3)`, is an example that was chosen, and no draw.
"""

from __future__ import annotations

import hashlib
import os
import random
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

SEED_VARIABLE = "MASKSERVE_TEST_SEED"
"""The seed in the environment: processes that tests start draw by it."""

_place = ""
_draws: Counter[str] = Counter()


def run_seed() -> int:
    """The seed of this run."""
    return int(os.environ.get(SEED_VARIABLE, "0"))


def fresh_seed(name: str = "") -> int:
    """A seed below 2³¹, another at each call of a test.

    Args:
        name: of what draws, where that is no test and no fixture, such as a module.
    """
    place = name or _place
    _draws[place] += 1
    return _hash(run_seed(), place, _draws[place])


def fresh_rng(name: str = "") -> np.random.Generator:
    """A generator of numpy with a fresh seed."""
    return np.random.default_rng(fresh_seed(name))


def fresh_random(name: str = "") -> random.Random:
    """A generator of Python with a fresh seed."""
    return random.Random(fresh_seed(name))


@contextmanager
def drawing(place: str) -> Iterator[None]:
    """Begins the draws of a test or fixture, and goes back to what drew before.

    The global generators of Python, numpy and, where it is imported, torch get a seed, too.

    Args:
        place: the name of the test or fixture, unlike all others'.
    """
    global _place
    before, _place = _place, place
    _draws[place] = 0
    seed = _hash(run_seed(), place, "global")
    random.seed(seed)
    np.random.seed(seed)
    if torch := sys.modules.get("torch"):
        torch.manual_seed(seed)
    try:
        yield
    finally:
        _place = before


def _hash(*parts: object) -> int:
    digest = hashlib.sha256(repr(parts).encode()).digest()
    return int.from_bytes(digest[:4], "little") >> 1
