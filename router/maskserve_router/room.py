"""Where edits wait until a worker has a place for them: the one way to a worker.

Order: by the time of arrival, less `aging_s` seconds for each step of priority. So a higher
priority overtakes, and an edit of low priority that has waited long enough is overtaken no more.
"""

from __future__ import annotations

import asyncio
import time
from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass, field

from maskserve_core.errors import DeadlineExceeded
from maskserve_core.routing import Edit, NoWorkerAvailable, Policy, predicted_seconds
from maskserve_router.pool import Pool
from maskserve_router.worker import Sent, Worker


@dataclass(slots=True, eq=False)
class Waiting:
    """An edit that waits for a worker."""

    request_id: str
    edit: Edit
    key: tuple[float, int]
    avoid: frozenset[str]
    """Workers that it is not sent to: they have failed it."""
    place: asyncio.Future[Sent] = field(default_factory=asyncio.Future)

    def __lt__(self, other: Waiting) -> bool:
        return self.key < other.key


class Room:
    """Waiting edits; used from the event loop only.

    Args:
        pool: the workers.
        policy: chooses among them.
        aging_s: seconds of waiting that weigh as much as one step of priority.
        decided: told how many seconds a decision took.
    """

    def __init__(
        self, pool: Pool, policy: Policy, aging_s: float, decided: Callable[[float], None]
    ) -> None:
        self._pool, self._policy, self._aging_s = pool, policy, aging_s
        self._decided = decided
        self._waiting: list[Waiting] = []
        self._number = 0

    def __len__(self) -> int:
        return len(self._waiting)

    async def enter(
        self,
        request_id: str,
        edit: Edit,
        arrival: float,
        deadline: float | None,
        avoid: frozenset[str] = frozenset(),
    ) -> Sent:
        """Wait for a place; the edit stands in the worker's ledger from then on.

        Args:
            request_id: of the edit.
            edit: what it is.
            arrival: when its client sent it, on time.monotonic's clock.
            deadline: when nobody will want it any more, on the same clock.
            avoid: ids of workers that it is not to be sent to.

        Raises:
            NoWorkerAvailable: none serves it.
            DeadlineExceeded: the deadline passed first.
        """
        self._number += 1
        key = (arrival - edit.priority * self._aging_s, self._number)
        waiting = Waiting(request_id, edit, key, avoid)
        insort(self._waiting, waiting)
        self.dispatch()
        if waiting.place.done():
            return waiting.place.result()
        expiry = None
        if deadline is not None:
            loop = asyncio.get_running_loop()
            expiry = loop.call_later(max(deadline - time.monotonic(), 0.0), self._expire, waiting)
        try:
            return await waiting.place
        except asyncio.CancelledError:
            if waiting.place.done() and not waiting.place.cancelled():
                sent = waiting.place.result()
                sent.worker.remove(sent)
            raise
        finally:
            self._drop(waiting)
            if expiry is not None:
                expiry.cancel()

    def dispatch(self) -> None:
        """Send off every waiting edit that a worker has a place for, in their order."""
        full: set[str] = set()
        for waiting in list(self._waiting):
            if waiting.edit.model in full:
                continue
            try:
                sent = self._send(waiting)
            except NoWorkerAvailable as none:
                if none.full:
                    if not waiting.avoid:
                        full.add(waiting.edit.model)
                    continue
                waiting.place.set_exception(none)
            else:
                waiting.place.set_result(sent)
            self._drop(waiting)

    def _send(self, waiting: Waiting) -> Sent:
        now, edit = time.monotonic(), waiting.edit
        views = [
            worker.view(now)
            for worker in self._pool.workers.values()
            if worker.address not in waiting.avoid
        ]
        begin = time.perf_counter()
        chosen = self._policy.choose(edit, views, now)
        self._decided(time.perf_counter() - begin)
        worker: Worker = self._pool.workers[chosen]
        predicted = predicted_seconds(edit, worker.view(now), now)
        sent = Sent(waiting.request_id, edit, worker, now, predicted)
        worker.add(sent)
        worker.breaker.sent(waiting.request_id)
        return sent

    def _expire(self, waiting: Waiting) -> None:
        if not waiting.place.done():
            waiting.place.set_exception(
                DeadlineExceeded("SETTINGS.deadline_ms passed before a worker had a place")
            )

    def _drop(self, waiting: Waiting) -> None:
        if waiting in self._waiting:
            self._waiting.remove(waiting)
