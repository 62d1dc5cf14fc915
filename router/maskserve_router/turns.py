"""Threads for work that grows with what a client sends; keys have them in turn.

The event loop routes everybody's edits and has to answer within milliseconds. What takes longer
the more a client sends (inflating, parsing, decoding a mask) is done here, and a client that sends
much waits behind itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from maskserve_core.shares import Shares
from maskserve_router.keys import KeyHolder

_SMALL = 64 * 1024
"""Bytes that are worth no thread: to change to one and back takes as long."""
T = TypeVar("T")


class Turns:
    """Used from the event loop only.

    Args:
        threads: how many there are.
    """

    def __init__(self, threads: int) -> None:
        self._pool = ThreadPoolExecutor(threads, "turns")
        self._threads = threads
        self._busy = Shares(threads)
        self._waiting: list[tuple[str, asyncio.Future[None]]] = []

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def run(self, client: KeyHolder, size: int, work: Callable[..., T], *given: Any) -> T:
        """What `work(*given)` gives.

        Args:
            client: whose it is.
            size: bytes that it goes by; of few it is done at once.
            work: touches nothing that the loop does.
            given: its arguments.
        """
        if size <= _SMALL:
            return work(*given)
        await self._turn(client.scope)
        task = asyncio.get_running_loop().run_in_executor(self._pool, work, *given)
        # A thread cannot be stopped: the place is free when it is done, not when the client leaves.
        task.add_done_callback(lambda done: self._over(client.scope, done))
        return await asyncio.shield(task)

    async def _turn(self, key: str) -> None:
        """Wait for a thread; it is booked for the key then."""
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((key, place))
        self._hand_out()
        try:
            await place
        except asyncio.CancelledError:
            if not place.cancelled():  # it was handed out just now
                self._busy.give_back(key)
            self._hand_out()
            raise

    def _over(self, key: str, done: asyncio.Future[Any]) -> None:
        if not done.cancelled():
            done.exception()  # where nobody waits for it any more, it is not complained of
        self._busy.give_back(key)
        self._hand_out()

    def _hand_out(self) -> None:
        self._waiting = [each for each in self._waiting if not each[1].cancelled()]
        while self._waiting and self._busy.total < self._threads:
            key, place = chosen = self._busy.in_turn(self._waiting, lambda each: each[0])[0]
            self._waiting.remove(chosen)
            self._busy.book(key)
            place.set_result(None)
