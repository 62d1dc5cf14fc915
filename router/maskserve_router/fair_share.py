"""What keys have in turn: places, threads for work that grows with what a client sends, and this
process's time.

The event loop routes everybody's edits and has to answer within milliseconds. What takes longer
the more a client sends (inflating, parsing, decoding a mask) is done here, and a client that sends
much waits behind itself. The loop itself copies what comes and what is sent on. So a key that has
used much of the process of late is not read from for a while: what it sends stays with the client.
"""

from __future__ import annotations

import asyncio
import time
from bisect import insort
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from maskserve_common.contracts.keys import NO_SCOPE
from maskserve_common.fair_queue import KeyWork
from maskserve_common.shares import Shares
from maskserve_router.keys import KeyHolder

_SMALL = 64 * 1024
"""Bytes that are worth no thread: to change to one and back takes as long."""
IN_A_THREAD = _SMALL + 1
"""Of work that may wait, whatever it goes by."""
_STEP_S = 0.25
"""`KeyWork` forgets by steps; so long is one here, and 16 s are remembered."""
_MOST_S = 1.6
"""Processor seconds of those 16 that a key may have used when it is read from: a tenth of one."""
_ENTRY_S = 0.05
"""What a message that has waited counts as before it is there: of many that wait one is read."""
_STATEMENTS = 4
"""Threads that ask a database."""
_CALL_S = 0.002
"""What the loop does for a call that asks a database, beside the statement itself."""
_BYTES_PER_S = 400e6
"""What the loop copies: gRPC makes three copies of a message as it comes, two as it is sent."""
T = TypeVar("T")


class InTurn:
    """Places that keys have in turn; used from the event loop only.

    Args:
        places: how many there are.
    """

    def __init__(self, places: int) -> None:
        self._places = places
        self._held = Shares(places)
        self._waiting: list[tuple[float, str, asyncio.Future[None]]] = []

    def resize(self, places: int) -> None:
        """There are so many from now on; what is held beyond is not taken back."""
        self._places = places
        self._hand_out()

    async def enter(self, key: str, urgency: float = 0.0) -> None:
        """Wait for a place; it is the key's until it leaves. Of its own that wait the lowest
        urgency is next, and of equal ones the first.
        """
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        insort(self._waiting, (urgency, key, place), key=lambda each: each[0])
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
    async def place(self, key: str, urgency: float = 0.0) -> AsyncIterator[None]:
        """Have one for a time."""
        await self.enter(key, urgency)
        try:
            yield
        finally:
            self.leave(key)

    def _hand_out(self) -> None:
        self._waiting = [waiter for waiter in self._waiting if not waiter[2].cancelled()]
        while self._waiting and self._held.total < self._places:
            chosen = self._held.in_turn(self._waiting, lambda each: each[1])[0]
            _, key, place = chosen
            self._waiting.remove(chosen)
            self._held.book(key)
            place.set_result(None)


class _Threads:
    """Threads that keys have in turn."""

    def __init__(self, threads: int, name: str) -> None:
        self.pool, self.places = ThreadPoolExecutor(threads, name), InTurn(threads)


class Turns:
    """Used from the event loop only.

    Args:
        threads: how many there are.
    """

    def __init__(self, threads: int) -> None:
        self._work = _Threads(threads, "turns")
        self._statements = _Threads(_STATEMENTS, "statements")
        self._locked = ThreadPoolExecutor(1, "locked")
        self._used, self._at = KeyWork(), time.monotonic()
        self._last: dict[str, float] = {}
        """Key -> when it was last read from, of those of late."""

    async def may_read(self, client: KeyHolder) -> None:
        """Wait until a client's next message may be read: at once, unless it has used more than its
        part of this process of late, and others are here.
        """
        key, waited = client.scope, False
        self._last[key] = time.monotonic()
        while key != NO_SCOPE and self._is_ahead(key):
            waited = True
            await asyncio.sleep(_STEP_S)
        if waited:
            self._spent(key, _ENTRY_S)

    def came(self, client: KeyHolder, size: int) -> None:
        """So many bytes of a client have come at once."""
        self._spent(client.scope, size / _BYTES_PER_S)

    def _is_ahead(self, key: str) -> bool:
        self._spent(key, 0.0)
        if self._used.had(key) <= _MOST_S:
            return False
        late = self._at - 64 * _STEP_S
        self._last = {other_key: at for other_key, at in self._last.items() if at > late}
        return any(other_key != key for other_key in self._last)

    def _spent(self, key: str, seconds: float) -> None:
        now_s = time.monotonic()
        self._used.add(key, seconds, (now_s - self._at) / _STEP_S)
        self._at = now_s

    def close(self) -> None:
        for threads in (self._work, self._statements):
            threads.pool.shutdown(wait=False, cancel_futures=True)
        self._locked.shutdown(wait=False)

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
        return await self._threaded(self._work, client, work, *given)

    async def ask(self, client: KeyHolder, work: Callable[..., T], *given: Any) -> T:
        """What `work(*given)` gives, which asks a database for a client: it may wait for the disk,
        and a client that asks for much waits behind itself.
        """
        await self.may_read(client)
        self._spent(client.scope, _CALL_S)
        return await self._threaded(self._statements, client, work, *given)

    def later(self, work: Callable[..., object], *given: Any) -> None:
        """Have `work(*given)` done, which may wait for another process's lock of a file: in one
        thread, each behind the one before it, whether or not its client stays.
        """
        self._locked.submit(work, *given)

    async def locked(self, work: Callable[..., T], *given: Any) -> T:
        """What `work(*given)` gives, done likewise."""
        return await asyncio.shield(asyncio.wrap_future(self._locked.submit(work, *given)))

    async def _threaded(
        self, threads: _Threads, client: KeyHolder, work: Callable[..., T], *given: Any
    ) -> T:
        await threads.places.enter(client.scope)
        spent = [0.0]
        task = asyncio.get_running_loop().run_in_executor(threads.pool, _timed, spent, work, *given)
        # A thread cannot be stopped: the place is free when it is done, not when the client leaves.
        task.add_done_callback(lambda done: self._over(threads, client.scope, done, spent[0]))
        return await asyncio.shield(task)

    def _over(self, threads: _Threads, key: str, done: asyncio.Future[Any], seconds: float) -> None:
        self._spent(key, seconds)
        if not done.cancelled():
            done.exception()  # where nobody waits for it any more, it is not complained of
        threads.places.leave(key)


def _timed(spent: list[float], work: Callable[..., T], *given: Any) -> T:
    """What `work(*given)` gives; its processor seconds become the one element of `spent`."""
    began = time.thread_time()
    try:
        return work(*given)
    finally:
        spent[0] = time.thread_time() - began
