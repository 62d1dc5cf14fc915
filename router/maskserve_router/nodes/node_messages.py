"""Messages between the router and a node server: calls, answers and records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec
from tritonclient.grpc import service_pb2 as pb

from maskserve_common.contracts import bytes_tensor
from maskserve_common.errors import EngineFailed
from maskserve_workflows.wire import MOST_ELEMENTS, RECORD, NodeResult, NodeTask, unpack_values

_MODEL = "nodes"


class NodeAnswer(NamedTuple):
    """A node's answer."""

    outputs: dict[str, Any]
    server: str
    seconds: float
    """Seconds that the node ran."""
    tries: int
    """2 if a server was lost, failed the call, or had to be waited for."""
    reused: bool = False
    """True if an earlier call made the answer."""


def node_request(task: NodeTask, elements: Sequence[bytes]) -> bytes:
    """Return the encoded request of a call."""
    request = pb.ModelInferRequest(model_name=_MODEL)
    bytes_tensor.add_input(request, "TASK", [msgspec.json.encode(task, order="sorted")])
    bytes_tensor.add_input(request, "VALUES", elements)
    encoded: bytes = request.SerializeToString()
    return encoded


def node_answer(answer: bytes, address: str, tries: int) -> NodeAnswer:
    """Return the answer of a call.

    Args:
        answer: an encoded ModelInferResponse.
        address: address of the server.
        tries: number of tries.

    Raises:
        EngineFailed: it is not an answer of a node server.
    """
    try:
        contents = _contents(answer)
        result = msgspec.json.decode(bytes_tensor.only(contents["RESULT"]), type=NodeResult)
        parts = bytes_tensor.elements(contents["MADE"], MOST_ELEMENTS)
        return NodeAnswer(unpack_values(result.outputs, parts), address, result.seconds, tries)
    except (KeyError, ValueError, msgspec.MsgspecError):
        raise EngineFailed("a node server answered with something else") from None


def record_request(settings: Mapping[str, Any] = MappingProxyType({})) -> bytes:
    """Return the encoded request for a server's record (`NodeModels.record`)."""
    return node_request(NodeTask(RECORD, (), dict(settings)), ())


def record_of(answer: bytes) -> dict[str, Any]:
    """Return the record in an answer.

    Raises:
        ValueError: it has none.
    """
    try:
        (raw,) = bytes_tensor.elements(_contents(answer)["RESULT"], 1)
        record: dict[str, Any] = msgspec.json.decode(raw)
    except (KeyError, msgspec.MsgspecError):
        raise ValueError("not a record of a node server") from None
    return record


def _contents(answer: bytes) -> dict[str, bytes]:
    """Return the contents of an answer by output."""
    response = pb.ModelInferResponse.FromString(answer)
    names = (output.name for output in response.outputs)
    return dict(zip(names, response.raw_output_contents, strict=True))
