"""Answers of the HTTP listeners: messages and errors as JSON, with their status."""

from __future__ import annotations

import asyncio
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterable,
    Mapping,
    Sequence,
)
from contextlib import ExitStack, suppress
from typing import Any, TypeAlias, TypeVar

import msgspec
from google.protobuf.message import Message
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from maskserve_common.errors import MaskserveError
from maskserve_common.servers.failure import Failure
from maskserve_router.messages.failures import (
    drop_tracebacks,
    guarded,
    http_status,
    retry_after,
    text_of,
)
from maskserve_router.messages.json_values import values_of
from maskserve_router.scheduling.admission import EditRoom

JSON = "application/json"
T = TypeVar("T")
Parts: TypeAlias = AsyncIterator[bytes | memoryview]
_CHUNK_BYTES = 256 * 1024
Handler = Callable[[Request], Awaitable[Response]]


class ChunkedResponse(StreamingResponse):
    """An answer that is written in pieces, without a copy of the rest.

    `resources` is closed when all is written or the client has left.

    Args:
        parts: parts of the body.
        resources: resources of the answer.
        more: arguments of Response.
    """

    def __init__(self, parts: Parts, resources: ExitStack, **more: Any) -> None:
        super().__init__(_in_chunks(parts), **more)
        self._parts, self._resources = parts, resources

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with suppress(MaskserveError, Failure):  # too late to report; the body ends early
                await super().__call__(scope, receive, send)
        finally:
            if isinstance(self._parts, AsyncGenerator):
                await self._parts.aclose()
            self._resources.close()


async def _in_chunks(parts: Parts) -> AsyncIterator[bytes | memoryview]:
    async for part in parts:
        if len(part) <= _CHUNK_BYTES:
            yield part
            continue
        view = memoryview(part)
        for at in range(0, len(view), _CHUNK_BYTES):
            yield view[at : at + _CHUNK_BYTES]


async def _iterate(parts: Iterable[bytes | memoryview]) -> Parts:
    """Yield parts that are all in memory."""
    for part in parts:
        yield part


def whole_answer(
    parts: Sequence[bytes | memoryview],
    room: EditRoom,
    resources: ExitStack,
    headers: Mapping[str, str],
    kind: str = JSON,
) -> Response:
    """Return a complete answer; its room is given back when it is written.

    Args:
        parts: parts of its body.
        room: its memory.
        resources: closes the room.
        headers: headers beside its length.
        kind: its content type.
    """
    size = sum(map(len, parts))
    room.resize(size)
    all_headers = {**headers, "content-length": str(size)}
    return ChunkedResponse(
        _iterate(parts), resources.pop_all(), headers=all_headers, media_type=kind
    )


def error_boundary(handler: Handler) -> Handler:
    """Wrap a handler so that its errors become answers."""

    async def answer(request: Request) -> Response:
        return await response_or_error(handler(request), error_response)

    return answer


async def response_or_error(
    work: Awaitable[Response],
    on_error: Callable[[MaskserveError | Failure], Response],
    request_id: str = "",
) -> Response:
    """Return the answer of a handler, or that of its error.

    Args:
        work: the handler's work.
        on_error: returns the answer of an error.
        request_id: id for the log of an unexpected error.
    """
    try:
        return await work
    except ClientDisconnect:
        return Response(status_code=499)
    except (MaskserveError, Failure) as error:
        return on_error(error)
    except Exception as error:
        return on_error(guarded(request_id, error))


_UNKNOWN_PATH = ("not_found_error", "not_found")
_WRONG_METHOD = ("invalid_request_error", "method_not_allowed")
"""OpenAI's error type and code for a missing path or method."""


async def http_exception_response(request: Request, error: Exception) -> Response:
    """Return Starlette's own errors as JSON: below `/v1` in OpenAI's form, else in KServe's."""
    assert isinstance(error, HTTPException)
    detail: Any = f"{error.detail}: {request.method} {request.url.path}"[:300]
    if request.url.path.startswith("/v1/"):
        kind, code = _UNKNOWN_PATH if error.status_code == 404 else _WRONG_METHOD
        detail = {"message": detail, "type": kind, "param": None, "code": code}
    return Response(msgspec.json.encode({"error": detail}), error.status_code, error.headers, JSON)


def error_response(error: MaskserveError | Failure) -> Response:
    seconds = retry_after(error)
    headers = {} if seconds is None else {"retry-after": str(seconds)}
    return Response(error_json(error), http_status(error), headers, JSON)


def error_json(error: MaskserveError | Failure) -> bytes:
    drop_tracebacks(error)
    return msgspec.json.encode({"error": text_of(error)})


def json_response(message: Message) -> Response:
    return Response(msgspec.json.encode(values_of(message)), media_type=JSON)


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Run `work` and return its result; cancel it when the client leaves.

    Raises:
        ClientDisconnect: the client left.
    """
    task = asyncio.create_task(work)
    disconnection = asyncio.create_task(_disconnected(request))
    try:
        await asyncio.wait((task, disconnection), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        for waiter in (task, disconnection):
            waiter.cancel()
        await asyncio.gather(task, disconnection, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
