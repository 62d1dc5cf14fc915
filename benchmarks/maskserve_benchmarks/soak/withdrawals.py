"""Visits that end early: every way to withdraw an edit.

A fast edit may be answered nevertheless.
"""

from __future__ import annotations

import time
from typing import Any

from maskserve_benchmarks.soak.visitor import Visitor, must, operate, outcome
from maskserve_benchmarks.triton_calls import (
    CLIENT_CANCELLED,
    CLIENT_TIMEOUT,
    TIMEOUT_S,
    Http,
    Stream,
)

_SOON_S = 0.6
"""Time within which a visitor cancels."""


def grpc_cancel(visitor: Visitor) -> str:
    pending = visitor.grpc.begin(_long(visitor), TIMEOUT_S)
    time.sleep(visitor.rng.uniform(0.0, _SOON_S))
    pending.call.cancel()
    return outcome(pending.wait, CLIENT_CANCELLED, "CANCELLED")


def grpc_timeout(visitor: Visitor) -> str:
    limit = visitor.rng.uniform(0.01, _SOON_S)
    inputs = _long(visitor)
    return outcome(lambda: visitor.grpc.edit(inputs, limit), CLIENT_TIMEOUT, "CANCELLED")


def http_timeout(visitor: Visitor) -> str:
    """Close the connection of a client. Triton does not report that, so the edit is a short one."""
    client = Http(visitor.http_url, timeout_s=visitor.rng.uniform(0.02, _SOON_S / 2))
    inputs = visitor.inputs(visitor.rng.choice(visitor.album.hot), visitor.settings())
    try:
        return outcome(lambda: client.edit(inputs), CLIENT_TIMEOUT)
    finally:
        client.close()


def deadline(visitor: Visitor) -> str:
    inputs = _long(visitor, deadline_ms=visitor.rng.randint(1, int(1e3 * _SOON_S)))
    send = visitor.http.edit if visitor.rng.random() < 0.5 else visitor.grpc.edit
    # The edit is refused at once if it cannot be in time, either ever or behind the waiting edits.
    return outcome(lambda: send(inputs), "DEADLINE_EXCEEDED", "OVERLOADED")


def control_cancel(visitor: Visitor) -> str:
    name = visitor.settings()["request_id"]
    pending = visitor.grpc.begin(_long(visitor, request_id=name), TIMEOUT_S)
    time.sleep(visitor.rng.uniform(0.0, _SOON_S))
    # Before the edit has reached the engine there is nothing to cancel, so repeat the cancel.
    while not operate(visitor.grpc, "cancel", request_id=name)["cancelled"]:
        if pending.answered:
            break
        time.sleep(0.02)
    return outcome(pending.wait, "CANCELLED")


def stream_closed(visitor: Visitor) -> str:
    """Close a stream in the middle."""
    events = Stream(visitor.grpc_url)
    try:
        events.send(_long(visitor, progress=True, preview_every=5))
        for _ in range(visitor.rng.randint(0, 6)):
            must(events.next)
        events.cancel()
    finally:
        events.close()
    return "closed"


def _long(visitor: Visitor, **settings: Any) -> dict[str, bytes]:
    picture = visitor.rng.choice((visitor.rng.choice(visitor.album.hot), visitor.album.largest))
    all_settings = visitor.settings(num_inference_steps=visitor.long_steps, **settings)
    return visitor.inputs(picture, all_settings)
