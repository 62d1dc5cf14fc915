"""A gRPC server that speaks like a maskserve worker, with a painter in place of the model.

It runs in the test's process on a free port of 127.0.0.1. The real pre- and postprocessing checks
and answers requests; the model paints one colour. Tests set faults on `FakeWorker`, which also
records the calls.
"""

from __future__ import annotations

import json
import struct
import threading
import time
from collections.abc import Iterator
from concurrent import futures
from dataclasses import dataclass, field, replace
from typing import Any

import grpc
import numpy as np
from tritonclient.grpc import service_pb2, service_pb2_grpc

from maskserve_common.config import Config, ModelConfig
from maskserve_common.contracts import bytes_tensor
from maskserve_common.contracts.edit_kinds import check_references, edit_kind
from maskserve_common.contracts.request import EditKind
from maskserve_common.contracts.settings import parse_settings
from maskserve_common.errors import InvalidRequest, MaskserveError
from maskserve_common.imaging.images import decode_image
from maskserve_common.imaging.masks import active_tokens
from maskserve_lora.operations import AdapterOperations
from maskserve_triton.accept import accept_edit
from maskserve_triton.postprocess import finish_edit
from maskserve_triton.preprocess import PreparedEdit, prepare_edit
from tests.fakes.model_specs import FILL_SPEC

PAINT = (220, 20, 60)
CONFIG = Config(model=ModelConfig(path="demo", num_inference_steps=4), worker="fake-0")


@dataclass
class FakeWorker:
    """The worker's behaviour, and a record of its calls."""

    step_s: float = 0.0
    """Seconds of a step."""
    error: str = ""
    """An error text that answers edits in place of a picture."""
    error_status: grpc.StatusCode = grpc.StatusCode.INTERNAL
    """Status of that answer when it is unary."""
    error_at_step: int = 0
    hang_up: bool = False
    """End streams without a final answer."""
    trailing_empty: bool = False
    """End streams by an empty message, as Triton does on request."""
    edit_kinds: frozenset[EditKind] = FILL_SPEC.edit_kinds
    """Kinds of edits that its model has."""
    most_pictures: int = 1
    """Most pictures in IMAGE."""
    garble: bool = False
    """Send a final answer whose image is not a picture."""
    url: str = ""
    requests: list[dict[str, bytes]] = field(default_factory=list)
    metadata: list[dict[str, str]] = field(default_factory=list)
    started: threading.Event = field(default_factory=threading.Event)
    withdrawn: threading.Event = field(default_factory=threading.Event)
    """Set when a call ended before its answer."""
    finished: threading.Event = field(default_factory=threading.Event)
    """Set when a call got its answer and ended as usual."""
    templates: dict[str, bytes] = field(default_factory=dict)
    cached_only: list[str] = field(default_factory=list)
    """Templates in edits that were never registered."""
    adapters: AdapterOperations | None = None
    """Its operations for adapters; None: it has none."""

    def get(self, template_id: str, scope: str = "") -> bytes | None:
        return self.templates.get(template_id)


class _Withdrawn(Exception):
    pass


class _Service(service_pb2_grpc.GRPCInferenceServiceServicer):  # type: ignore[misc]
    def __init__(self, worker: FakeWorker) -> None:
        self.worker = worker

    def ModelInfer(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802
        self.worker.metadata.append(dict(context.invocation_metadata()))
        answered = self._watch(context)
        try:
            if request.model_name == "control":
                result = self._control(_inputs(request)["OP"])
                answered.set()
                return _response(request, {"RESULT": result})
            *_, final = self._edit(request, context)
            answered.set()
            return _event_response(request, final)
        except MaskserveError as error:
            answered.set()
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except _Fault as fault:
            answered.set()
            context.abort(self.worker.error_status, fault.args[0])
        except _Withdrawn:
            context.abort(grpc.StatusCode.CANCELLED, "withdrawn")

    def ModelStreamInfer(  # noqa: N802
        self, requests: Iterator[Any], context: grpc.ServicerContext
    ) -> Iterator[Any]:
        answered = self._watch(context)
        for request in requests:
            try:
                for event in self._edit(request, context):
                    if self.worker.hang_up and event["event"] == "final":
                        return
                    yield service_pb2.ModelStreamInferResponse(
                        infer_response=_event_response(request, event)
                    )
                if self.worker.trailing_empty:
                    yield service_pb2.ModelStreamInferResponse(
                        infer_response=_response(request, {})
                    )
                answered.set()
            except (MaskserveError, _Fault) as error:
                answered.set()
                text = f"in ensemble 'edit_pipeline', {error}"
                yield service_pb2.ModelStreamInferResponse(error_message=text)
            except _Withdrawn:
                return

    def _watch(self, context: grpc.ServicerContext) -> threading.Event:
        """An event to set after the answer. A call that ends before it counts as withdrawn."""
        answered = threading.Event()

        def ended() -> None:
            (self.worker.finished if answered.is_set() else self.worker.withdrawn).set()

        if not context.add_callback(ended):
            ended()  # it has ended already
        return answered

    def _edit(self, request: Any, context: grpc.ServicerContext) -> Iterator[dict[str, Any]]:
        inputs = _inputs(request)
        self.worker.requests.append({**inputs, "model_name": request.model_name.encode()})
        settings = parse_settings(inputs["SETTINGS"])
        spec = replace(FILL_SPEC, edit_kinds=self.worker.edit_kinds)
        kind = edit_kind(settings, image=bool(inputs["IMAGE"]), mask=bool(inputs["MASK"]))
        accepted = accept_edit(settings, inputs["PROMPT"], spec, CONFIG, kind=kind)
        references = _references(inputs)
        check_references([inputs["IMAGE"], *references], settings, self.worker.most_pictures)
        edit = prepare_edit(
            inputs["IMAGE"],
            inputs["MASK"],
            accepted,
            spec,
            CONFIG,
            self.worker.get,
            references=references,
        )
        # Not earlier: an interrupt in between would hide the reason for refusing an edit.
        self.worker.started.set()
        edit_settings = edit.request.settings
        steps = edit_settings.num_inference_steps
        assert steps is not None
        for step in range(1, steps + 1):
            self._wait(context)
            if self.worker.error and step > self.worker.error_at_step:
                raise _Fault(self.worker.error)
            if step == steps:
                break  # as in a worker: the picture shows it
            progress = {"step": step, "steps": steps, "request_id": edit.request.request_id}
            if edit_settings.progress:
                yield {"event": "progress", **progress, "image": b""}
            if edit_settings.preview_every and step % edit_settings.preview_every == 0:
                yield {"event": "preview", **progress, "image": _painted(edit)}
        yield self._final(edit, steps)

    def _final(self, edit: PreparedEdit, steps: int) -> dict[str, Any]:
        total = edit.edit_mask.size // FILL_SPEC.token_pixels**2
        active = active_tokens(edit.edit_mask, FILL_SPEC.token_pixels)
        return {
            "event": "final",
            "warnings": edit.request.warnings,
            "step": steps,
            "steps": steps,
            "request_id": edit.request.request_id,
            "seed": edit.request.seed,
            "worker": CONFIG.worker,
            "model": "demo",
            "kind": edit.request.kind,
            "template_id": edit.request.template_id or None,
            "active_tokens": len(active),
            "total_tokens": total,
            "computed_tokens": steps * total,
            "cache": "off",
            "timings_ms": {"preprocess": 1.0, "denoise": 2.0},
            "image": b"garbage" if self.worker.garble else _painted(edit),
        }

    def _wait(self, context: grpc.ServicerContext) -> None:
        now_s = time.monotonic() + self.worker.step_s
        while True:
            if not context.is_active():
                raise _Withdrawn
            left = now_s - time.monotonic()
            if left <= 0:
                return
            time.sleep(min(left, 0.01))

    def _control(self, raw: bytes) -> bytes:
        match json.loads(raw):
            case {"op": "status"}:
                return json.dumps(STATUS).encode()
            case {"op": "templates"}:
                listed: list[dict[str, Any]] = [
                    {"template_id": name, "registered": True, "entries": []}
                    for name in sorted(self.worker.templates)
                ]
                listed += [
                    {
                        "template_id": name,
                        "registered": False,
                        "entries": [{"tier": "disk", "bytes": 2**20}],
                    }
                    for name in self.worker.cached_only
                ]
                return json.dumps({"templates": listed}).encode()
            case {"op": "register", "image": str(image)}:
                decoded = decode_image(image.encode(), "OP.image", CONFIG.limits)
                name = decoded.template_id
                self.worker.templates[name] = decoded.encoded
                return json.dumps({"template_id": name}).encode()
            case {"op": "evict" | "pin" | "unpin" as op, "template_id": str(name)}:
                if name not in self.worker.templates:
                    raise InvalidRequest("OP.template_id", "is not registered")
                if op == "evict":
                    del self.worker.templates[name]
                return json.dumps({"template_id": name}).encode()
            case {"op": "cancel", "request_id": str(name)}:
                return json.dumps({"cancelled": name == "in-flight"}).encode()
            case {"op": str(op), **rest} if op.startswith("adapter") and self.worker.adapters:
                done = {
                    "adapters": self.worker.adapters.overview,
                    "adapter_check": self.worker.adapters.load,
                    "adapter_load": self.worker.adapters.load,
                    "adapter_evict": self.worker.adapters.evict,
                }[op]
                return json.dumps(done(**rest)).encode()
            case {"op": "drain"}:
                return json.dumps({"draining": True, "in_flight": 3}).encode()
        raise InvalidRequest("OP.op", "is not known", "status")


class _Fault(Exception):
    """An error text for the client."""


STATUS = {
    "worker": "fake-0",
    "model": "demo",
    "state": "ready",
    "max_rows": 8,
    "max_waiting": 256,
    "alive": True,
    "running": [
        {
            "request_id": "r1",
            "kind": "dense",
            "active_tokens": 256,
            "total_tokens": 256,
            "steps_left": 3,
        }
    ],
    "waiting": [],
    "templates": {"host": ["a" * 32]},
    "tier_bytes": {"host": 2**20},
}


class FakeServer:
    """Runs a FakeWorker: `with FakeServer() as worker: … worker.url …`."""

    def __init__(self, **behaviour: Any) -> None:
        self.worker = replace(FakeWorker(), **behaviour)
        self._server = grpc.server(futures.ThreadPoolExecutor(8))
        service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(
            _Service(self.worker), self._server
        )
        port = self._server.add_insecure_port("127.0.0.1:0")
        self.worker.url = f"127.0.0.1:{port}"

    def __enter__(self) -> FakeWorker:
        self._server.start()
        return self.worker

    def __exit__(self, *_: object) -> None:
        self._server.stop(0).wait()


def _painted(edit: PreparedEdit) -> bytes:
    pixels = np.empty((*edit.edit_mask.shape, 3), np.uint8)
    pixels[:] = PAINT
    return finish_edit(pixels, edit.context)


def _inputs(request: Any) -> dict[str, bytes]:
    tensors = {}
    for tensor, raw in zip(request.inputs, request.raw_input_contents, strict=True):
        first, *more = bytes_tensor.elements(raw, 16)
        assert (tensor.datatype, list(tensor.shape)) == ("BYTES", [1 + len(more)])
        assert not more or tensor.name == "IMAGE"
        tensors[tensor.name] = first
        tensors |= {f"IMAGE[{index}]": picture for index, picture in enumerate(more, start=1)}
    return tensors


def _references(inputs: dict[str, bytes]) -> list[bytes]:
    return [picture for name, picture in inputs.items() if name.startswith("IMAGE[")]


def _event_response(request: Any, event: dict[str, Any]) -> Any:
    image = event.pop("image")
    return _response(request, {"IMAGE": image, "META": json.dumps(event).encode()})


def _response(request: Any, outputs: dict[str, bytes]) -> Any:
    response = service_pb2.ModelInferResponse(model_name=request.model_name, id=request.id)
    for name, value in outputs.items():
        tensor = response.outputs.add(name=name, datatype="BYTES")
        tensor.shape.append(1)
        response.raw_output_contents.append(struct.pack("<I", len(value)) + value)
    return response
