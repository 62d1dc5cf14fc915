"""Places for open calls and connections, with a limit for each client.

A holder is silent if it sends nothing and nothing is under way for it. When all places are taken, a
newcomer takes the place of a silent holder: the longest silent one of the client that has the most
silent ones. Its client must still be within its share.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from maskserve_common.errors import DeadlineExceeded, MaskserveError
from maskserve_common.shares import Shares, room
from maskserve_router.messages.failures import RetryLater
from maskserve_router.metrics import Metrics

_RETRY_S = 1.0


class Holder(Protocol):
    """An open call or connection; a new one is silent."""

    def end(self, reason: MaskserveError) -> None: ...


class Places:
    """Counts open holders by client. Use it from the event loop only.

    Args:
        kind: kind of the holders, in messages and metrics.
        most: most holders in total.
        silence_s: longest silence of a holder, in seconds.
        metrics: counts refusals.
        shared: True if a client may have only as many holders as it leaves places free.
        per_key: True if a client's silent holders give way to its own newcomers. Calls must not,
            since the client may be sending a burst.
    """

    def __init__(
        self,
        kind: str,
        most: int,
        silence_s: float,
        metrics: Metrics,
        *,
        shared: bool = False,
        per_key: bool = False,
    ) -> None:
        self._kind, self._shared, self._shares = kind, shared, Shares(most)
        self._silence_s, self._metrics, self._per_key = silence_s, metrics, per_key
        self._open: dict[Holder, str] = {}
        """Holder -> its client."""
        self._silent: dict[str, dict[Holder, asyncio.TimerHandle]] = {}
        """Client -> its silent holders, longest silent first, each with the timer that ends it."""

    def take(self, holder: Holder, client: str) -> None:
        """Add a holder.

        Raises:
            RetryLater: the client has its limit, or no silent holder gives way.
        """
        is_full = self._shares.total >= self._shares.budget
        displaced = self._silent_holder(client) if is_full else None
        if self._shared and self._free_for(client) < 1:
            client_count = self._shares.in_use(client)
            self._refuse(f"{client_count} {self._kind} of this client are open already")
        if displaced is not None:
            self._displace(displaced)
        self._open[holder] = client
        self._shares.book(client)
        self.mark(holder, silent=True)

    def mark(self, holder: Holder, *, silent: bool) -> None:
        """Note that a holder has become silent or active."""
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
        """Remove a holder."""
        client = self._open.get(holder)
        if client is None:
            return
        self.mark(holder, silent=False)
        del self._open[holder]
        self._shares.give_back(client)

    def _free_for(self, client: str) -> int:
        """Return the places that a client may take now; a displaced holder would leave one free."""
        shares = self._shares
        in_use = min(shares.total, shares.budget - 1)
        return room(shares.budget, in_use, shares.in_use(client), client)

    def _silent_holder(self, client: str) -> Holder:
        """Return the holder that gives way to a newcomer of this client.

        Raises:
            RetryLater: no other client has more silent holders.
        """
        numbers = {name: len(holders) for name, holders in self._silent.items()}
        most = max(numbers, key=numbers.__getitem__, default=client)
        least = 0 if self._per_key else numbers.get(client, 0)
        if numbers.get(most, 0) <= least:
            self._refuse(f"{len(self._open)} {self._kind} are open already")
        return next(iter(self._silent[most]))

    def _displace(self, holder: Holder) -> None:
        why = "it was silent, while others needed its place; try again"
        self._end(holder, RetryLater(why, _RETRY_S))
        self._metrics.rejections.labels("silent").inc()

    def _end(self, holder: Holder, reason: MaskserveError) -> None:
        self.leave(holder)
        holder.end(reason)

    def _refuse(self, message: str) -> None:
        self._metrics.rejections.labels(self._kind).inc()
        raise RetryLater(f"{message}; try again later", _RETRY_S)
