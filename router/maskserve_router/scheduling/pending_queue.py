"""The queue of edits that wait for a place at a worker.

The next place goes to the key that has the fewest edits at workers of that model (`FairQueue`). A
key that has none there may also take a spare place, so that it need not wait until another key's
edit ends. Of a key's edits, the one that must begin first to be in time is next. An edit without a
due time counts as due PATIENCE_S after its arrival, as at workers. Each step of priority counts as
`aging_s` seconds of waiting, so that no edit is overtaken for ever.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from maskserve_common.contracts.keys import scope_of
from maskserve_common.errors import DeadlineExceeded
from maskserve_common.fair_queue import FairQueue, Turn
from maskserve_common.routing import Edit, NoWorkerAvailable, Policy
from maskserve_common.shares import PATIENCE_S, urgency
from maskserve_router.workers.pool import Pool
from maskserve_router.workers.worker import SentEdit, Worker, WorkerEpoch


@dataclass(slots=True, eq=False)
class WaitingEdit:
    """An edit that waits for a worker."""

    request_id: str
    edit: Edit
    avoid: frozenset[WorkerEpoch]
    """Workers that failed this edit and do not get it again."""
    may_wait: bool
    """True while the edit may wait even if no worker takes edits."""
    place: asyncio.Future[SentEdit] = field(default_factory=asyncio.Future)

    @property
    def stands_apart(self) -> bool:
        """Whether other workers may take the edit than take its key's other edits, so that it has a
        line of its own.
        """
        return bool(self.avoid) or self.may_wait


def _key_of(request_id: str, edit: Edit) -> tuple[str, str]:
    """Return the key by which edits take turns: the client's scope and the model."""
    return scope_of(request_id), edit.model


class PendingQueue:
    """Waiting edits. Use it from the event loop only.

    Args:
        pool: the workers.
        policy: chooses among them.
        aging_s: seconds of waiting that weigh as much as one step of priority.
        on_decision: called with the seconds of each decision.
    """

    def __init__(
        self, pool: Pool, policy: Policy, aging_s: float, on_decision: Callable[[float], None]
    ) -> None:
        self._pool, self._policy, self._aging_s = pool, policy, aging_s
        self._on_decision = on_decision
        self._queue: FairQueue[WaitingEdit] = FairQueue()
        """Its places are edits at workers; they have no bound here, because workers have theirs."""

    def __len__(self) -> int:
        return len(self._queue)

    async def enter(
        self,
        request_id: str,
        edit: Edit,
        arrival: float,
        deadline: float | None,
        avoid: frozenset[WorkerEpoch] = frozenset(),
        patience_s: float = 0.0,
        starts_by: float | None = None,
    ) -> SentEdit:
        """Wait for a place, and write the edit into the worker's ledger.

        Args:
            request_id: id of this try.
            edit: its cost.
            arrival: time when the client sent it, on time.monotonic's clock.
            deadline: time from which it cannot be in time any more, on the same clock.
            avoid: workers that do not get it, until they have been down.
            patience_s: seconds to wait for a worker if none takes edits.
            starts_by: time at which it must begin, on the same clock; None: no limit.

        Raises:
            NoWorkerAvailable: no worker serves it.
            DeadlineExceeded: the deadline passed first.
        """
        waiting = WaitingEdit(request_id, edit, avoid, may_wait=patience_s > 0.0)
        turn = self._put(waiting, arrival, starts_by)
        self.dispatch()
        if waiting.place.done():
            return waiting.place.result()
        loop, timers = asyncio.get_running_loop(), []
        if deadline is not None:
            remaining_s = max(deadline - time.monotonic(), 0.0)
            timers.append(loop.call_later(remaining_s, self._expire, waiting))
        if waiting.may_wait:
            timers.append(loop.call_later(patience_s, self._stop_waiting, waiting))
        try:
            return await waiting.place
        except asyncio.CancelledError:
            if waiting.place.done() and not waiting.place.cancelled():
                self.leave(waiting.place.result())
            raise
        finally:
            self._queue.cancel(turn)
            for timer in timers:
                timer.cancel()

    def is_first(self, request_id: str, edit: Edit) -> bool:
        """Return whether no edit of the key and model of this edit is at a worker."""
        return not self._queue.places.in_use(_key_of(request_id, edit))

    def before(
        self, request_id: str, edit: Edit, arrival: float, starts_by: float | None
    ) -> list[Edit]:
        """Return the edits that get places before an edit that enters now.

        The arguments are those of `enter`. Edits of other models are not among them, because they
        wait for other workers.
        """
        new = self._put(WaitingEdit(request_id, edit, frozenset(), False), arrival, starts_by)
        turns = itertools.takewhile(lambda turn: turn is not new, self._queue.order())
        ahead = [
            turn.item.edit
            for turn in turns
            if turn.item.edit.model == edit.model and not turn.item.place.done()
        ]
        self._queue.cancel(new)
        return ahead

    def _put(
        self, waiting: WaitingEdit, arrival: float, starts_by: float | None
    ) -> Turn[WaitingEdit]:
        edit = waiting.edit
        urgent = urgency(arrival, edit.priority, self._aging_s, starts_by, PATIENCE_S)
        line = waiting if waiting.stands_apart else None
        return self._queue.put(_key_of(waiting.request_id, edit), waiting, urgent, line)

    def leave(self, sent: SentEdit) -> None:
        """Remove an edit from its worker's ledger, and give its place to the next edit."""
        sent.worker.remove(sent)
        self._queue.give_back(_key_of(sent.request_id, sent.edit))
        self.dispatch()

    def dispatch(self) -> None:
        """Send every waiting edit for which a worker has a place, in the order of turns."""
        full: dict[tuple[str, bool], bool] = {}
        """Model, and whether a spare place may be taken -> whether no worker has a place."""
        for turn in self._queue.offers():
            waiting = turn.item
            if waiting.place.done():
                self._queue.cancel(turn)  # its wait has just ended
                continue
            kind = waiting.edit.model, not self._queue.places.in_use(turn.key)
            if kind not in full:
                full[kind] = self._is_full(self._as_sent(turn))
            if full[kind] and not waiting.stands_apart:
                continue
            try:
                sent_edit = self._send(waiting, self._as_sent(turn))
            except NoWorkerAvailable as error:
                if error.full:
                    full[kind] = full[kind] or not waiting.stands_apart
                elif not waiting.may_wait:
                    self._queue.cancel(turn)
                    waiting.place.set_exception(error)
            else:
                self._queue.take(turn)
                waiting.place.set_result(sent_edit)
                full.clear()

    def _as_sent(self, turn: Turn[WaitingEdit]) -> Edit:
        edit = turn.item.edit
        return edit if self._queue.places.in_use(turn.key) else replace(edit, first_of_key=True)

    def _is_full(self, edit: Edit) -> bool:
        """Return whether workers serve the edit's model and none of them has a place."""
        table = self._pool.roster.table(time.monotonic())
        return not len(table.taking(edit)) and len(table.serving(edit)) > 0

    def _send(self, waiting: WaitingEdit, edit: Edit) -> SentEdit:
        now_s = time.monotonic()
        worker = self._choose(edit, now_s, waiting.avoid)
        predicted = worker.predict(edit, now_s)
        sent_edit = SentEdit(waiting.request_id, edit, worker, now_s, predicted, listed_at=now_s)
        worker.add(sent_edit)
        worker.breaker.record_sent(waiting.request_id)
        return sent_edit

    def _choose(self, edit: Edit, now: float, avoid: frozenset[WorkerEpoch]) -> Worker:
        """Return the worker for an edit. Raises NoWorkerAvailable: no worker but those of `avoid`
        takes it.
        """
        roster, workers = self._pool.roster, self._pool.workers
        excluded = {
            worker.number
            for epoch in avoid
            if (worker := workers.get(epoch.address)) is not None and worker.epoch == epoch
        }
        table = roster.table(now)
        begin = time.perf_counter()
        if self._policy.predicts:
            number = self._first_to_finish(edit, now, excluded)
        else:
            takers = [n for n in table.taking(edit).tolist() if n not in excluded]
            by_name = {table.view(n).worker: n for n in takers}
            views = [table.view(n) for n in takers]
            number = by_name[self._policy.choose(edit, views, now)] if views else None
        self._on_decision(time.perf_counter() - begin)
        if number is not None:
            return roster.worker(number)
        candidates = [worker for worker in workers.values() if worker.number not in excluded]
        raise NoWorkerAvailable(edit, [worker.view(now) for worker in candidates])

    def _first_to_finish(self, edit: Edit, now: float, excluded: set[int]) -> int | None:
        """Return the number of the worker that would finish the edit first; a worker without the
        edit's encoding counts as later by the seconds that it takes to make. None: none takes it.
        """
        roster, table = self._pool.roster, self._pool.roster.table(now)
        first = table.choose(edit, now, excluded)
        if edit.encoded is None or first is None:
            return first
        workers = self._pool.workers.values()
        without_encoding = {worker.number for worker in workers if worker.host != edit.encoded.at}
        if first not in without_encoding:
            return first
        holder = table.choose(edit, now, excluded | without_encoding)
        if holder is None:
            return first
        ends = [roster.worker(n).predict(edit, now).denoised_s for n in (first, holder)]
        return holder if ends[1] < ends[0] + edit.encoded.seconds else first

    def _expire(self, waiting: WaitingEdit) -> None:
        if not waiting.place.done():
            waiting.place.set_exception(
                DeadlineExceeded("no worker had room for the edit while it could still be in time")
            )

    def _stop_waiting(self, waiting: WaitingEdit) -> None:
        waiting.may_wait = False
        self.dispatch()
