"""The denoiser model's Triton side: Triton requests in, the engine's events out.

Takes Triton's API as `api` (maskserve_triton), so it needs no Triton to be tested.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from maskserve_common.config import Config, model_name
from maskserve_common.contracts.meta import NEW, event_meta, failed_meta, final_meta
from maskserve_common.contracts.parameters import parameters
from maskserve_common.contracts.postprocess_context import NOTHING
from maskserve_common.contracts.request import EditRequest, ResolvedControl
from maskserve_common.errors import EngineFailed, InvalidRequest, MaskserveError, guarded
from maskserve_common.tracing import Tracer, parent_of
from maskserve_engine.base.job import (
    ControlInput,
    EditJob,
    EngineEvent,
    Failed,
    FinalEvent,
    PreviewEvent,
    ProgressEvent,
    Sink,
)
from maskserve_engine.base.timeline import RequestTimeline, stages
from maskserve_engine.loop.engine import Engine
from maskserve_engine.stages.encoded import EncodeReport, unpack_conditioning, unpack_references
from maskserve_triton.acks import ACKS, AckReceiver, FlowControl
from maskserve_triton.answer import Answer, answer_all
from maskserve_triton.key_history import KeyHistory
from maskserve_triton.tensor_io import read_array, read_array_or_none, read_bytes

T = TypeVar("T")


class _Operation(msgspec.Struct):
    """REQUEST of an operation; that of an edit has no `op`."""

    op: str = ""


_read_operation = msgspec.json.Decoder(_Operation).decode
_NO_LATENTS = np.zeros((0, 0, 0), np.float32)


class DenoiserFrontend:
    """Submits edits to the engine and sends its events; answers operations of `control`."""

    def __init__(
        self, api: Any, engine: Engine, config: Config, tracer: Tracer | None = None
    ) -> None:
        self._api = api
        self._tracer = tracer or Tracer()
        self._engine = engine
        self._config = config
        self._model = model_name(config)
        self._acks = AckReceiver(config.runtime_dir)
        self._history = KeyHistory()

    def close(self) -> None:
        """Once the engine has ended: what still waits for an ack is not sent."""
        self._acks.close()

    def execute(self, requests: list[Any]) -> None:
        """Take requests in; each is answered later, its final answer exactly once."""
        answer_all(self._api, requests, self._take)

    def _take(self, request: Any, answer: Answer) -> None:
        received = time.monotonic()
        raw = read_bytes(self._api, request, "REQUEST")
        if _read_operation(raw).op:
            self._operate(json.loads(raw), request, answer)
            return
        edit = EditRequest.from_json(raw)
        job = self._job(edit, request)
        encoded = EncodeReport.from_json(read_bytes(self._api, request, "ENCODED"))
        context = self._array(request, "CONTEXT", np.uint8, 1)
        key = parameters(request).get(ACKS, "")
        events = self._flow(answer, key) if key else answer
        sink = self._sink(edit, received, encoded, context, events, parent_of(request))
        try:
            self._engine.submit(job, sink)
        except Exception:
            self._acks.drop(key)
            raise

    def _flow(self, answer: Answer, key: str) -> FlowControl:
        """Return the flow control of a front that acknowledges events."""
        flow = FlowControl(answer, ended=lambda: self._acks.drop(key))
        self._acks.keep(key, flow)
        return flow

    def _job(self, edit: EditRequest, request: Any) -> EditJob:
        packed = self._array(request, "CONDITIONING", np.uint8, 1)
        conditioning, negative = unpack_conditioning(packed)
        pictures = read_array_or_none(self._api, request, "CONTROLS", np.uint8, ndim=4)
        control_moments = read_array_or_none(
            self._api, request, "CONTROL_MOMENTS", np.float32, ndim=4
        )
        moments = self._array(request, "MOMENTS", np.float32, 3)
        return EditJob(
            request=edit,
            edit_mask=self._array(request, "EDIT_MASK", np.uint8, 2),
            moments=moments,
            masked_moments=self._array(request, "MASKED_MOMENTS", np.float32, 3),
            conditioning=conditioning,
            negative=negative,
            controls=tuple(
                [_control(control, pictures, control_moments) for control in edit.controls]
            ),
            references=self._references(edit, moments, request) if edit.references else (),
        )

    def _references(
        self, edit: EditRequest, moments: NDArray[np.float32], request: Any
    ) -> tuple[NDArray[np.float32], ...]:
        """Return the moments of the further references, by the scale of the source's."""
        channels, rows, _ = moments.shape
        scale = edit.model_size[0] // rows
        sizes = [(height // scale, width // scale) for height, width in edit.reference_sizes]
        packed = self._array(request, "REFERENCE_MOMENTS", np.float32, 1)
        return unpack_references(packed, sizes, channels)

    def _array(self, request: Any, name: str, dtype: type[np.generic], ndim: int) -> NDArray[Any]:
        return read_array(self._api, request, name, dtype, ndim=ndim)

    def _sink(
        self,
        edit: EditRequest,
        received: float,
        encoded: EncodeReport,
        context: NDArray[np.uint8],
        events: Answer | FlowControl,
        parent: str,
    ) -> Sink:
        """Return a sink that sends a job's events, and records its spans below `parent` at the end.
        Every image carries the context that postprocess needs.
        """
        new_inputs = self._history.new_of(edit)

        def sink(event: EngineEvent) -> None:
            match event:
                case ProgressEvent(step, steps):
                    meta = event_meta("progress", step, steps, edit.request_id)
                    outputs = {"LATENTS": _NO_LATENTS, "META": meta, "CONTEXT": NOTHING}
                    events.event("progress", outputs)
                case PreviewEvent(step, steps, latents):
                    meta = event_meta("preview", step, steps, edit.request_id)
                    outputs = {"LATENTS": latents, "META": meta, "CONTEXT": context}
                    events.event("preview", outputs)
                case FinalEvent(latents, engine_meta, timeline):
                    taken_ms = {"encode": encoded.ms}
                    if timeline is not None:
                        taken_ms["prepare"] = 1e3 * (timeline.submitted - received)
                    warnings = (*edit.warnings, *encoded.warnings)
                    meta_fields = {**encoded.meta, "warnings": warnings, **engine_meta}
                    if new_inputs:
                        meta_fields[NEW] = new_inputs
                    meta = final_meta(edit, self._config.worker, self._model, meta_fields, taken_ms)
                    events.finish({"LATENTS": latents, "META": meta, "CONTEXT": context})
                    self._record(parent, received, timeline, None)
                case Failed(error, timeline):
                    meta = failed_meta(error, edit.request_id)
                    events.finish({"LATENTS": _NO_LATENTS, "META": meta, "CONTEXT": NOTHING})
                    self._record(parent, received, timeline, error)

        return sink

    def _record(
        self,
        parent: str,
        received: float,
        timeline: RequestTimeline | None,
        error: MaskserveError | None,
    ) -> None:
        if timeline is not None:
            self._tracer.record(parent, stages(received, timeline, error))

    def _operate(self, values: dict[str, Any], request: Any, answer: Answer) -> None:
        match values:
            case {"op": "cancel", "request_id": str(request_id)}:
                self._engine.cancel(request_id)
                _reply(answer, {})
            case {"op": "heartbeat"}:
                _reply_when_done(self._engine.heartbeat(), answer, lambda beat: beat)
            case {"op": "templates"}:
                templates = self._engine.templates()
                _reply_when_done(templates, answer, lambda listing: {"templates": listing})
            case {"op": "evict", "template_id": str(template_id)}:
                freed = self._engine.evict(template_id)
                _reply_when_done(freed, answer, lambda size: {"freed_bytes": size})
            case {"op": "prime", "request": str(template)}:
                state = self._engine.prime(
                    self._job(EditRequest.from_json(template.encode()), request)
                )
                _reply_when_done(state, answer, lambda priming_state: {"state": priming_state})
            case {"op": "pin", "template_id": str(template_id), "scope": str(scope)}:
                pinning = self._engine.pin(template_id, scope)
                _reply_when_done(pinning, answer, lambda exists: {"found": exists})
            case {"op": "unpin", "template_id": str(template_id)}:
                pinning = self._engine.unpin(template_id)
                _reply_when_done(pinning, answer, lambda exists: {"found": exists})
            case _:
                raise InvalidRequest(
                    "REQUEST.op",
                    "is not known",
                    "cancel, evict, heartbeat, pin, prime, templates, unpin",
                )


def _control(
    control: ResolvedControl,
    pictures: NDArray[np.uint8] | None,
    moments: NDArray[np.float32] | None,
) -> ControlInput:
    """Return a control with its picture, of CONTROLS and CONTROL_MOMENTS."""
    if pictures is None or control.image is None:
        raise EngineFailed("an edit with controls has no control pictures")
    encoded = None if moments is None or not len(moments) else moments[control.image]
    return ControlInput(
        net=control.version,
        picture=pictures[control.image],
        scale=control.scale,
        start=control.start,
        end=control.end,
        mode=control.mode,
        moments=encoded,
        fills=control.fills,
    )


def _reply_when_done(
    future: Future[T], answer: Answer, result: Callable[[T], dict[str, Any]]
) -> None:
    """Answer from the engine thread, between two steps, so that `execute` does not wait."""

    def reply(done: Future[T]) -> None:
        try:
            _reply(answer, result(done.result()))
        except Exception as error:
            answer.fail(guarded("", error))

    future.add_done_callback(reply)


def _reply(answer: Answer, result: dict[str, Any]) -> None:
    meta = json.dumps(result).encode()
    answer.finish({"LATENTS": _NO_LATENTS, "META": meta, "CONTEXT": NOTHING})
