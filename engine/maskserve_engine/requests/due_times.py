"""Whether edits meet their due times, as the worker's past steps predict.

An edit that cannot be done before its deadline is refused at its arrival: its client learns it
early, and no step is wasted. Edits that continue when they are late are never refused for that.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import replace

from maskserve_common.config import Config
from maskserve_common.contracts.keys import entries_id
from maskserve_common.contracts.pricing import Pricing
from maskserve_common.contracts.reuse_levels import ReuseLevel
from maskserve_common.contracts.settings import shares
from maskserve_common.contracts.status_record import WorkerStatus
from maskserve_common.contracts.tiers import DEVICE
from maskserve_common.errors import DeadlineExceeded, Overloaded
from maskserve_common.routing import Edit, WorkerView, predicted_seconds
from maskserve_engine.requests.execution_plan import DENSE, ExecutionPlan
from maskserve_engine.requests.state import RequestState
from maskserve_engine.scheduling.policies import batches_of


class DueTimes:
    """Predicts whether edits are in time, now, at a lower reuse level, or with their template.

    Args:
        prices: returns the cost of rows by past steps; None before it is known.
    """

    def __init__(self, config: Config, prices: Callable[[], Pricing | None]) -> None:
        self._engine, self._refuse_above = config.engine, config.slo.refuse_above
        self._worker = config.worker
        self._prices = prices

    def check(
        self,
        edit: RequestState,
        running: Iterable[RequestState],
        waiting: Iterable[RequestState],
        now: float,
    ) -> None:
        """Check that there is time enough for an edit.

        Args:
            edit: edit with its execution plan.
            running: edits that have a row.
            waiting: edits that wait for a row.
            now: time.monotonic().

        Raises:
            DeadlineExceeded: it cannot be done in time even if it has the worker to itself.
            Overloaded: it cannot be done in time beside the other edits.
        """
        limit_ms = edit.job.request.settings.deadline_ms
        if edit.deadline is None or limit_ms is None or not self._refuse_above:
            return
        pricing = self._prices()
        if pricing is None:
            return
        work, request = edit.work, edit.job.request
        router_edit, share = _priced_edit(edit), min([1.0, *(level.work for level in edit.levels)])
        idle_view = self._view(router_edit, pricing, (), ())
        after_s = request.after_token_s * work.total_tokens
        least_s = share * predicted_seconds(router_edit, idle_view, 0.0) + after_s
        if least_s > self._refuse_above * limit_ms / 1e3:
            raise DeadlineExceeded(
                f"SETTINGS.deadline_ms: {limit_ms} ms are too short for this edit; alone on this "
                f"worker it takes about {math.ceil(1e3 * least_s)} ms"
            )
        ahead = [queued_edit for queued_edit in waiting if _order(queued_edit) <= _order(edit)]
        now_s = share * predicted_seconds(
            router_edit, self._view(router_edit, pricing, running, ahead), 0.0
        )
        soonest_s = now_s + after_s
        left_s = edit.deadline - now
        if soonest_s > self._refuse_above * left_s:
            raise Overloaded(
                f"SETTINGS.deadline_ms: the edit would be done in about {soonest_s:.1f} s, and "
                f"{max(left_s, 0.0):.1f} s are left; try again later"
            )

    def level(
        self, edit: RequestState, running: Iterable[RequestState], now: float
    ) -> ReuseLevel | None:
        """Return the reuse level that an edit steps down to as it gets its row; None: it is in
        time, or may not step down.

        Args:
            edit: edit with `levels`.
            running: edits that have a row beside it.
            now: time.monotonic().
        """
        pricing, due_at = self._prices(), edit.due_at
        if pricing is None or due_at is None:
            return None
        router_edit = _priced_edit(edit)
        needs_s = predicted_seconds(router_edit, self._view(router_edit, pricing, running, ()), 0.0)
        if needs_s <= due_at - now:
            return None
        enough = (level for level in edit.levels if level.work * needs_s <= due_at - now)
        return next(enough, edit.levels[-1])

    def gains_by_waiting(
        self,
        edit: RequestState,
        without: ExecutionPlan,
        plan: ExecutionPlan,
        anchors: int,
        running: Iterable[RequestState],
    ) -> bool:
        """Whether an edit would be late now, and in time after its template's priming.

        Args:
            edit: edit without its template.
            without: its plan without the template.
            plan: its plan after the priming.
            anchors: number of anchors still to prime, a dense step each.
            running: edits that have a row beside it.
        """
        pricing, due_at = self._prices(), edit.due_at
        if pricing is None or due_at is None:
            return False
        immediate, left_s = _priced_edit(edit, without), due_at - time.monotonic()
        cached = _priced_edit(edit, plan)
        view = self._view(immediate, pricing, running, ())
        if predicted_seconds(immediate, view, 0.0) <= left_s:
            return False
        priming = replace(_priced_edit(edit, DENSE), steps=anchors, controls=())
        phases = (priming, cached)
        return sum(predicted_seconds(phase, view, 0.0) for phase in phases) <= left_s

    def _view(
        self,
        priced_edit: Edit,
        pricing: Pricing,
        running: Iterable[RequestState],
        waiting: Iterable[RequestState],
    ) -> WorkerView:
        """Return the worker as a router would see it with these edits alone and
        all entries loaded.
        """
        status = WorkerStatus(
            worker=self._worker,
            model="",
            state="ready",
            max_rows=self._engine.max_rows,
            max_waiting=self._engine.max_waiting,
            devices=batches_of(self._engine),
            running=tuple([edit.status() for edit in running]),
            waiting=tuple([edit.status() for edit in waiting]),
            templates={DEVICE.name: (entries_id(priced_edit.template_id),)},
        )
        return WorkerView.from_status(status, pricing, 0.0)


def _priced_edit(edit: RequestState, plan: ExecutionPlan | None = None) -> Edit:
    """Return the edit as a router would see it, with plan `plan` or its own."""
    work, plan = edit.work, plan or edit.plan
    has_refresh = plan.schedule is not None
    return Edit(
        steps=work.steps,
        active_tokens=work.passes * work.active_tokens,
        total_tokens=work.passes * work.total_tokens,
        template_id=edit.job.request.template_id,
        cache=plan.mode != "dense",
        dense_steps=plan.dense_steps,
        refresh_steps=plan.dense_steps if has_refresh else 0,
        always_refreshes=has_refresh,
        inner_tokens=work.passes * work.inner_tokens,
        ring_tokens=work.passes * work.ring_tokens,
        controls=shares(edit.controls.effective, work.steps),
    )


def _order(edit: RequestState) -> tuple[int, float]:
    """Order edits that wait for a row as the scheduler does; the least comes first."""
    due_at = edit.due_at
    return -edit.job.request.settings.priority, math.inf if due_at is None else due_at
