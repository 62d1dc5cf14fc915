"""Open gRPC calls: each has a place, and is silent while the router waits for its next message."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import grpc.aio

from maskserve_common.errors import InvalidRequest, MaskserveError
from maskserve_router.config import Grpc
from maskserve_router.listeners.connection_limits import Places
from maskserve_router.metrics import Metrics

Read: TypeAlias = Callable[[], Awaitable[Any]]
"""Returns a call's next message, or `grpc.aio.EOF` after the last."""


class OpenCall:
    """One call; an async iterator over its messages.

    It raises the reason for which the router ended the call: DeadlineExceeded or RetryLater.
    """

    def __init__(self, read: Read, places: Places) -> None:
        self._read, self._places = read, places
        self._working = 0
        self._reader: asyncio.Task[Any] | None = None
        """The task that waits for the next message."""
        self._ended_for: MaskserveError | None = None

    def __aiter__(self) -> OpenCall:
        return self

    async def __anext__(self) -> Any:
        self._raise_if_ended()
        self._reader = reader = asyncio.current_task()
        try:
            message = await self._read()
        except asyncio.CancelledError:
            if reader is not None and self._ended_for is not None:
                reader.uncancel()
            self._raise_if_ended()
            raise
        finally:
            self._reader = None
        if message is grpc.aio.EOF:
            raise StopAsyncIteration
        return message

    async def only(self) -> Any:
        """Return the message of a call with one message.

        Raises:
            InvalidRequest: there is no message.
        """
        try:
            return await anext(self)
        except StopAsyncIteration:
            raise InvalidRequest("call", "has no message", "one") from None

    @contextmanager
    def working(self) -> Iterator[None]:
        """Count the call as active for the block."""
        self._working += 1
        if self._working == 1:
            self._places.mark(self, silent=False)
        try:
            yield
        finally:
            self._working -= 1
            if not self._working:
                self._places.mark(self, silent=True)

    def _raise_if_ended(self) -> None:
        if self._ended_for is not None:
            raise self._ended_for from None

    def end(self, reason: MaskserveError) -> None:
        """Let the iterator raise `reason`."""
        self._ended_for = reason
        if self._reader is not None:
            self._reader.cancel()


class OpenCalls(Places):
    """The open calls of a listener."""

    def __init__(self, bounds: Grpc, metrics: Metrics) -> None:
        super().__init__("calls", bounds.max_calls, bounds.silence_s, metrics, shared=True)

    @contextmanager
    def enter(self, client: str, read: Read) -> Iterator[OpenCall]:
        """Give a call a place for the block.

        Args:
            client: client of the call.
            read: reads its messages. (grpc's own iterator keeps the last message until Python looks
                for cycles.)

        Raises:
            RetryLater: the client has its limit, or other clients hold all places.
        """
        call = OpenCall(read, self)
        self.take(call, client)
        try:
            yield call
        finally:
            self.leave(call)
