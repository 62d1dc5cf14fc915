"""The cases of a quick run cover those that it leaves to slow runs: tests/support/covering.py."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.covering import covering, leave_some_to_slow_runs
from tests.support.examples import examples
from tests.support.shards import shard_of, split


class Item:
    """A case as pytest has collected it."""

    path = "test_a.py"

    def __init__(self, marker: Any, test: str, **params: object) -> None:
        self.callspec = SimpleNamespace(params=params, id="-".join(map(str, params.values())))
        self.nodeid = f"{self.path}::{test}[{self.callspec.id}]"
        self._marks = [marker.mark]

    def iter_markers(self) -> Iterator[pytest.Mark]:
        return iter(self._marks)

    def get_closest_marker(self, name: str) -> bool:
        return name in [mark.name for mark in self._marks]

    def add_marker(self, marker: pytest.MarkDecorator) -> None:
        self._marks.append(marker.mark)


@examples(50)
@given(st.lists(st.integers(1, 4), min_size=2, max_size=4), st.integers(0, 2**32))
def test_each_pair_of_a_grid_is_in_what_is_taken(sizes: list[int], seed: int) -> None:
    """The grid has holes: no case has to cover a pair that none of them has."""
    rng = np.random.default_rng(seed)
    grid = [case for case in product(*map(range, sizes)) if rng.random() < 0.8]
    pairs = [frozenset[Any](combinations(enumerate(case), 2)) for case in grid]
    selected = covering(pairs)
    assert set().union(*(pairs[n] for n in selected)) == set().union(*pairs)
    assert selected == covering(pairs)


def test_it_is_far_less_than_the_grid() -> None:
    pairs = [
        frozenset[Any](combinations(enumerate(case), 2)) for case in product(range(4), repeat=5)
    ]
    assert len(covering(pairs)) <= 32  # of 1,024; 16 is the least that there can be
    assert covering([]) == set()


@pytest.mark.parametrize(
    ("marker", "expected"),
    [
        (pytest.mark.each_pair, 2 * 12),
        (pytest.mark.each_value, 2 * 4),
        (pytest.mark.spread("a"), 2 * 3),
        (pytest.mark.spread("a", "b"), 2 * 2),
        (pytest.mark.spread("a", "b", sort=lambda b: b == "z"), 2 * 2),
        (pytest.mark.unit, 48),
    ],
    ids=lambda parameter: parameter.name if isinstance(parameter, pytest.MarkDecorator) else None,
)
def test_a_marker_leaves_cases_to_slow_runs(marker: Any, expected: int) -> None:
    items = [
        Item(marker, test, a=a, b=b, c=c)
        for test in ("one", "two")
        for a, b, c in product(range(4), "xyz", (True, False))
    ]
    leave_some_to_slow_runs(items)
    selected = [item for item in items if not item.get_closest_marker("slow")]
    assert len(selected) == expected
    assert {item.nodeid.partition("[")[0] for item in selected} == {
        "test_a.py::one",
        "test_a.py::two",
    }
    values = {value for item in selected for value in item.callspec.params.items()}
    assert len(values) == 4 + 3 + 2


def test_what_is_slow_anyway_covers_nothing() -> None:
    items = [Item(pytest.mark.each_value, "one", a=a, b=b) for a, b in product(range(2), repeat=2)]
    items[0].add_marker(pytest.mark.slow)
    leave_some_to_slow_runs(items)
    selected = [item for item in items if not item.get_closest_marker("slow")]
    assert [tuple(item.callspec.params.values()) for item in selected] == [(0, 1), (1, 0)]


@dataclass
class Case:
    path: Path
    slow: bool = True

    def get_closest_marker(self, name: str) -> bool:
        return self.slow and name == "slow"


def test_shards_have_each_slow_case_once_and_files_of_servers_whole() -> None:
    e2e, unit = Path("tests/e2e"), Path("tests/unit")
    cases = [Case(e2e / f"{n % 5}.py") for n in range(40)] + [
        Case(unit / "x.py") for _ in range(11)
    ]
    quick = [Case(unit / "x.py", slow=False)]
    shards = [split([*quick, *cases], number, 3, e2e)[0] for number in (1, 2, 3)]
    assert sorted(id(case) for shard in shards for case in shard) == sorted(map(id, cases))
    files = [{case.path for case in shard if case.path.parent == e2e} for shard in shards]
    assert sum(map(len, files)) == 5
    assert [sum(case.path.parent == unit for case in shard) for shard in shards] == [4, 4, 3]


@pytest.mark.parametrize("text", ["0/3", "4/3", "3", "a/b", ""])
def test_a_shard_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(pytest.UsageError, match="--slow-shard takes"):
        shard_of(text)
