"""Which cases of parametrised tests each run takes; the others are slow ones.

A test, or a module by `pytestmark`, says by a marker what its cases have to cover; a test's own
goes before its module's:

- `each_pair`: each pair of values that two of its parameters have together, in some case;
- `each_value`: each value of each parameter, in some case;
- `spread(NAME, …, sort=…)`: the same, but each value of a parameter that is named here in a case of
  some test of the module, and each sort of its values in a case of each test. For suites that ask
  the same of each model: each test asks one of each sort, and each model is asked something.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import combinations
from typing import Any

import pytest

MARKERS = ("each_pair", "each_value", "spread")


def is_unet(model: str) -> bool:
    """Of the names that tests give tiny models: a sort that has code of its own."""
    return "sd" in model


def covering(cases: Sequence[frozenset[Hashable]]) -> set[int]:
    """Places of cases that have among them each feature that any has: greedily, and where several
    bring as many new ones, that whose features were taken least.

    The same for the same cases: processes that share the tests choose alike.
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
    """The closest one, of a case that is not slow anyway."""
    if not hasattr(item, "callspec") or item.get_closest_marker("slow"):
        return None
    return next((mark for mark in item.iter_markers() if mark.name in MARKERS), None)


def _features(item: Any, mark: pytest.Mark) -> frozenset[Hashable]:
    """What a case covers. A value is the same where it is the same object: at worst a case too many
    is taken.
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
    """Mark those cases slow that cover nothing that others do not."""
    modules: dict[Any, list[tuple[Any, frozenset[Hashable]]]] = {}
    for item in items:
        if mark := _marker(item):
            modules.setdefault(item.path, []).append((item, _features(item, mark)))
    for cases in modules.values():
        chosen = covering([features for _, features in cases])
        for number, (item, _) in enumerate(cases):
            if number not in chosen:
                item.add_marker(pytest.mark.slow)
