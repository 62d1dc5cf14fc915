"""Select the cases of parametrised tests for each run; the other cases count as slow.

A marker on a test, or on a module by `pytestmark`, names the requirement. A test's own marker goes
before its module's:

- `each_pair`: some case has each pair of values of two parameters;
- `each_value`: some case has each value of each parameter;
- `spread(NAME, …, sort=…)`: like `each_value`, except for the parameters named here. Some test of
  the module has each value of such a parameter, and each test has each sort of its values. This
  suits suites that run the same tests for each model: each test runs for each sort of model, and
  each model runs some test.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import combinations
from typing import Any

import pytest

MARKERS = ("each_pair", "each_value", "spread")


def is_unet(model: str) -> bool:
    """Whether a tiny model is a UNet, by its name. UNets are a sort with their own code."""
    return "sd" in model


def covering(cases: Sequence[frozenset[Hashable]]) -> set[int]:
    """Places of cases that together have every feature of all cases. The choice is greedy; a tie
    goes to the case whose features were chosen least.

    Equal cases give an equal choice, so that processes which share the tests agree.
    """
    union = set[Hashable]().union(*cases)
    used = Counter[Hashable]()
    chosen: set[int] = set()
    while union:
        best = max(
            (n for n in range(len(cases)) if n not in chosen),
            key=lambda n: (len(cases[n] & union), -sum(used[case] for case in cases[n]), -n),
        )
        chosen.add(best)
        union -= cases[best]
        used.update(cases[best])
    return chosen


def _marker(item: Any) -> pytest.Mark | None:
    """The closest marker of a case that is not slow already."""
    if not hasattr(item, "callspec") or item.get_closest_marker("slow"):
        return None
    return next((mark for mark in item.iter_markers() if mark.name in MARKERS), None)


def _features(item: Any, mark: pytest.Mark) -> frozenset[Hashable]:
    """The features that a case covers. Values are equal if they are the same object. At worst, one
    case too many is chosen.
    """
    test, params = item.nodeid.partition("[")[0], item.callspec.params
    values = {name: (name, id(params[name])) for name in sorted(params)}
    if mark.name == "each_pair" and len(values) > 1:
        return frozenset((test, pair) for pair in combinations(values.values(), 2))
    shared = set(mark.args if mark.name == "spread" else ()) & set(values)
    sort: Callable[[Any], Hashable] = mark.kwargs.get("sort", lambda value: None)
    return frozenset(
        (
            *(values[name] for name in shared),
            *((test, name, sort(params[name])) for name in shared),
            *((test, values[name]) for name in set(values) - shared),
        )
    )


def leave_some_to_slow_runs(items: Iterable[Any]) -> None:
    """Mark the cases slow whose features other cases cover."""
    modules: dict[Any, list[tuple[Any, frozenset[Hashable]]]] = {}
    for item in items:
        if mark := _marker(item):
            modules.setdefault(item.path, []).append((item, _features(item, mark)))
    for cases in modules.values():
        chosen = covering([features for _, features in cases])
        for number, (item, _) in enumerate(cases):
            if number not in chosen:
                item.add_marker(pytest.mark.slow)
