"""Calls of nodes, as a model's runner receives them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

from maskserve_common.config import Config


class NodeRequest(NamedTuple):
    """One call of a node."""

    node: str
    inputs: Mapping[str, Any]
    settings: Mapping[str, Any]


class Nodes(Protocol):
    """Runner of one model's nodes."""

    def run(self, calls: Sequence[NodeRequest]) -> Iterable[dict[str, Any] | Exception]:
        """Yield each call's outputs by name, or the exception that it raised, in order."""


class ModelSetup(NamedTuple):
    """Argument of the constructor of a model's class."""

    source: str
    """Folder or URL in `[nodes]`; empty if the model needs none."""
    config: Config
    """Configuration of the node server."""
    loaded: Mapping[str, Any] = MappingProxyType({})
    """Models by name; while a call runs, it contains those that the model `needs`."""


def one_by_one(
    run: Callable[[NodeRequest], dict[str, Any]], calls: Sequence[NodeRequest]
) -> Iterable[dict[str, Any] | Exception]:
    """Run each call by itself, for nodes that share nothing."""
    for request in calls:
        try:
            yield run(request)
        except Exception as error:
            yield error
