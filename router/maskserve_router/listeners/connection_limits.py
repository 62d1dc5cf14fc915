"""Places that clients hold by being there: calls and connections that are open.

Who is silent (sends nothing, with nothing under way for it) pays nothing for its place. So when all
are taken, a newcomer gets that of the one which has been silent longest, of the client with the
most silent ones.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from maskserve_common.errors import DeadlineExceeded, MaskserveError
from maskserve_common.shares import Shares
from maskserve_router.messages.failures import RetryLater
from maskserve_router.metrics import Metrics

_RETRY_S = 1.0


class Holder(Protocol):
    """Something that is open; a new one is silent."""

    def end(self, reason: MaskserveError) -> None: ...


class Places:
    """Counts what is open, by client; used from the event loop only.

    Args:
        what: they are, in messages and metrics.
        most: in all.
        silence_s: how long one may be silent.
        metrics: counts those that are refused.
        shared: whether a client may have as much as it leaves free, and no more.
        own: whether a client's silent ones give way to its own newcomers. Of a burst that is being
            sent they must not.
    """

    def __init__(
        self,
        what: str,
        most: int,
        silence_s: float,
        metrics: Metrics,
        *,
        shared: bool = False,
        own: bool = False,
    ) -> None:
        self._what, self._shared, self._shares = what, shared, Shares(most)
        self._silence_s, self._metrics, self._own = silence_s, metrics, own
        self._open: dict[Holder, str] = {}
        """Each one's client."""
        self._silent: dict[str, dict[Holder, asyncio.TimerHandle]] = {}
        """Client -> its silent ones, the longest silent first, and what ends each."""

    def take(self, holder: Holder, client: str) -> None:
        """One more is open.

        Raises:
            RetryLater: the client has as many as it may, or all places are taken by others.
        """
        if self._shares.total >= self._shares.budget:
            self._make_room(client)
        elif self._shared and self._shares.room(client) < 1:
            client_count = self._shares.held(client)
            self._refuse(f"{client_count} {self._what} of this client are open already")
        self._open[holder] = client
        self._shares.book(client)
        self.told(holder, silent=True)

    def told(self, holder: Holder, *, silent: bool) -> None:
        """One has become silent, or is so no longer."""
        client = self._open.get(holder)
        if client is None:
            return  # it has been ended
        silent_holders = self._silent.setdefault(client, {})
        if silent and holder not in silent_holders:
            loop, seconds = asyncio.get_running_loop(), self._silence_s
            why = DeadlineExceeded(f"it sent nothing for {seconds:g} s")
            silent_holders[holder] = loop.call_later(seconds, self._end, holder, why)
        elif not silent and holder in silent_holders:
            silent_holders.pop(holder).cancel()
        if not silent_holders:
            del self._silent[client]

    def leave(self, holder: Holder) -> None:
        """One is open no longer."""
        client = self._open.get(holder)
        if client is None:
            return
        self.told(holder, silent=False)
        del self._open[holder]
        self._shares.give_back(client)

    def _make_room(self, client: str) -> None:
        numbers = {name: len(holders) for name, holders in self._silent.items()}
        most = max(numbers, key=numbers.__getitem__, default=client)
        least = 0 if self._own else numbers.get(client, 0)
        if numbers.get(most, 0) <= least:
            self._refuse(f"{len(self._open)} {self._what} are open already")
        why = "it was silent, while others needed its place; try again"
        self._end(next(iter(self._silent[most])), RetryLater(why, _RETRY_S))
        self._metrics.rejections.labels("silent").inc()

    def _end(self, holder: Holder, reason: MaskserveError) -> None:
        self.leave(holder)
        holder.end(reason)

    def _refuse(self, message: str) -> None:
        self._metrics.rejections.labels(self._what).inc()
        raise RetryLater(f"{message}; try again later", _RETRY_S)
