"""Fair shares between keys: of places, of threads for long work, and of this process's time.

The event loop routes all edits and must answer within milliseconds. Work that grows with a request
(inflating, parsing, decoding a mask) runs here in threads. A client that sends much waits behind
its own work. The loop itself copies the data it receives and sends. A key that has recently used
much of the process is therefore not read from for a while: its data waits at the client.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from maskserve_common.contracts.keys import NO_SCOPE
from maskserve_common.fair_queue import FairQueue
from maskserve_common.niceness import Niceness, give_way
from maskserve_common.shares import KeyWork
from maskserve_router.key_holder import KeyHolder

_SMALL = 64 * 1024
"""Bytes below which work runs on the loop: a change of threads would take as long."""
IN_A_THREAD = _SMALL + 1
"""A size that always takes a thread."""
_STEP_S = 0.25
"""Seconds per step of `KeyWork`'s memory, which is 64 steps: 16 s."""
_MOST_S = 1.6
"""Processor seconds of the last 16 s up to which a key is read from at once: a tenth."""
_ENTRY_S = 0.05
"""Seconds booked for a message that waited before it was read, so that the key's next one waits."""
_BYTES_PER_S = 400e6
"""Rate at which the loop copies: gRPC makes three copies of a received message, two of a sent
one."""
T = TypeVar("T")


class FairPlaces:
    """Places that keys take in turn. Use it from the event loop only.

    Args:
        places: number of places.
    """

    def __init__(self, places: int) -> None:
        self._queue: FairQueue[asyncio.Future[None]] = FairQueue(places)

    def resize(self, places: int) -> None:
        """Change the number of places; places in use are not taken back."""
        self._queue.places.budget = places
        self._hand_out()

    async def enter(self, key: str, urgency: float = 0.0) -> None:
        """Wait for a place, which the key holds until `leave`.

        Among a key's own waiting calls, the lowest urgency comes first, then the oldest.
        """
        turn = self._queue.put(key, asyncio.get_running_loop().create_future(), urgency)
        self._hand_out()
        try:
            await turn.item
        except asyncio.CancelledError:
            if turn.item.cancelled():
                self._queue.cancel(turn)
            else:  # the place was handed out just now
                self.leave(key)
            raise

    def leave(self, key: str) -> None:
        self._queue.give_back(key)
        self._hand_out()

    @asynccontextmanager
    async def place(self, key: str, urgency: float = 0.0) -> AsyncIterator[None]:
        """Hold a place for the block."""
        await self.enter(key, urgency)
        try:
            yield
        finally:
            self.leave(key)

    def _hand_out(self) -> None:
        for turn in self._queue.offers():
            if self._queue.places.free <= 0:
                return
            if turn.item.done():
                self._queue.cancel(turn)  # its wait has just ended
            else:
                self._queue.take(turn)
                turn.item.set_result(None)


class LoopThreads:
    """Threads that keys take in turn, for work of the event loop. Use it from there only."""

    def __init__(self, threads: int, name: str, role: Niceness = Niceness.EDITS) -> None:
        self._pool = ThreadPoolExecutor(threads, name, give_way, (role,))
        self._places = FairPlaces(threads)

    async def run(self, key: str, work: Callable[..., T], *arguments: Any) -> T:
        """Return `work(*arguments)`, run in the key's turn."""
        await self._places.enter(key)
        task = asyncio.get_running_loop().run_in_executor(self._pool, work, *arguments)
        # A thread cannot be stopped: its place is free when the work ends, even if the client left.
        task.add_done_callback(lambda done: self._free_place(key, done))
        return await asyncio.shield(task)

    def _free_place(self, key: str, done: asyncio.Future[Any]) -> None:
        if not done.cancelled():
            done.exception()  # marks an exception that nobody awaits as seen
        self._places.leave(key)

    def close(self) -> None:
        """Start no more work; what runs goes on."""
        self._pool.shutdown(wait=False, cancel_futures=True)


class FairShare:
    """Runs work in threads, in turn by key. Use it from the event loop only.

    Args:
        threads: number of threads.
    """

    def __init__(self, threads: int) -> None:
        self._work = LoopThreads(threads, "turns", Niceness.READING)
        self._locked = ThreadPoolExecutor(1, "locked")
        self._used, self._used_at = KeyWork(), time.monotonic()
        self._last_read: dict[str, float] = {}
        """Key -> time of its last read; recent keys only."""

    async def may_read(self, client: KeyHolder) -> None:
        """Wait until a client's next message may be read.

        It waits only if the client has recently used more than its part of this process and other
        clients are active.
        """
        key, waited = client.scope, False
        self._last_read[key] = time.monotonic()
        while key != NO_SCOPE and self._is_over_its_share(key):
            waited = True
            await asyncio.sleep(_STEP_S)
        if waited:
            self.book(key, _ENTRY_S)

    def book_bytes(self, client: KeyHolder, size: int) -> None:
        """Book `size` received bytes of a client."""
        self.book(client.scope, size / _BYTES_PER_S)

    def _is_over_its_share(self, key: str) -> bool:
        self.book(key, 0.0)
        if self._used.used(key) <= _MOST_S:
            return False
        late = self._used_at - 64 * _STEP_S
        self._last_read = {
            name: read_at for name, read_at in self._last_read.items() if read_at > late
        }
        return any(name != key for name in self._last_read)

    def book(self, key: str, seconds: float) -> None:
        """Book seconds of this process for a key."""
        now_s = time.monotonic()
        self._used.add(key, seconds, (now_s - self._used_at) / _STEP_S)
        self._used_at = now_s

    def close(self) -> None:
        self._work.close()
        self._locked.shutdown(wait=False)

    async def run(self, client: KeyHolder, size: int, work: Callable[..., T], *arguments: Any) -> T:
        """Return `work(*arguments)`, run in a thread if it is long.

        Args:
            client: holder of the key that the work is for.
            size: bytes of the input; small work runs at once on the loop.
            work: function that touches no state of the loop.
            arguments: its arguments.
        """
        if size <= _SMALL:
            return work(*arguments)
        return await self.run_in(self._work, client, work, *arguments)

    def later(self, work: Callable[..., object], *arguments: Any) -> None:
        """Run `work(*arguments)` later, in the one thread for work that may wait for a file lock.

        Calls run in order, whether or not the client stays.
        """
        self._locked.submit(work, *arguments)

    async def locked(self, work: Callable[..., T], *arguments: Any) -> T:
        """Return `work(*arguments)`, run in the thread of `later`."""
        return await asyncio.shield(asyncio.wrap_future(self._locked.submit(work, *arguments)))

    async def run_in(
        self, threads: LoopThreads, client: KeyHolder, work: Callable[..., T], *arguments: Any
    ) -> T:
        """Return `work(*arguments)`, run in one of these threads in the client's turn, and book its
        processor seconds, even if the client leaves.
        """
        loop = asyncio.get_running_loop()

        def timed() -> T:
            began = time.thread_time()
            try:
                return work(*arguments)
            finally:
                seconds = time.thread_time() - began
                loop.call_soon_threadsafe(self.book, client.scope, seconds)

        return await threads.run(client.scope, timed)
