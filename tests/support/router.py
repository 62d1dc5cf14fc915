"""A whole router over emulated workers, with real sockets. The workers answer, fail or die."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import cycle
from typing import Any

import grpc
import grpc.aio
from tritonclient.grpc import service_pb2 as pb

from maskserve_benchmarks.emulator.worker import EmulatedWorker
from maskserve_benchmarks.simulator.hardware import Hardware
from maskserve_common.imaging.containers import PNG_SIGNATURE
from maskserve_router.config import router_config_of
from maskserve_router.router import Router
from tests.support.router_requests import INFER, edit_request, mask_of

SIDE = 64
FAST = Hardware(dense_seconds=0.01)


class Faulty(EmulatedWorker):
    """A worker that fails its first edits in a way that the test chooses."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.fails = 0
        self.status = grpc.StatusCode.INTERNAL
        self.text = "[ENGINE_FAILED] the process of its denoiser has died"
        self.missing: str | None = None
        """A template that the worker lacks."""
        self.instead: bytes | None = None
        """Bytes that it answers edits with in place of a picture."""
        self.silent = False
        """Whether it answers no status requests, as if it were down."""
        self.templates: dict[str, dict[str, Any]] = {}
        """Registrations by template."""
        self.adapters: dict[str, Any] = {"adapters": []}
        """Its report about LoRAs."""
        self.holds_registrations = asyncio.Event()
        """Registrations wait until this is set."""
        self.holds_registrations.set()
        self.registering = 0
        """Number of registrations so far."""
        self.refuses: grpc.StatusCode | None = None
        """Status code with which registrations fail."""
        self.progress = 0
        """Number of events that it sends before the answer or the error of a stream."""
        self.hangs_up = 0
        """Number of streams that it ends without an answer and without an error."""
        self.fails_answered = False
        """Whether it ends streams with an error after their answer."""
        self.keeps_ids = False
        """Whether it refuses an id a second time, like a worker that still holds a
        withdrawn edit.
        """
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, Any]] = []
        self._awake = asyncio.Event()
        self._awake.set()
        self._working = asyncio.Event()
        self._working.set()

    def hold(self) -> None:
        """Accept edits and let none of them advance until `let_go`."""
        self._working.clear()

    def let_go(self) -> None:
        self._working.set()

    def freeze(self) -> None:
        """Answer nothing until `thaw`, like a stopped process."""
        self._awake.clear()

    def thaw(self) -> None:
        self._awake.set()

    def edit_ids(self) -> set[str]:
        """Ids of the edits that run or wait here."""
        return set(self._edits)

    def control_answer(self, operation: dict[str, Any]) -> bytes:
        match operation:
            case {"op": "status"} if self.silent:
                return b""
            case {"op": "register", "image": image}:
                name = hashlib.sha256(image.encode()).hexdigest()[:32]
                self.templates[name] = operation
                return json.dumps({"template_id": name}).encode()
            case {"op": "evict", "template_id": name}:
                self.templates.pop(name, None)
                return json.dumps({"template_id": name}).encode()
            case {"op": "adapters"}:
                return json.dumps({"problem": "", **self.adapters}).encode()
            case {"op": "templates"}:
                names = sorted(self.templates)
                listed = [{"template_id": n, "registered": True, "entries": []} for n in names]
                return json.dumps({"templates": listed}).encode()
        return super().control_answer(operation)

    async def _infer(self, raw: bytes, context: Any) -> bytes:
        await self._awake.wait()
        message = pb.ModelInferRequest.FromString(raw)
        if b'"register"' in message.raw_input_contents[0]:
            self.registering += 1
            await self.holds_registrations.wait()
            if self.refuses is not None:
                await context.abort(self.refuses, "not now")
        if message.model_name != "control":
            self.headers.append(dict(context.invocation_metadata()))
            place = [tensor.name for tensor in message.inputs].index("SETTINGS")
            self.requests.append(json.loads(message.raw_input_contents[place][4:]))
            if (
                self.keeps_ids
                and [e["request_id"] for e in self.requests].count(self.requests[-1]["request_id"])
                > 1
            ):
                text = "[INVALID_REQUEST] SETTINGS.request_id: names an edit that is in flight"
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, text)
            await self._working.wait()
            response = self.requests[-1].get("template_id")
            if self.missing is not None and response == self.missing:
                text = "[TEMPLATE_NOT_FOUND] it is not here"
                await context.abort(grpc.StatusCode.NOT_FOUND, text)
            if self.fails:
                self.fails -= 1
                await context.abort(self.status, self.text)
            if self.instead is not None:
                return self.instead
        answer = await super()._infer(raw, context)
        await self._awake.wait()
        return answer

    async def _stream(self, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        async for raw in requests:
            for step in range(1, self.progress + 1):
                meta = {"event": "progress", "step": step, "steps": self.progress}
                yield _event({"IMAGE": b"", "META": json.dumps(meta).encode()})
            if self.hangs_up:
                self.hangs_up -= 1
                return
            answer = pb.ModelInferResponse.FromString(await self._infer(raw, context))
            yield pb.ModelStreamInferResponse(infer_response=answer).SerializeToString()
            if self.fails_answered:
                await context.abort(self.status, self.text)


def _event(outputs: dict[str, bytes]) -> bytes:
    response = pb.ModelStreamInferResponse()
    for name, value in outputs.items():
        response.infer_response.outputs.add(name=name, datatype="BYTES", shape=[1])
        raw = len(value).to_bytes(4, "little") + value
        response.infer_response.raw_output_contents.append(raw)
    encoded: bytes = response.SerializeToString()
    return encoded


@asynccontextmanager
async def cluster(
    hardware: Hardware | None = None,
    models: tuple[str, ...] = ("flux", "flux"),
    max_rows: int = 8,
    answer: bytes = bytes(100),
    kinds: tuple[type[Faulty], ...] = (Faulty, Faulty),
    **tables: Any,
) -> AsyncIterator[tuple[Router, list[Faulty]]]:
    workers = [
        kind(f"w{i}", hardware, answer=answer, max_rows=max_rows, model=model)
        for i, (kind, model) in enumerate(zip(cycle(kinds), models, strict=False))
    ]
    for worker in workers:
        await worker.start()
    try:
        config = {
            "listen": {"http_port": 0, "grpc_port": 0, "admin_port": 0},
            **tables,
            "workers": {
                "poll_timeout_s": 2.0,
                **tables.get("workers", {}),
                "addresses": [worker.address for worker in workers],
            },
        }
        listen = {"http_port": 0, "grpc_port": 0, "admin_port": 0, **tables.get("listen", {})}
        async with Router(router_config_of({**config, "listen": listen})) as router:
            yield router, workers
    finally:
        for worker in workers:
            await worker.stop()


def edit(active: int = 100, **settings: Any) -> bytes:
    return edit_request(b"", mask_of(active, SIDE), template_id="0" * 32, **settings)


@asynccontextmanager
async def calling(router: Router) -> AsyncIterator[Any]:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{router.grpc.port}") as channel:
        yield channel.unary_unary(INFER)


async def until(condition: str, holds: Any) -> None:
    for _ in range(500):
        if holds():
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"never: {condition}")


def picture(content: str) -> str:
    """Text that begins like a PNG. A router checks no more."""
    return base64.b64encode(PNG_SIGNATURE + content.encode()).decode()


def control_request(op: str, **fields: str) -> bytes:
    message = pb.ModelInferRequest(model_name="control")
    message.inputs.add(name="OP", datatype="BYTES", shape=[1])
    value = json.dumps({"op": op, **fields}).encode()
    message.raw_input_contents.append(len(value).to_bytes(4, "little") + value)
    encoded: bytes = message.SerializeToString()
    return encoded


def http_edit(path: str = "/v2/models/edit/infer", version: str = "1.1") -> bytes:
    """The HTTP request of an edit."""
    message = pb.ModelInferRequest.FromString(edit())
    inputs = [
        {
            "name": tensor.name,
            "datatype": "BYTES",
            "shape": [1],
            "parameters": {"binary_data_size": len(raw)},
        }
        for tensor, raw in zip(message.inputs, message.raw_input_contents, strict=True)
    ]
    head = json.dumps({"inputs": inputs}).encode()
    body = head + b"".join(message.raw_input_contents)
    lines = (
        f"POST {path} HTTP/{version}",
        "Host: x",
        f"Content-Length: {len(body)}",
        f"Inference-Header-Content-Length: {len(head)}",
    )
    return "\r\n".join((*lines, "", "")).encode() + body
