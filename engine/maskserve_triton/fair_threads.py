"""Threads that keys share fairly: no key waits behind another's jobs."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor

from maskserve_common.fair_queue import FairQueue
from maskserve_common.niceness import Niceness, give_way


class FairThreads:
    """Runs jobs by the rules of `maskserve_common.shares`: the next free thread goes to the key
    that uses fewest threads, and a key may use as many as it leaves free.

    Args:
        threads: number of threads.
        most_waiting: most jobs that may wait, of which each key has a share, too. None: no limit,
            for callers that bound the jobs themselves.
        name: name of the threads.
        role: whom the threads give way to.
        short_jobs: whether jobs end by themselves soon. One key alone may then use all threads.
    """

    def __init__(
        self,
        threads: int,
        most_waiting: int | None,
        name: str,
        role: Niceness = Niceness.EDITS,
        *,
        short_jobs: bool = False,
    ) -> None:
        self._threads = ThreadPoolExecutor(threads, name, give_way, (role,))
        self._lock = threading.Lock()
        self._queue: FairQueue[Callable[[], None]] = FairQueue(
            threads, sys.maxsize if most_waiting is None else most_waiting
        )
        self._short_jobs = short_jobs

    def submit(self, key: Hashable, job: Callable[[], None]) -> None:
        """Run a job in its turn; nobody sees its exceptions.

        Raises:
            Full: too many jobs wait, in all or of this key.
        """
        with self._lock:
            self._queue.waiting.check(key)
            self._queue.put(key, job)
            self._dispatch()

    @property
    def idle(self) -> bool:
        """Whether nothing runs and nothing waits."""
        return not self._queue.places.total and not len(self._queue)

    def close(self) -> None:
        """Start no more jobs; running ones continue."""
        with self._lock:
            for turn in list(self._queue.order()):
                self._queue.cancel(turn)
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _dispatch(self) -> None:
        places = self._queue.places
        for turn in self._queue.offers():
            if (places.free if self._short_jobs else places.room(turn.key)) > 0:
                self._queue.take(turn)
                self._threads.submit(self._run, turn.key, turn.item)

    def _run(self, key: Hashable, job: Callable[[], None]) -> None:
        try:
            job()
        finally:
            with self._lock:
                self._queue.give_back(key)
                self._dispatch()
