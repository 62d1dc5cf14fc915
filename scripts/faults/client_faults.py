"""Clients that leave: how many steps their rows go on for."""

from __future__ import annotations

import base64
import http.client
import json
import queue
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import tritonclient.grpc as triton_grpc

from faults.site import Site, tensors, until

STEPS_BAR = 2
_PATIENCE_S = 60.0
_CHILD = """
import json, sys
import numpy, tritonclient.grpc as grpc
url, model, values = json.load(sys.stdin)
client = grpc.InferenceServerClient(url)
made = []
for name, value in values.items():
    tensor = grpc.InferInput(name, [1], "BYTES")
    tensor.set_data_from_numpy(numpy.array([value.encode()], numpy.object_))
    made.append(tensor)
if model == "edit":
    client.infer(model, made)
client.start_stream(lambda result, error: None)
client.async_stream_infer(model, made)
import time; time.sleep(600)
"""


@dataclass(frozen=True, slots=True)
class ClientFault:
    """A way for a client to leave: starts an edit, yields, and leaves when asked to go on."""

    name: str
    leave: Callable[[Site, str, ExitStack], Callable[[], None]]
    """Starts the edit of this name and returns what makes the client leave it."""


@dataclass(frozen=True, slots=True)
class ClientTrial:
    """What came of it, beside seven other edits."""

    fault: str
    steps: int
    """Steps that the row took after the client had left."""
    freed_s: float
    step_ms: float
    """Mean time of a step meanwhile."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def client_faults() -> list[ClientFault]:
    """Every way that Triton lets a server see."""
    return [
        ClientFault("gRPC call cancelled", _cancel_unary),
        ClientFault("gRPC deadline passes", _deadline),
        ClientFault("gRPC client killed", _kill_unary),
        ClientFault("stream cancelled", _cancel_stream),
        ClientFault("streaming client killed", _kill_stream),
        ClientFault("`/generate_stream` with progress closed", _close_events),
        ClientFault("`control` cancel", _control_cancel),
    ]


@contextmanager
def full_batch(site: Site, rows: int) -> Iterator[None]:
    """`rows` long edits beside, so that a step is a step of a full batch."""
    with triton_grpc.InferenceServerClient(site.worker.grpc_url) as client:
        names = [f"beside-{i}-{time.monotonic_ns()}" for i in range(rows)]
        calls = [
            client.async_infer(
                "edit", tensors(triton_grpc, site.inputs(name)), lambda result, error: None
            )
            for name in names
        ]
        until("the batch is full", lambda: all(site.row(name) for name in names), _PATIENCE_S)
        yield
        for call in calls:
            call.cancel()
    until("the batch is empty", lambda: not site.status().running, _PATIENCE_S)  # type: ignore[union-attr]


def try_client_fault(site: Site, fault: ClientFault) -> ClientTrial:
    """Start an edit among others, have its client leave, and follow its row in the record."""
    name = f"left-{time.monotonic_ns()}"
    with ExitStack() as stack:
        leave = fault.leave(site, name, stack)
        until("the edit runs", lambda: site.row(name), _PATIENCE_S)
        until("it has taken a step", lambda: site.row(name).steps_left < site.steps, _PATIENCE_S)
        leave()
        began, before = time.monotonic(), site.row(name)
        counters = site.status().counters  # type: ignore[union-attr]
        last = before
        while (row := site.row(name)) is not None:
            last = row
            if time.monotonic() - began > _PATIENCE_S:
                raise TimeoutError(f"{fault.name}: the row was not freed")
            time.sleep(0.001)
        freed_s = time.monotonic() - began
        after = site.status().counters  # type: ignore[union-attr]
    taken = after["steps_total"] - counters["steps_total"]
    seconds = after["step_seconds_total"] - counters["step_seconds_total"]
    return ClientTrial(
        fault=fault.name,
        # The record is written before each step: the last one seen was still to be taken.
        steps=before.steps_left - last.steps_left + 1 if before is not None else 0,
        freed_s=round(freed_s, 3),
        step_ms=round(1e3 * seconds / taken, 1) if taken else 0.0,
    )


def _grpc(site: Site, stack: ExitStack) -> triton_grpc.InferenceServerClient:
    return stack.enter_context(triton_grpc.InferenceServerClient(site.worker.grpc_url))


def _cancel_unary(site: Site, name: str, stack: ExitStack) -> Callable[[], None]:
    made = tensors(triton_grpc, site.inputs(name))
    call = _grpc(site, stack).async_infer("edit", made, lambda result, error: None)
    return lambda: call.cancel()


def _deadline(site: Site, name: str, stack: ExitStack) -> Callable[[], None]:
    made, passed = tensors(triton_grpc, site.inputs(name)), queue.Queue[Any]()
    _grpc(site, stack).async_infer(
        "edit", made, lambda result, error: passed.put(error), client_timeout=3.0
    )
    return lambda: passed.get(timeout=_PATIENCE_S)


def _cancel_stream(site: Site, name: str, stack: ExitStack) -> Callable[[], None]:
    client = _grpc(site, stack)
    client.start_stream(lambda result, error: None)
    client.async_stream_infer("edit_stream", tensors(triton_grpc, site.inputs(name)))
    return lambda: client.stop_stream(cancel_requests=True)


def _kill_unary(site: Site, name: str, stack: ExitStack) -> Callable[[], None]:
    return _child(site, name, stack, "edit")


def _kill_stream(site: Site, name: str, stack: ExitStack) -> Callable[[], None]:
    return _child(site, name, stack, "edit_stream")


def _child(site: Site, name: str, stack: ExitStack, model: str) -> Callable[[], None]:
    """A client in a process of its own, to be killed."""
    child = subprocess.Popen([sys.executable, "-c", _CHILD], stdin=subprocess.PIPE, text=True)
    stack.callback(child.wait)
    stack.callback(child.kill)
    assert child.stdin is not None
    json.dump((site.worker.grpc_url, model, _texts(site, name)), child.stdin)
    child.stdin.close()
    return child.kill


def _close_events(site: Site, name: str, stack: ExitStack) -> Callable[[], None]:
    host = site.worker.http_url.removeprefix("http://")
    connection = http.client.HTTPConnection(host, timeout=_PATIENCE_S)
    stack.callback(connection.close)
    # Triton looks at the connection when it writes to it: without progress it would see nothing.
    body = json.dumps(_texts(site, name, progress=True))
    connection.request("POST", "/v2/models/edit_stream/generate_stream", body)
    return connection.close


def _control_cancel(site: Site, name: str, stack: ExitStack) -> Callable[[], None]:
    client = _grpc(site, stack)
    client.async_infer("edit", tensors(triton_grpc, site.inputs(name)), lambda result, error: None)
    operation = json.dumps({"op": "cancel", "request_id": name}).encode()
    return lambda: client.infer("control", tensors(triton_grpc, {"OP": operation}))


def _texts(site: Site, name: str, **settings: Any) -> dict[str, str]:
    """The inputs as JSON can hold them: images in base64."""
    return {
        key: base64.b64encode(value).decode() if key in ("IMAGE", "MASK") else value.decode()
        for key, value in site.inputs(name, **settings).items()
    }
