"""Errors of the client: the server's errors, and those of the network.

    MaskserveError                         maskserve_common.errors: errors of the server
     └── ServerUnavailable   UNAVAILABLE   no answer, or the connection broke

Only this module turns texts and gRPC statuses into exceptions.
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
# gRPC's errors for a server that listens but does not speak gRPC, such as Triton's HTTP port.
_NO_GRPC = re.compile("http1.x server|Failed parsing HTTP/2|failed to connect.*Socket closed")


class ServerUnavailable(MaskserveError):
    """No server answered at the URL, or the connection to it broke."""

    code = "UNAVAILABLE"


def from_text(text: str) -> MaskserveError:
    """Return the exception for an error text of the server; without a code, EngineFailed."""
    code, message = split_code(text)
    if code != InvalidRequest.code:
        return _PLAIN[code](message)
    field, _, problem = message.partition(": ")
    return InvalidRequest(field, problem)


def from_rpc(error: grpc.RpcError, url: str) -> MaskserveError:
    """Return the exception for a failed call: the server's error, or else the network's."""
    status, text = error.code(), error.details() or ""
    if f"[{split_code(text)[0]}]" in text:
        return from_text(text)
    if status is grpc.StatusCode.UNAVAILABLE:
        if _NO_GRPC.search(text):
            return ServerUnavailable(f"{url} does not speak gRPC; give the gRPC address")
        return ServerUnavailable(f"{url}: {text}")
    if status is grpc.StatusCode.RESOURCE_EXHAUSTED:  # gRPC's own limit, before any of our code
        return Overloaded(f"{url}: {text}")
    if status is grpc.StatusCode.DEADLINE_EXCEEDED:
        return DeadlineExceeded(f"{url}: no answer within the timeout")
    if status is grpc.StatusCode.CANCELLED:
        return Cancelled(f"{url}: the call was cancelled")
    return EngineFailed(f"{url}: {status.name}: {text}")
