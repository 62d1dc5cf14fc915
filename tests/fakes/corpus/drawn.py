"""Values drawn from a hypothesis strategy, the same ones on every run of a kind."""

from __future__ import annotations

from typing import TypeVar

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.strategies import SearchStrategy

from tests.support.examples import number

T = TypeVar("T")


def drawn(strategy: SearchStrategy[T], count: int) -> list[T]:
    """`count` values of `strategy` in a full run, fewer in others. Each process that shares the
    tests draws them at collection.
    """
    count = number(count)
    values: list[T] = []

    @settings(
        max_examples=count,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def collect(value: T) -> None:
        values.append(value)

    collect()
    return values[:count]
