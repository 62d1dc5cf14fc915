"""Calls of adapters with the frequencies that Katz measured (§3.1)."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Service(NamedTuple):
    """A service that Katz §3.1 measured. `bar` is the highest accepted share of misses."""

    name: str
    adapters: int
    slots: int
    share: float
    """Share of the calls that go to the `slots` most popular adapters."""
    bar: float


SERVICES = (Service("A", 47, 5, 0.98, 0.022), Service("B", 94, 8, 0.95, 0.055))


def popularity(service: Service) -> NDArray[np.float64]:
    """Return the adapters' shares of the calls, `[adapters]`: the Zipf law that gives the first
    `slots` adapters `share` of them.
    """
    low, high = 0.0, 10.0
    shares = np.zeros(service.adapters)
    for _ in range(60):
        exponent = (low + high) / 2
        weights = np.arange(1, service.adapters + 1, dtype=float) ** -exponent
        shares = weights / weights.sum()
        if shares[: service.slots].sum() < service.share:
            low = exponent
        else:
            high = exponent
    return shares


def draw_calls(service: Service, calls: int, seed: int) -> list[int]:
    """Draw the adapter of each call."""
    rng = np.random.default_rng(seed)
    draws: list[int] = rng.choice(service.adapters, calls, p=popularity(service)).tolist()
    return draws
