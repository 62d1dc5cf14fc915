"""Messages of a run: the requests and answers of its edits, and its events for the client."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from typing import Any, Final, TypeAlias

import msgspec
from tritonclient.grpc import service_pb2 as pb

from maskserve_common.contracts import bytes_tensor
from maskserve_common.contracts.edit_kinds import settings_for
from maskserve_common.contracts.keys import name_of, scope_of, scoped
from maskserve_common.contracts.settings import (
    ENCODER_SETTINGS,
    REFERENCE_SETTINGS,
    EditSettings,
    dump_settings,
)
from maskserve_common.files.values import ENCODING, MAKE, RUN, TAKE
from maskserve_common.imaging.images import as_file
from maskserve_common.routing import EncodingPlace
from maskserve_router.messages.model_request import ModelRequest
from maskserve_router.workflows.run_values import RunValues
from maskserve_workflows.node_types import EDIT
from maskserve_workflows.plan import WorkflowPlan, kind_of_edit
from maskserve_workflows.run import Task, seed_of
from maskserve_workflows.values import Judgement, NamedValue, map_parts

NodeResult: TypeAlias = tuple[dict[str, Any], dict[str, Any]]
"""Outputs of a node, and its report for META."""
_LONGEST_NAME: Final = 60
"""Longest part of a request's id in the ids of its edits."""


def edit_request(
    task: Task, settings: EditSettings, streams: bool, due_s: float, values: RunValues | None
) -> ModelRequest:
    """Return the request of a run's edit. The node's settings override those of the run, of which
    it has those with an effect in its kind.

    Args:
        task: the edit.
        settings: settings of the run.
        streams: True for progress and previews.
        due_s: seconds until the edit is due; infinite: it has no due time. A late edit continues,
            because the run has a limit of its own.
        values: the run's values, whose references a worker of this host reads; None: send bytes.
    """
    assert settings.seed is not None
    edit_settings = {
        **msgspec.json.decode(dump_settings(settings_for(settings, kind_of_edit(task.call)))),
        "seed": seed_of(settings.seed, task.key),
        **_due(task, due_s),
        **task.call.settings,
        "request_id": name_of(edit_id(task, settings)),
        "output_format": "png",
    }
    request = _request(task, edit_settings, f"{EDIT}_stream" if streams else EDIT)
    if values is not None and values.run:

        def request_with_bytes() -> ModelRequest:
            task_with_bytes = Task(task.key, task.call, values.read(task.inputs))
            return edit_request(task_with_bytes, settings, streams, due_s, None)

        request.host, request.elsewhere = values.host, request_with_bytes
        request.head.parameters[RUN].string_param = values.run
        encodings: list[EncodingPlace] = [x for x in task.inputs.get("encodings", ()) if x]
        if encodings:
            seconds = sum(encoding.seconds for encoding in encodings)
            request.encoding = EncodingPlace(values.host, seconds)
            request.head.parameters[ENCODING].string_param = TAKE
    return request


def encode_request(task: Task, settings: EditSettings, values: RunValues) -> ModelRequest:
    """Return the request that a worker of this host encodes pictures for the run. References
    without a source are those of an edit whose source is the first of them.

    Args:
        task: the encoding.
        settings: settings of the run.
        values: the run's values.
    """
    run_settings = settings_for(settings, kind_of_edit(task.call))
    merged = {**msgspec.json.decode(dump_settings(run_settings)), **task.call.settings}
    setting_names = ENCODER_SETTINGS if "image" in task.inputs else REFERENCE_SETTINGS
    encoder_settings = {name: x for name, x in merged.items() if name in setting_names}
    encoder_settings["request_id"] = name_of(edit_id(task, settings))
    if "image" not in task.inputs:
        inputs = {**task.inputs, "image": task.inputs["references"][0]}
        task = Task(task.key, task.call, inputs)
    request = _request(task, encoder_settings, EDIT)
    request.host = values.host
    request.head.parameters[RUN].string_param = values.run
    request.head.parameters[ENCODING].string_param = MAKE
    return request


def _request(task: Task, settings: Mapping[str, Any], model: str) -> ModelRequest:
    """Return a task's request to a worker."""
    request = ModelRequest(pb.ModelInferRequest(model_name=model))
    inputs = {name: map_parts(value, _element) for name, value in task.inputs.items()}
    request.add("IMAGE", [inputs.get("image", b""), *inputs.get("references", ())])
    request.add("MASK", [inputs.get("mask", b"")])
    request.add("PROMPT", [inputs.get("prompt", "").encode()])
    request.add("SETTINGS", [msgspec.json.encode(settings)])
    if "control" in inputs:
        request.add("CONTROL", [inputs["control"]])
    for output in ("IMAGE", "META"):
        request.head.outputs.add(name=output)
    return request


def _element(part: Any) -> Any:
    return part.element if isinstance(part, NamedValue) else part


def edit_id(task: Task, settings: EditSettings) -> str:
    """Return the request id of a run's edit."""
    assert settings.request_id is not None
    name = name_of(settings.request_id)
    if len(name) > _LONGEST_NAME:
        name = hashlib.sha256(name.encode()).hexdigest()[:32]
    place = task.key.replace("[", ".").replace("]", "")
    return scoped(scope_of(settings.request_id), f"{name}/{place}")


def _due(task: Task, due_s: float) -> dict[str, Any]:
    if due_s == math.inf or "deadline_ms" in task.call.settings:
        return {}
    return {"deadline_ms": max(int(1e3 * due_s), 1), "on_late": "finish"}


def edit_answer(answer: bytes) -> NodeResult:
    """Return the picture and META of a worker's answer."""
    return _picture_and_meta(pb.ModelInferResponse.FromString(answer))


def stream_answer(message: bytes) -> NodeResult:
    """Return the picture and META of a stream's message; empty for the message that ends it."""
    return _picture_and_meta(pb.ModelStreamInferResponse.FromString(message).infer_response)


def _picture_and_meta(response: pb.ModelInferResponse) -> NodeResult:
    if not response.outputs:
        return {}, {}
    outputs = bytes_tensor.outputs(response)
    picture = {"image": bytes(outputs["IMAGE"])} if len(outputs["IMAGE"]) else {}
    return picture, msgspec.json.decode(outputs["META"])


def run_event(
    plan: WorkflowPlan, meta: Mapping[str, Any], outputs: Mapping[str, Any] | None = None
) -> pb.ModelInferResponse:
    """Return an event of a run, or its answer, with these outputs."""
    response = pb.ModelInferResponse(model_name=plan.name, model_version="1")
    for name, value in (outputs or {}).items():
        bytes_tensor.add_output(response, name.upper(), [_encoded(value)])
    bytes_tensor.add_output(response, "META", [msgspec.json.encode(meta)])
    return response


def _encoded(value: Any) -> bytes:
    if isinstance(value, Judgement):
        return msgspec.json.encode(value)
    return value.encode() if isinstance(value, str) else as_file(value)
