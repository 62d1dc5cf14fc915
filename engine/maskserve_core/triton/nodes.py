"""A node model's Triton side: a task and its values in, what the node made out."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Protocol

import msgspec

from maskserve_core.contracts.tensors import SERVICES
from maskserve_core.errors import InvalidRequest
from maskserve_core.reading import Misread
from maskserve_core.triton.sync_execute import Outputs, respond
from maskserve_core.triton.tensor_io import read_bytes, read_elements
from maskserve_core.workflows.nodes import NODE_TYPES
from maskserve_core.workflows.wire import NodeResult, NodeTask, laid_out, picked_up


class Nodes(Protocol):
    """What runs the nodes of one Triton model."""

    def run(
        self, node: str, inputs: Mapping[str, Any], settings: Mapping[str, Any]
    ) -> dict[str, Any]:
        """The node's outputs by name; every setting is there."""


class NodeFront:
    """Answers routers.

    Args:
        api: Triton's (maskserve_core.triton).
        model: the Triton model's name.
        nodes: that it runs.
    """

    def __init__(self, api: Any, model: str, nodes: Nodes) -> None:
        self._api, self._model, self._nodes = api, model, nodes

    def execute(self, requests: list[Any]) -> list[Any]:
        """Answer each request."""
        return respond(self._api, requests, self._work)

    def _work(self, request: Any) -> Outputs:
        raw = read_bytes(self._api, request, "TASK")
        elements = read_elements(self._api, request, SERVICES[self._model].input("VALUES"))
        try:
            task = msgspec.json.decode(raw, type=NodeTask)
            inputs = picked_up(task.inputs, elements)
        except (msgspec.MsgspecError, ValueError) as error:
            raise InvalidRequest("TASK", f"cannot be read ({error})", "a node's task") from None
        kind = NODE_TYPES.get(task.node)
        if kind is None or kind.model != self._model:
            raise InvalidRequest("TASK.node", f"{task.node[:60]!r} is not run by {self._model}")
        given = {laid.name: laid.kind for laid in task.inputs}
        if given != {name: kind.inputs[name] for name in kind.inputs if name in given}:
            raise InvalidRequest("TASK.inputs", "are not the node's", ", ".join(kind.inputs))
        try:
            settings = kind.settings(**kind.checked(task.settings))
        except Misread as error:
            raise InvalidRequest(f"TASK.{error.path}", error.problem, error.accepted) from None
        every = {name: getattr(settings, name) for name in kind.settings.__struct_fields__}
        begin = time.perf_counter()
        made = self._nodes.run(task.node, inputs, every)
        seconds = round(time.perf_counter() - begin, 6)
        layout, parts = laid_out(made, kind.outputs)
        return {"RESULT": msgspec.json.encode(NodeResult(layout, seconds)), "MADE": parts}
