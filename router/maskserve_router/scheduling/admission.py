"""Admission checks: edits, control operations and bytes in memory, in total and per key."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Self

from maskserve_common.shares import EVERYBODY, Full, Shares
from maskserve_router.config import AdmissionBounds
from maskserve_router.key_holder import KeyHolder
from maskserve_router.messages.failures import RetryLater
from maskserve_router.metrics import Metrics

_NEWEST_WEIGHT = 0.1
"""Weight of the newest gap in the mean time between the ends of two edits."""


class NoRoomInMemory(RetryLater):
    """The bytes do not fit into the memory budget now."""


class EditRoom:
    """Bytes that one edit holds of its client's share.

    It first counts the request as it is sent to the worker, and later the answer instead. It is
    held from before the edit is sent until the answer is written. Use it as a context manager.
    """

    def __init__(self, admission: Admission, client: KeyHolder) -> None:
        self._admission, self._client = admission, client
        self.size = 0

    async def take(self, size: int) -> None:
        """Reserve `size` bytes before they are in memory.

        Raises:
            NoRoomInMemory: there is no room for them.
        """
        self._admission.take_bytes(self._client, size)
        self.size += size

    def resize(self, size: int) -> None:
        """Set the size to the bytes that are in memory now, without a check."""
        self._admission.book_bytes(self._client, size - self.size)
        self.size = size

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.resize(0)


class Admission:
    """Counts edits and bytes under way. Use it from the event loop only."""

    def __init__(self, bounds: AdmissionBounds, metrics: Metrics) -> None:
        self._edits, self._bytes = Shares(bounds.max_edits), Shares(bounds.max_bytes)
        self._operations = Shares(bounds.max_edits)
        self._metrics = metrics
        self.closed = False
        """True while the router is stopping."""
        self._ended_at = 0.0
        self._gap_s = 0.0
        """Mean seconds between the ends of two edits."""

    @property
    def edits(self) -> int:
        """Number of edits admitted and not yet answered."""
        return self._edits.total

    @property
    def bytes(self) -> int:
        """Bytes of requests and answers under way, including requests that are still being read."""
        return self._bytes.total

    @contextmanager
    def edit(self, client: KeyHolder) -> Iterator[None]:
        """Count an edit as under way for the block.

        Raises:
            RetryLater: the router or the client already has its limit of edits.
        """
        if self.closed:
            self._refuse("stopping", "the router is stopping")
        self._take(self._edits, client, 1, "edits", "edits are under way", client.max_edits)
        try:
            yield
        finally:
            self._edits.give_back(client.scope)
            self._record_end(time.monotonic())

    @contextmanager
    def operation(self, client: KeyHolder, size: int) -> Iterator[None]:
        """Count an operation of `control` with `size` bytes as under way for the block.

        Raises:
            RetryLater: the router or the client already has its limit of operations or bytes.
        """
        self._take(self._operations, client, 1, "operations", "operations are under way")
        try:
            with self.hold(client, size):
                yield
        finally:
            self._operations.give_back(client.scope)

    @contextmanager
    def hold(self, client: KeyHolder, size: int) -> Iterator[None]:
        """Hold `size` bytes of a client's request for the block.

        Raises:
            NoRoomInMemory: the router or the client's share has no room for them.
        """
        self.take_bytes(client, size)
        try:
            yield
        finally:
            self.book_bytes(client, -size)

    def room(self, client: KeyHolder) -> EditRoom:
        """Return an empty room for the bytes of one of the client's edits."""
        return EditRoom(self, client)

    def take_bytes(self, client: KeyHolder, size: int) -> None:
        """Add `size` bytes to what the client holds.

        Raises:
            NoRoomInMemory: the router or the client's share has no room for them.
        """
        description = "bytes of requests and answers are under way"
        self._take(self._bytes, client, size, "bytes", description)

    def book_bytes(self, client: KeyHolder, size: int) -> None:
        """Add bytes that are already in memory, without a check; a negative `size` removes them."""
        if size > 0:
            self._bytes.book(client.scope, size)
        elif size:
            self._bytes.give_back(client.scope, -size)

    def most_bytes(self, client: KeyHolder) -> int:
        """Return the most bytes that the client can hold, which it can while nobody else holds
        any.
        """
        return _most(self._bytes, client)

    def most_edits(self, client: KeyHolder) -> int:
        """Return the most edits that the client can have under way."""
        return min(_most(self._edits, client), client.max_edits)

    def _take(
        self,
        shares: Shares,
        client: KeyHolder,
        size: int,
        reason: str,
        kind: str,
        most: float = math.inf,
    ) -> None:
        client_total = shares.in_use(client.scope)
        refuse = partial(
            self._refuse, error=NoRoomInMemory if shares is self._bytes else RetryLater
        )
        try:
            if client_total + size > most:
                raise Full(of_key=shares.total + size <= shares.budget)
            shares.take(client.scope, size)
        except Full as full:
            if full.of_key:
                refuse("key", f"key {client.name} has its share: {client_total} {kind}")
            refuse(reason, f"{shares.total} {kind} already")

    def _record_end(self, now: float) -> None:
        gap = min(now - self._ended_at, 60.0) if self._ended_at else 0.0
        self._gap_s += _NEWEST_WEIGHT * (gap - self._gap_s)
        self._ended_at = now

    def _refuse(self, reason: str, message: str, error: type[RetryLater] = RetryLater) -> None:
        """Raise the error, with the predicted seconds until half of the edits are done."""
        self._metrics.rejections.labels(reason).inc()
        raise error(f"{message}; try again later", self._gap_s * self.edits / 2)


def _most(shares: Shares, client: KeyHolder) -> int:
    """Return the units that a client may hold while no other client holds any."""
    budget = shares.budget
    return budget if client.scope == EVERYBODY else max(budget // 2, min(budget, 1))
