"""Calls of nodes, as whoever runs a model's nodes is given them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol


class AskedNode(NamedTuple):
    """One call of a node."""

    node: str
    inputs: Mapping[str, Any]
    settings: Mapping[str, Any]


class Nodes(Protocol):
    """Runner of one model's nodes."""

    def run(self, calls: Sequence[AskedNode]) -> Iterable[dict[str, Any] | Exception]:
        """Yield each call's outputs by name, or why there are none, in order."""


def one_by_one(
    run: Callable[[AskedNode], dict[str, Any]], calls: Sequence[AskedNode]
) -> Iterable[dict[str, Any] | Exception]:
    """For nodes that share nothing: each call by itself."""
    for request in calls:
        try:
            yield run(request)
        except Exception as error:
            yield error
