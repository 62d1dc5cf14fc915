"""Errors of the client: the server's own tree, and what the network adds to it.

    MaskserveError                         maskserve_common.errors: what the server answers
     └── ServerUnavailable   UNAVAILABLE   nobody answered there, or the connection broke

This is the one place where texts and gRPC statuses become exceptions.
"""

from __future__ import annotations

import re

import grpc

from maskserve_common.errors import (
    AdapterNotFound,
    Cancelled,
    DeadlineExceeded,
    EngineFailed,
    InvalidRequest,
    MaskserveError,
    Overloaded,
    Refused,
    TemplateNotFound,
    split_code,
)

_PLAIN: dict[str, type[MaskserveError]] = {
    kind.code: kind
    for kind in (
        TemplateNotFound,
        AdapterNotFound,
        Refused,
        Overloaded,
        DeadlineExceeded,
        Cancelled,
        EngineFailed,
    )
}
# What gRPC says of a server that listens and does not speak it, such as Triton's HTTP port.
_NO_GRPC = re.compile("http1.x server|Failed parsing HTTP/2|failed to connect.*Socket closed")


class ServerUnavailable(MaskserveError):
    """No server answered at the URL, or the connection to it broke."""

    code = "UNAVAILABLE"


def from_text(text: str) -> MaskserveError:
    """The exception for an error text of the server; without a code it is EngineFailed."""
    code, message = split_code(text)
    if code != InvalidRequest.code:
        return _PLAIN[code](message)
    field, _, problem = message.partition(": ")
    return InvalidRequest(field, problem)


def from_rpc(error: grpc.RpcError, url: str) -> MaskserveError:
    """The exception for a failed call: what the server said, or else what the network did."""
    status, text = error.code(), error.details() or ""
    if f"[{split_code(text)[0]}]" in text:
        return from_text(text)
    if status is grpc.StatusCode.UNAVAILABLE:
        if _NO_GRPC.search(text):
            return ServerUnavailable(f"{url} does not speak gRPC; the gRPC address is wanted")
        return ServerUnavailable(f"{url}: {text}")
    if status is grpc.StatusCode.RESOURCE_EXHAUSTED:  # gRPC's own bound, before any of our code
        return Overloaded(f"{url}: {text}")
    if status is grpc.StatusCode.DEADLINE_EXCEEDED:
        return DeadlineExceeded(f"{url}: no answer within the timeout")
    if status is grpc.StatusCode.CANCELLED:
        return Cancelled(f"{url}: the call was cancelled")
    return EngineFailed(f"{url}: {status.name}: {text}")
