"""A node server's Triton side: it takes a task and its values, and returns the node's outputs."""

from __future__ import annotations

import traceback
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from maskserve_common.contracts.tensors import SERVICES
from maskserve_common.errors import (
    EngineFailed,
    InvalidRequest,
    MaskserveError,
    Overloaded,
    guarded,
)
from maskserve_common.files.values import Values
from maskserve_common.reading import Misread
from maskserve_triton.answer import Answer, answer_all
from maskserve_triton.tensor_io import read_bytes, read_elements
from maskserve_workflows.node_models import NodeModels
from maskserve_workflows.node_outputs import misfit
from maskserve_workflows.node_request import NodeRequest
from maskserve_workflows.node_types import NodeType
from maskserve_workflows.nodes import NODE_TYPES
from maskserve_workflows.wire import (
    NOT_HOSTED,
    OTHER_VERSION,
    PLACED,
    RECORD,
    NodeResult,
    NodeTask,
    Put,
    pack_values,
    read_all,
    unpack_values,
)


class NodeFront:
    """Answers routers; each call when it is done.

    Args:
        api: Triton's API (maskserve_triton).
        models: models that run nodes.
        values: values that pass by name.
    """

    def __init__(self, api: Any, models: NodeModels, values: Values) -> None:
        self._api, self._models, self._values = api, models, values

    def execute(self, requests: list[Any]) -> None:
        """Take requests in."""
        answer_all(self._api, requests, self._take)

    def _take(self, request: Any, answer: Answer) -> None:
        raw = read_bytes(self._api, request, "TASK")
        elements = read_elements(self._api, request, SERVICES["nodes"].input("VALUES"))
        try:
            task = msgspec.json.decode(raw, type=NodeTask)
            inputs = unpack_values(task.inputs, elements)
        except (msgspec.MsgspecError, ValueError) as error:
            raise InvalidRequest("TASK", f"cannot be read ({error})", "a node's task") from None
        if task.node == RECORD:
            if PLACED in task.settings:
                self._models.place(_names(task.settings[PLACED]))
            record = {**self._models.record(), "values": self._values.stored()}
            answer.finish({"RESULT": msgspec.json.encode(record), "MADE": [b""]})
            return
        kind = NODE_TYPES.get(task.node)
        if kind is None or not self._models.hosts(kind.model):
            raise InvalidRequest("TASK.node", f"{task.node[:60]!r} {NOT_HOSTED}")
        if task.signature not in ("", kind.signature):
            problem = f"{kind.name} {OTHER_VERSION}: {Path(kind.file).name} has {kind.signature}"
            raise InvalidRequest("TASK.node", problem, task.signature)
        input_kinds = {laid.name: laid.kind for laid in task.inputs}
        if input_kinds != {name: kind.inputs[name] for name in kind.inputs if name in input_kinds}:
            raise InvalidRequest("TASK.inputs", "are not the node's", ", ".join(kind.inputs))
        try:
            settings = kind.settings(**kind.checked(task.settings))
        except Misread as error:
            raise InvalidRequest(f"TASK.{error.path}", error.problem, error.accepted) from None
        all_settings = {name: getattr(settings, name) for name in kind.settings.__struct_fields__}
        inputs = read_all(inputs, self._values, task.scope)
        put = partial(self._values.put, scope=task.scope, run=task.run)
        node_request = NodeRequest(task.node, inputs, all_settings)
        self._models.call(kind.model, node_request, partial(_answer, answer, kind, put))


def _names(names: Any) -> list[str]:
    try:
        return msgspec.convert(names, list[str])
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"TASK.{PLACED}", str(error), "names of models") from None


def _answer(
    answer: Answer, kind: NodeType, put: Put, outputs: dict[str, Any] | Exception, seconds: float
) -> None:
    if isinstance(outputs, Exception):
        answer.fail(_failure(kind, outputs))  # raised, it would refer to itself and the values
        return
    try:
        if problem := misfit(outputs, kind.outputs):
            raise EngineFailed(f"{kind.name}: {Path(kind.file).name} returns {problem}")
        layout, parts = pack_values(outputs, kind.outputs, put)
        result = msgspec.json.encode(NodeResult(layout, round(seconds, 6)))
        answer.finish({"RESULT": result, "MADE": parts})
    except Exception as error:
        answer.fail(guarded("", error))


def _failure(kind: NodeType, error: Exception) -> MaskserveError:
    """Return the error for the client: of a foreign one only the place."""
    known = guarded("", error)
    if known is error or isinstance(known, Overloaded):
        return known
    file = Path(kind.file)
    frames = [x for x in traceback.extract_tb(error.__traceback__) if x.filename == kind.file]
    where = f"{file.name}:{frames[-1].lineno}" if frames else file.name
    return EngineFailed(f"{kind.name}: failed with a {type(error).__name__} in {where}")
