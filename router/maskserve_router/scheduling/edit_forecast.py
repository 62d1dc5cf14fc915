"""Predicts when an edit's answer comes, and refuses edits that cannot meet their deadlines."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace

from maskserve_common.errors import DeadlineExceeded
from maskserve_common.routing import Edit, assign
from maskserve_router.messages.edit_call import EditCall
from maskserve_router.messages.failures import RetryLater
from maskserve_router.metrics import Metrics
from maskserve_router.scheduling.pending_queue import PendingQueue
from maskserve_router.workers.pool import Pool

_MOST_PREDICTED = 16
"""Most full workers for which a prediction is made: those that free a place soonest."""


class EditForecast:
    """Predicts times of edits.

    Args:
        pool: the workers.
        pending: edits that wait for a place.
        deadline_slack: share of a deadline that a prediction may take (`[admission]`).
        metrics: counter of refused edits.
    """

    def __init__(
        self, pool: Pool, pending: PendingQueue, deadline_slack: float, metrics: Metrics
    ) -> None:
        self._pool, self._pending, self._slack = pool, pending, deadline_slack
        self._metrics = metrics

    def alone_s(self, call: EditCall, edit: Edit) -> float | None:
        """Return the seconds until the answer from an idle worker; None: no worker takes edits."""
        now_s, roster = time.monotonic(), self._pool.roster
        table = roster.table(now_s)

        def predicted_s(number: int) -> float:
            return roster.worker(number).least_s(edit, now_s, alone=True, primed=call.primed)

        takers = table.accepting(edit)
        return table.least_s(edit, now_s, takers, predicted_s, alone=True, primed=call.primed)

    def check_deadline(self, call: EditCall, edit: Edit) -> None:
        """Refuse an edit that cannot meet its deadline.

        Raises:
            DeadlineExceeded: even an idle worker would be too slow.
            RetryLater: every worker is too busy now.
        """
        if call.deadline is None:
            return
        least, slack = self.alone_s(call, edit), self._slack
        limit = call.deadline - call.arrival
        if least is not None and least > limit * slack:
            self._metrics.rejections.labels("deadline").inc()
            raise DeadlineExceeded(
                f"{call.deadline_name}: {1e3 * limit:.0f} ms are too short for this edit; alone "
                f"on a worker it takes about {math.ceil(1e3 * least)} ms"
            )
        call.waits_until = call.deadline - (least or 0.0) / slack
        now_s = time.monotonic()
        soonest, remaining_s = self.soonest_s(call, edit, now_s), call.deadline - now_s
        if soonest is not None and soonest > remaining_s * slack:
            self._metrics.rejections.labels("deadline").inc()
            raise RetryLater(
                f"{call.deadline_name}: the edit would take about {soonest:.1f} s, and "
                f"{max(remaining_s, 0):.1f} s are left",
                soonest - remaining_s,
            )

    def soonest_s(self, call: EditCall, edit: Edit, now: float) -> float | None:
        """Return the seconds until the answer from the worker that finishes first.

        If all workers are full, the prediction includes the edits that get places before this one.
        None: no worker serves the model.
        """
        roster = self._pool.roster
        table = roster.table(now)
        edit = replace(edit, first_of_key=self._pending.is_first(call.request_id, edit))

        def predicted_s(number: int, queue: Sequence[Edit] = ()) -> float:
            return roster.worker(number).least_s(edit, now, queue=queue, primed=call.primed)

        if len(takers := table.taking(edit)):
            return table.least_s(edit, now, takers, predicted_s, primed=call.primed)
        waiting = self._pending.before(call.request_id, edit, call.arrival, call.starts_by)
        # Other workers get no waiting edit, and finish later than those of these that get none.
        near = table.earliest(table.serving(edit), len(waiting) + _MOST_PREDICTED)
        assignment = assign(waiting, [table.view(number) for number in near])
        near.sort(key=lambda number: assignment.free_s[table.view(number).worker])
        times = (
            predicted_s(n, assignment.edits[table.view(n).worker]) for n in near[:_MOST_PREDICTED]
        )
        return min(times, default=None)
