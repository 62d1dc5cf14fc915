"""What the router takes on: edits and bytes under way, in all and of each key."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from maskserve_core.shares import Full, Shares
from maskserve_router.config import AdmissionBounds
from maskserve_router.failures import RetryLater
from maskserve_router.keys import KeyHolder
from maskserve_router.metrics import Metrics

_REMEMBERED = 0.1
"""Weight of the last edit in the mean gap between two that end."""


class Admission:
    """Counts edits and bytes; used from the event loop only."""

    def __init__(self, bounds: AdmissionBounds, metrics: Metrics) -> None:
        self._edits, self._bytes = Shares(bounds.max_edits), Shares(bounds.max_bytes)
        self._operations = Shares(bounds.max_edits)
        self._metrics = metrics
        self.closed = False
        """The router is stopping."""
        self._ended_at = 0.0
        self._gap_s = 0.0
        """Mean seconds between the ends of two edits."""

    @property
    def edits(self) -> int:
        """Taken and not answered."""
        return self._edits.total

    @property
    def bytes(self) -> int:
        """Of their requests, and of those still being read."""
        return self._bytes.total

    @contextmanager
    def edit(self, client: KeyHolder, size: int) -> Iterator[Callable[[int], None]]:
        """An edit is under way; gives what to call when its answer takes its request's place, with
        the bytes of that.

        Raises:
            RetryLater: the router, or the client, has as many as it may.
        """
        if self.closed:
            self._refuse("stopping", "the router is stopping")
        self._take(self._edits, client, 1, "edits", "edits are under way", client.max_edits)
        held = size

        def becomes(size: int) -> None:
            nonlocal held
            self._bytes.give_back(client.scope, held)
            self._bytes.book(client.scope, size)  # it is there already, whatever others hold
            held = size

        try:
            self._take_bytes(client, size)
            try:
                yield becomes
            finally:
                self._bytes.give_back(client.scope, held)
        finally:
            self._edits.give_back(client.scope)
            self._ended(time.monotonic())

    @contextmanager
    def operation(self, client: KeyHolder, size: int) -> Iterator[None]:
        """An operation of `control` is under way, for which so many bytes are in memory.

        Raises:
            RetryLater: the router, or the client, has as many as it may.
        """
        self._take(self._operations, client, 1, "operations", "operations are under way")
        try:
            with self.hold(client, size):
                yield
        finally:
            self._operations.give_back(client.scope)

    @contextmanager
    def hold(self, client: KeyHolder, size: int) -> Iterator[None]:
        """So many bytes of a client's request are in memory.

        Raises:
            RetryLater: there is no room for them, or the client has its share.
        """
        self._take_bytes(client, size)
        try:
            yield
        finally:
            self._bytes.give_back(client.scope, size)

    def _take_bytes(self, client: KeyHolder, size: int) -> None:
        self._take(self._bytes, client, size, "bytes", "bytes of requests are under way")

    def _take(
        self,
        shares: Shares,
        client: KeyHolder,
        size: int,
        reason: str,
        what: str,
        most: float = math.inf,
    ) -> None:
        own = shares.held(client.scope)
        try:
            if own + size > most:
                raise Full(own=shares.total + size <= shares.budget)
            shares.take(client.scope, size)
        except Full as full:
            if full.own:
                self._refuse("key", f"key {client.name} has its share: {own} {what}")
            self._refuse(reason, f"{shares.total} {what} already")

    def _ended(self, now: float) -> None:
        gap = min(now - self._ended_at, 60.0) if self._ended_at else 0.0
        self._gap_s += _REMEMBERED * (gap - self._gap_s)
        self._ended_at = now

    def _refuse(self, reason: str, message: str) -> None:
        """Refuse until, at the pace of late, half of what is under way is done."""
        self._metrics.rejections.labels(reason).inc()
        raise RetryLater(f"{message}; try again later", self._gap_s * self.edits / 2)
