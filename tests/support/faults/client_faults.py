"""Clients that leave, and the time until their rows are free."""

from __future__ import annotations

import http.client
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass

from tritonclient.utils import InferenceServerException

from maskserve_benchmarks.checkout import CHECKOUT
from maskserve_benchmarks.triton_calls import CLIENT_TIMEOUT, Grpc, Stream, reason, texts
from tests.support.faults.worker_site import Site, until

_PATIENCE_S = 60.0
# Far beyond the first step of an edit, and far before its last.
_DEADLINE_S = 1.0
_BENCHMARKS = CHECKOUT / "benchmarks"
_CHILD = """
import json, sys, time
from maskserve_benchmarks.triton_calls import Grpc, Stream
url, front, texts = json.load(sys.stdin)
inputs = {name: text.encode() for name, text in texts.items()}
if front == "edit":
    Grpc(url).edit(inputs)
opened = Stream(url)
opened.send(inputs)
time.sleep(600)
"""


@dataclass(frozen=True, slots=True)
class ClientFault:
    """A way for a client to leave."""

    name: str
    leave: Callable[[Site, str, ExitStack], Callable[[], object]]
    """Starts the edit of this name, and returns a call that makes its client leave."""


def client_faults() -> list[ClientFault]:
    """Every way to leave that Triton shows to a server."""
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
    """Run `rows` long edits at the same time, so that a step is a step of a full batch."""
    with closing(Grpc(site.worker.grpc_url)) as client:
        names = [f"beside-{i}-{time.monotonic_ns()}" for i in range(rows)]
        edits = [client.begin(site.inputs(name)) for name in names]
        until("the batch is full", lambda: all(site.row(name) for name in names), _PATIENCE_S)
        yield
        for edit in edits:
            edit.call.cancel()
    until("the batch is empty", lambda: not site.status().running, _PATIENCE_S)  # type: ignore[union-attr]


def freed_s(site: Site, fault: ClientFault) -> float:
    """Start an edit, make its client leave, and watch the status record until the row is free.
    Returns the seconds.

    Raises:
        LookupError: the edit ended by itself, before the client's leaving had an effect.
        TimeoutError: its row did not come, or was not freed.
    """
    name = f"left-{time.monotonic_ns()}"
    with ExitStack() as stack:
        leave = fault.leave(site, name, stack)
        until("the edit runs", lambda: site.row(name), _PATIENCE_S)
        until("it has taken a step", lambda: _has_stepped(site, name), _PATIENCE_S)
        leave()
        began, last = time.monotonic(), None
        while (row := site.row(name)) is not None:
            last = row
            if time.monotonic() - began > _PATIENCE_S:
                raise TimeoutError(f"{fault.name}: the row was not freed")
            time.sleep(0.001)
        seconds = time.monotonic() - began
        if last is not None and last.steps_left <= 1:
            raise LookupError(f"{fault.name}: the row ran to its end")
    return seconds


def _has_stepped(site: Site, name: str) -> bool:
    row = site.row(name)
    if row is None:
        raise LookupError(f"the row of {name} is gone")
    return row.steps_left < site.steps


def _grpc(site: Site, stack: ExitStack) -> Grpc:
    return stack.enter_context(closing(Grpc(site.worker.grpc_url)))


def _cancel_unary(site: Site, name: str, stack: ExitStack) -> Callable[[], None]:
    edit = _grpc(site, stack).begin(site.inputs(name))
    return lambda: edit.call.cancel()


def _deadline(site: Site, name: str, stack: ExitStack) -> Callable[[], None]:
    edit = _grpc(site, stack).begin(site.inputs(name), timeout_s=_DEADLINE_S)

    def leave() -> None:
        try:
            edit.wait(_PATIENCE_S)
        except InferenceServerException as error:
            if reason(error) == CLIENT_TIMEOUT:
                return
            raise
        raise LookupError("the edit was done before its deadline")

    return leave


def _cancel_stream(site: Site, name: str, stack: ExitStack) -> Callable[[], None]:
    opened = stack.enter_context(closing(Stream(site.worker.grpc_url)))
    opened.send(site.inputs(name))
    return opened.cancel


def _kill_unary(site: Site, name: str, stack: ExitStack) -> Callable[[], None]:
    return _child(site, name, stack, "edit")


def _kill_stream(site: Site, name: str, stack: ExitStack) -> Callable[[], None]:
    return _child(site, name, stack, "edit_stream")


def _child(site: Site, name: str, stack: ExitStack, front: str) -> Callable[[], None]:
    """Start a client in its own process, and return a call that kills it."""
    child = subprocess.Popen(
        [sys.executable, "-c", _CHILD], cwd=_BENCHMARKS, stdin=subprocess.PIPE, text=True
    )
    stack.callback(child.wait)
    stack.callback(child.kill)
    assert child.stdin is not None
    json.dump((site.worker.grpc_url, front, texts(site.inputs(name))), child.stdin)
    child.stdin.close()
    return child.kill


def _close_events(site: Site, name: str, stack: ExitStack) -> Callable[[], None]:
    host = site.worker.http_url.removeprefix("http://")
    connection = http.client.HTTPConnection(host, timeout=_PATIENCE_S)
    stack.callback(connection.close)
    # Triton checks the connection only when it writes to it, so the edit sends progress.
    body = json.dumps(texts(site.inputs(name, progress=True)))
    connection.request("POST", "/v2/models/edit_stream/generate_stream", body)
    return connection.close


def _control_cancel(site: Site, name: str, stack: ExitStack) -> Callable[[], object]:
    client = _grpc(site, stack)
    client.begin(site.inputs(name))
    return lambda: client.control("cancel", request_id=name)
