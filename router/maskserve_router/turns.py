"""What keys have in turn: places, and threads for work that grows with what a client sends.

The event loop routes everybody's edits and has to answer within milliseconds. What takes longer
the more a client sends (inflating, parsing, decoding a mask) is done here, and a client that sends
much waits behind itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from maskserve_core.shares import Shares
from maskserve_router.keys import KeyHolder

_SMALL = 64 * 1024
"""Bytes that are worth no thread: to change to one and back takes as long."""
T = TypeVar("T")


class InTurn:
    """Places that keys have in turn; used from the event loop only.

    Args:
        places: how many there are.
    """

    def __init__(self, places: int) -> None:
        self._places = places
        self._held = Shares(places)
        self._waiting: list[tuple[str, asyncio.Future[None]]] = []

    async def enter(self, key: str) -> None:
        """Wait for a place; it is the key's until it leaves."""
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((key, place))
        self._hand_out()
        try:
            await place
        except asyncio.CancelledError:
            if not place.cancelled():  # it was handed out just now
                self._held.give_back(key)
            self._hand_out()
            raise

    def leave(self, key: str) -> None:
        """Give a place back."""
        self._held.give_back(key)
        self._hand_out()

    @asynccontextmanager
    async def place(self, key: str) -> AsyncIterator[None]:
        """Have one for a time."""
        await self.enter(key)
        try:
            yield
        finally:
            self.leave(key)

    def _hand_out(self) -> None:
        self._waiting = [each for each in self._waiting if not each[1].cancelled()]
        while self._waiting and self._held.total < self._places:
            key, place = chosen = self._held.in_turn(self._waiting, lambda each: each[0])[0]
            self._waiting.remove(chosen)
            self._held.book(key)
            place.set_result(None)


class Turns:
    """Used from the event loop only.

    Args:
        threads: how many there are.
    """

    def __init__(self, threads: int) -> None:
        self._pool = ThreadPoolExecutor(threads, "turns")
        self._places = InTurn(threads)

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
        await self._places.enter(client.scope)
        task = asyncio.get_running_loop().run_in_executor(self._pool, work, *given)
        # A thread cannot be stopped: the place is free when it is done, not when the client leaves.
        task.add_done_callback(lambda done: self._over(client.scope, done))
        return await asyncio.shield(task)

    def _over(self, key: str, done: asyncio.Future[Any]) -> None:
        if not done.cancelled():
            done.exception()  # where nobody waits for it any more, it is not complained of
        self._places.leave(key)
