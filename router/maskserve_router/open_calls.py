"""gRPC calls that are open: whose they are, how many there may be, and how long one is silent.

A call is silent while the router waits for its next message and does nothing for it. Silence costs
the client nothing, so what it may hold is bounded here: when all places are taken, a newcomer gets
that of the call which has been silent longest, of the client with the most silent ones.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import Any

from maskserve_core.errors import DeadlineExceeded, MaskserveError
from maskserve_router.config import Grpc
from maskserve_router.failures import RetryLater
from maskserve_router.metrics import Metrics

_RETRY_S = 1.0


class OpenCall:
    """One call; an async iterator over its messages.

    It raises what the router ended the call for: DeadlineExceeded or RetryLater.
    """

    def __init__(self, requests: AsyncIterator[Any], told: Callable[[OpenCall, bool], None]):
        self._requests, self._told = requests, told
        self._working = 0
        self._reading: asyncio.Future[Any] | None = None
        self._ended_for: MaskserveError | None = None

    def __aiter__(self) -> OpenCall:
        return self

    async def __anext__(self) -> Any:
        if self._ended_for is not None:
            raise self._ended_for
        self._reading = asyncio.ensure_future(anext(self._requests))
        try:
            return await self._reading
        except asyncio.CancelledError:
            if self._ended_for is not None:
                raise self._ended_for from None
            raise

    @contextmanager
    def working(self) -> Iterator[None]:
        """Something is done for the client, which may be silent meanwhile."""
        self._working += 1
        if self._working == 1:
            self._told(self, False)
        try:
            yield
        finally:
            self._working -= 1
            if not self._working:
                self._told(self, True)

    def end(self, reason: MaskserveError) -> None:
        """Have its iterator raise `reason`."""
        self._ended_for = reason
        if self._reading is not None:
            self._reading.cancel()


class OpenCalls:
    """Counts calls by client; used from the event loop only."""

    def __init__(self, bounds: Grpc, metrics: Metrics) -> None:
        self._bounds, self._metrics = bounds, metrics
        self._open: dict[OpenCall, str] = {}
        """Call -> its client."""
        self._of: dict[str, int] = {}
        """Client -> its open calls."""
        self._silent: dict[str, dict[OpenCall, asyncio.TimerHandle]] = {}
        """Client -> its silent calls, the longest silent first, and what ends each."""

    @contextmanager
    def enter(self, client: str, requests: AsyncIterator[Any]) -> Iterator[OpenCall]:
        """A call is open.

        Args:
            client: whose it is.
            requests: its messages, as they come.

        Raises:
            RetryLater: the client has as many as it may, or all places are taken by others.
        """
        if self._of.get(client, 0) >= self._bounds.calls_per_client:
            self._refuse(f"{self._bounds.calls_per_client} calls of this client are open already")
        if len(self._open) >= self._bounds.max_calls:
            self._make_room(client)
        call = OpenCall(requests, self._told)
        self._open[call] = client
        self._of[client] = self._of.get(client, 0) + 1
        self._told(call, True)
        try:
            yield call
        finally:
            self._leave(call)

    def _told(self, call: OpenCall, silent: bool) -> None:
        """A call has become silent, or is so no longer."""
        client = self._open.get(call)
        if client is None:
            return  # it has been ended
        calls = self._silent.setdefault(client, {})
        if silent:
            loop, seconds = asyncio.get_running_loop(), self._bounds.silence_s
            why = DeadlineExceeded(f"the call sent nothing for {seconds:g} s")
            calls[call] = loop.call_later(seconds, self._end, call, why)
        else:
            calls.pop(call).cancel()
            if not calls:
                del self._silent[client]

    def _make_room(self, client: str) -> None:
        most = max(self._silent, key=lambda name: len(self._silent[name]), default=client)
        # One's own calls do not give way: a burst that is being sent would end itself.
        if most == client or len(self._silent[most]) <= len(self._silent.get(client, ())):
            self._refuse(f"{len(self._open)} calls are open already")
        why = "silent, while other clients needed its place; try again"
        self._end(next(iter(self._silent[most])), RetryLater(f"the call was {why}", _RETRY_S))
        self._metrics.rejections.labels("silent").inc()

    def _end(self, call: OpenCall, reason: MaskserveError) -> None:
        self._leave(call)
        call.end(reason)

    def _leave(self, call: OpenCall) -> None:
        client = self._open.get(call)
        if client is None:
            return
        if call in self._silent.get(client, ()):
            self._told(call, False)
        del self._open[call]
        self._of[client] -= 1
        if not self._of[client]:
            del self._of[client]

    def _refuse(self, message: str) -> None:
        self._metrics.rejections.labels("calls").inc()
        raise RetryLater(f"{message}; try again later", _RETRY_S)
