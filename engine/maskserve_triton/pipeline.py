"""Calls from a front into the worker's other models."""

from __future__ import annotations

import json
import queue
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from maskserve_common.config import Config
from maskserve_common.contracts.keys import NO_SCOPE, scope_of
from maskserve_common.errors import EngineFailed
from maskserve_common.imaging.images import Decoded
from maskserve_engine.spec.model_spec import ModelSpec
from maskserve_triton.acks import ACKS, AckSender
from maskserve_triton.batched_requests import batched
from maskserve_triton.preprocess import PreparedTemplate, prepare_template
from maskserve_triton.tensor_io import named_tensors, output, relayed, tensor

_CACHED_PARTS = ("prompt", "template", "references")
"""Parts of an encoding that may be cached."""


@dataclass(frozen=True, slots=True)
class Event:
    """One response of the pipeline."""

    image: bytes
    meta: bytes
    kind: str
    """`progress`, `preview` or `final`."""
    values: dict[str, Any]
    """Content of `meta`."""


def run_edit(
    api: Any,
    inputs: dict[str, list[bytes]],
    parameters: dict[str, str],
    request_id: str,
    acks: AckSender | None = None,
) -> Iterator[Event]:
    """Run one edit through the ensemble, event by event. Blocks; never call it in `execute`.

    TRITON-2.51: the request could get `trace=` of the client's request, so that its trace shows the
    ensemble's models. But a request's trace is freed when `execute` returns, and Triton dies of it.

    Args:
        api: triton_python_backend_utils.
        inputs: elements of the BYTES tensors.
        parameters: parameters of the request; every model of the pipeline gets them.
        request_id: id for error messages.
        acks: sends an ack for each response; None: there is only one.

    Raises:
        MaskserveError: the error of a model of the pipeline.
    """
    if acks is not None:
        parameters = {**parameters, ACKS: acks.key}
    call = api.InferenceRequest(
        model_name="edit_pipeline",
        requested_output_names=["EDITED", "META"],
        inputs=[tensor(api, name, value) for name, value in inputs.items()],
        parameters=parameters,
    )
    failed = ""
    answers = responses_of(call)
    try:
        for answer in answers:
            if acks is not None:
                acks.acknowledge()
            if answer.has_error():
                raise relayed(answer.error().message(), request_id)
            meta = output(api, answer, "META")
            if not meta:
                continue  # the empty response that only carries the final flag
            values = json.loads(meta)
            if values["event"] == "failed":
                failed = values["error"]
            else:
                if values["event"] == "final":
                    failed = ""  # it was a preview that could not be made
                yield Event(output(api, answer, "EDITED"), meta, values["event"], values)
    finally:
        if acks is not None:
            acks.over()
    if failed:
        # Not raised above: an error that its own frame refers to is a cycle and keeps pictures.
        raise relayed(failed, request_id)


_ENCODED = ("MOMENTS", "MASKED_MOMENTS", "CONDITIONING")


def encode_edit(
    api: Any, inputs: dict[str, list[bytes]], parameters: dict[str, str], request_id: str
) -> dict[str, Any]:
    """Run an edit's preprocess and encoder alone, and return its META. Blocks.

    META tells an API key that all was made for it: it may be cached because of another key's edits.

    Args:
        api: triton_python_backend_utils.
        inputs: elements of the BYTES tensors.
        parameters: parameters of both requests.
        request_id: id for error messages.

    Raises:
        MaskserveError: the error of a model.
    """
    pictures = ("PIXELS", "REFERENCES", "EDIT_MASK", "CONTROLS")
    prepared = _answer_of(
        api.InferenceRequest(
            model_name="preprocess",
            requested_output_names=[*pictures, "REQUEST"],
            inputs=[tensor(api, name, value) for name, value in inputs.items()],
            parameters=parameters,
        ),
        request_id,
    )
    arrays = {x.name(): x.as_numpy() for x in prepared.output_tensors()}
    request = output(api, prepared, "REQUEST")
    encoded = _answer_of(
        api.InferenceRequest(
            model_name="encoder",
            requested_output_names=["ENCODED"],
            inputs=named_tensors(
                api, batched({**{name: arrays[name] for name in pictures}, "REQUEST": request})
            ),
            parameters=parameters,
        ),
        request_id,
    )
    report, edit = json.loads(output(api, encoded, "ENCODED")), json.loads(request)
    timings_ms = {**edit["timings_ms"], "encode": round(report.pop("ms"), 3)}
    template_id = edit["template_id"]
    if scope_of(request_id) != NO_SCOPE:
        report |= {name: "made" for name in _CACHED_PARTS if report.get(name)}
    return {
        "event": "final", "encoded": report, "template_id": template_id, "timings_ms": timings_ms,
    }  # fmt: skip


def encode_template(api: Any, prepared: PreparedTemplate) -> list[Any]:
    """Encode a template and return the denoiser's input tensors for priming it. Blocks.

    Raises:
        MaskserveError: the encoder's error.
    """
    inputs = {
        "PIXELS": prepared.pixels,
        "REFERENCES": np.zeros(0, np.uint8),
        "EDIT_MASK": prepared.edit_mask,
        "CONTROLS": np.zeros((0, 0, 0, 3), np.uint8),
        "REQUEST": prepared.request.to_json(),
    }
    call = api.InferenceRequest(
        model_name="encoder",
        requested_output_names=list(_ENCODED),
        inputs=named_tensors(api, batched(inputs)),
    )
    answer = _answer_of(call, prepared.request.request_id)
    encoded = [
        tensor(api, output_tensor.name(), output_tensor.as_numpy()[0])
        for output_tensor in answer.output_tensors()
    ]
    return [tensor(api, "EDIT_MASK", prepared.edit_mask), *encoded]


def _answer_of(call: Any, request_id: str) -> Any:
    """Return the only response to a call. Blocks. Raises MaskserveError: the model's error."""
    answer = call.exec()
    if answer.has_error():
        raise relayed(answer.error().message(), request_id)
    return answer


def prime_template(
    api: Any, source: Decoded, name: str, spec: ModelSpec, config: Config
) -> dict[str, Any]:
    """Prime a registered image in the background. Blocks until the priming is queued.

    Args:
        api: triton_python_backend_utils.
        source: the image.
        name: its template id.
        spec: the model's.
        config: the worker's.

    Returns:
        The denoiser's answer: its `state`.

    Raises:
        MaskserveError: the image cannot be used, or the error of encoder or denoiser.
        ConfigError: the configuration's defaults do not fit the model.
    """
    prepared = prepare_template(source, name, spec, config)
    operation = {"op": "prime", "request": prepared.request.to_json().decode()}
    return ask_denoiser(api, operation, encode_template(api, prepared))


def ask_denoiser(
    api: Any, operation: dict[str, Any], tensors: Sequence[Any] = ()
) -> dict[str, Any]:
    """Run `operation` in the denoiser's process. Blocks until it answers, or for ever.

    Args:
        api: triton_python_backend_utils.
        operation: JSON values with an `op`.
        tensors: further inputs of the denoiser.

    Raises:
        MaskserveError: the denoiser's error.
    """
    call = api.InferenceRequest(
        model_name="denoiser",
        requested_output_names=["META"],
        inputs=[tensor(api, "REQUEST", json.dumps(operation).encode()), *tensors],
    )
    result: dict[str, Any] | None = None
    for answer in responses_of(call):
        if answer.has_error():
            raise relayed(answer.error().message(), str(operation.get("request_id", "")))
        raw = output(api, answer, "META")
        result = json.loads(raw) if raw else result
    if result is None:
        raise EngineFailed("the denoiser gave no answer")
    return result


_KEEP_ALIVE_S = 2.0
"""Seconds that responses are kept: the stub's thread needs milliseconds; on a busy machine it may
be hundreds."""


class KeepAlive:
    """Keeps objects for some time, then releases them in a Python thread.

    TRITON-2.51: the stub has its own reference to a decoupled call's responses, and drops it in its
    own thread soon after the last one was taken. If it were the last reference, their arrays would
    be freed without Python's lock, and the process would die of a corrupted heap sooner or later.
    So responses are kept for some time, and Python's reference is the last.

    Args:
        seconds: seconds to keep an object.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._responses: queue.SimpleQueue[tuple[float, Any]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def keep(self, thing: Any) -> None:
        self._responses.put((time.monotonic() + self._seconds, thing))
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="keeper", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        while True:
            release_at_s, thing = self._responses.get()
            time.sleep(max(0.0, release_at_s - time.monotonic()))
            del thing


_KEEPER = KeepAlive(_KEEP_ALIVE_S)
"""One keeper for the process, as it has one stub."""


def responses_of(call: Any, keeper: KeepAlive = _KEEPER) -> Iterator[Any]:
    """The responses of `call` (a pb_utils.InferenceRequest), one after the other. Blocks."""
    responses = call.exec(decoupled=True)
    try:
        yield from responses
    finally:
        keeper.keep(responses)
