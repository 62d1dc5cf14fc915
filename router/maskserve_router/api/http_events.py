"""Streams of server-sent events: early headers, and comments while nothing happens.

Refusals by the router or a worker come within milliseconds and set the answer's status. After that
time, the client gets headers, and a comment every few seconds. Proxies therefore neither drop the
silent connection nor hold the answer back. Later errors are events.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from contextlib import ExitStack
from typing import Any, TypeAlias

from starlette.requests import Request
from starlette.responses import Response

from maskserve_common.errors import EngineFailed, MaskserveError
from maskserve_common.servers.failure import Failure
from maskserve_router.api.half_close import HALF_CLOSED
from maskserve_router.api.http_answers import ChunkedResponse, while_connected

_REFUSED_WITHIN_S = 0.5
_COMMENT_S = 10.0
_POLL_S = 1.0
"""Seconds between writes to a client that may have left."""
_COMMENT = b":\n\n"
_HEADERS = {
    "cache-control": "no-cache",
    "x-accel-buffering": "no",  # nginx then forwards each event at once
}
Event: TypeAlias = Iterable[bytes | memoryview]
"""One event, in parts."""


async def event_stream(
    request: Request,
    events: AsyncGenerator[Event, None],
    resources: ExitStack,
    error_event: Callable[[MaskserveError | Failure], bytes],
    headers: Mapping[str, str] | None = None,
) -> Response:
    """Return the answer to a request for a stream.

    Args:
        request: the request.
        events: the events in order; an exception ends the stream.
        resources: closed when all is written.
        error_event: makes the event of an error.
        headers: further headers of the answer.

    Raises:
        MaskserveError: the router's error before the first event.
        Failure: a worker's error before the first event.
        ClientDisconnect: the client has left.
    """
    first = asyncio.ensure_future(anext(events))
    try:
        await while_connected(request, _wait_for_first(first))
    except BaseException:
        await _end(first, events)
        raise
    return ChunkedResponse(
        _body_of(first, events, error_event, request.scope.get("state", {})),
        resources.pop_all(),
        headers={**_HEADERS, **(headers or {})},
        media_type="text/event-stream; charset=utf-8",
    )


async def _wait_for_first(first: asyncio.Future[Event]) -> None:
    """Wait for the first event, but not for long; raises its error."""
    finished_tasks, _ = await asyncio.wait({first}, timeout=_REFUSED_WITHIN_S)
    if finished_tasks:
        try:
            first.result()
        except StopAsyncIteration:
            raise EngineFailed("the stream ended before the answer") from None


async def _body_of(
    next_event: asyncio.Future[Event],
    events: AsyncGenerator[Event, None],
    error_event: Callable[[MaskserveError | Failure], bytes],
    state: Mapping[str, Any],
) -> AsyncGenerator[bytes | memoryview, None]:
    last_write_s = time.monotonic()
    try:
        while True:
            while not (await asyncio.wait({next_event}, timeout=min(_POLL_S, _COMMENT_S)))[0]:
                if HALF_CLOSED in state or time.monotonic() >= last_write_s + _COMMENT_S:
                    yield _COMMENT
                    last_write_s = time.monotonic()
            for part in next_event.result():
                yield part
            last_write_s = time.monotonic()
            next_event = asyncio.ensure_future(anext(events))
    except StopAsyncIteration:
        pass
    except (MaskserveError, Failure) as error:
        yield error_event(error)
    finally:
        await _end(next_event, events)


async def _end(next_event: asyncio.Future[Event], events: AsyncGenerator[Event, None]) -> None:
    next_event.cancel()
    await asyncio.gather(next_event, return_exceptions=True)
    await events.aclose()
