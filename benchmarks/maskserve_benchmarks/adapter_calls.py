"""Calls of adapters with the frequencies and numbers that Katz measured (§3)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Service(NamedTuple):
    """A service that Katz §3 measured. `bar` is the highest accepted share of misses."""

    name: str
    adapters: int
    slots: int
    share: float
    """Share of the calls that go to the `slots` most popular adapters."""
    bar: float
    nets: tuple[float, ...]
    """Shares of the calls with no ControlNet, with one, and so on (Table 1)."""
    loras: tuple[float, ...]
    """The same for LoRAs."""


SERVICES = (
    Service("A", 47, 5, 0.98, 0.022, (0.0, 0.305, 0.695), (0.002, 0.088, 0.91)),
    Service("B", 94, 8, 0.95, 0.055, (0.019, 0.251, 0.699, 0.031), (0.072, 0.736, 0.192)),
)


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


def draw_numbers(shares: Sequence[float], calls: int, rng: np.random.Generator) -> list[int]:
    """Draw how many adapters each call has, one from each `calls`-th part of the distribution,
    shuffled.

    Args:
        shares: shares of the calls with none, with one, and so on.
        calls: number of calls.
        rng: generator of the draws.
    """
    probabilities = (np.arange(calls) + rng.random(calls)) / calls
    numbers = np.searchsorted(np.cumsum(shares)[:-1], probabilities, side="right")
    drawn: list[int] = rng.permutation(numbers).tolist()
    return drawn
