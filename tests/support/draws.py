"""The seed of a run, and all random draws of tests.

`--seed` sets it. pytest's header and each failed run print it. A draw depends on the seed, the
test's name and the number of its earlier draws. So a test draws the same values alone and among all
others. Draws in a fixture of wider scope depend on the fixture's name instead. Hypothesis's
examples and the global generators of Python, numpy and torch follow the same rule.

A number in a test, such as `default_rng(3)`, is a chosen example and not a draw.
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
"""The environment variable with the seed, for processes that tests start."""

_place = ""
_draws: Counter[str] = Counter()


def run_seed() -> int:
    """The seed of this run."""
    return int(os.environ.get(SEED_VARIABLE, "0"))


def fresh_seed(name: str = "") -> int:
    """A seed below 2³¹ that differs at each call of a test.

    Args:
        name: of the drawing module or the like, outside of tests and fixtures.
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
    """Begin the draws of a test or fixture. At the end the outer draws continue.

    Python, numpy and, if imported, torch and Hypothesis also get a seed.

    Args:
        place: the unique name of the test or fixture.
    """
    global _place
    before, _place = _place, place
    _draws[place] = 0
    seed = _hash(run_seed(), place, "global")
    random.seed(seed)
    np.random.seed(seed)
    if torch := sys.modules.get("torch"):
        torch.manual_seed(seed)
    if core := sys.modules.get("hypothesis.core"):
        core.global_force_seed = seed  # as --hypothesis-seed sets it, once for all tests
    try:
        yield
    finally:
        _place = before


def _hash(*parts: object) -> int:
    digest = hashlib.sha256(repr(parts).encode()).digest()
    return int.from_bytes(digest[:4], "little") >> 1
