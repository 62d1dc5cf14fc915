"""Predicted times of workflow runs: remaining seconds, nodes' due times, admission checks."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from maskserve_common.errors import DeadlineExceeded
from maskserve_router.config import RouterConfig
from maskserve_router.messages.failures import RetryLater
from maskserve_workflows.lengths import Price
from maskserve_workflows.node_types import ENCODE
from maskserve_workflows.nodes import NODE_TYPES
from maskserve_workflows.plan import NodeCall, WorkflowPlan, is_edit
from maskserve_workflows.run import Task, WorkflowRun
from maskserve_workflows.scheduling import (
    ORDERS,
    NodePlace,
    Prices,
    ReadyNode,
    admits,
    in_pieces,
    predicted_ends,
)

_NEWEST_WEIGHT = 0.2
"""Weight of the newest edit in the mean seconds of a step's edits."""


@dataclass(slots=True, eq=False)
class RunTime:
    """A run under way; times are on time.monotonic's clock."""

    plan: WorkflowPlan
    machine: WorkflowRun
    begin: float
    due: float
    """Time when its answer is due; infinite: it has no due time."""
    until: float
    """Time when the client stops to wait; infinite: never."""
    edit_s: dict[str, float] = field(default_factory=dict)
    """Seconds of edits with known masks, by step id, and by task key once the task is ready."""
    sent: dict[str, str] = field(default_factory=dict)
    """Task key -> request id of its edit."""


class RunTimes:
    """Predicts runs. Use it from the event loop only.

    Args:
        config: order of edits, and the slack of predictions.
        node_s: mean seconds of recent calls of a node type; None: unknown.
        workers: for each ready worker, the seconds until all its rows have ended.
        share_left: by request id, the share of steps left of an edit that has a row; None: it waits
            for one.
    """

    def __init__(
        self,
        config: RouterConfig,
        node_s: Callable[[str], float | None],
        workers: Callable[[], Sequence[float]],
        share_left: Callable[[str], float | None] = lambda name: None,
    ) -> None:
        self._order = ORDERS[config.routing.order]
        self._slack = config.admission.deadline_slack
        self._node_s, self._workers, self._share_left = node_s, workers, share_left
        self._edit_s: dict[tuple[str, str], float] = {}
        """(workflow, step) -> mean seconds of recent edits, for edits whose masks are not known
        yet."""
        self._encode_s: float | None = None
        """Mean seconds of recent encodings; None: unknown."""
        self._runs: list[RunTime] = []

    def begin(self, run: RunTime) -> None:
        """Register a run until its end.

        Raises:
            DeadlineExceeded: it could not be in time even on idle workers.
            RetryLater: it cannot be in time now, or would make an admitted run late.
        """
        if run.until < math.inf:
            self._check(run)
        self._runs.append(run)

    def end(self, run: RunTime) -> None:
        """Remove a run that has ended."""
        self._runs.remove(run)

    def learn(self, run: RunTime, task: Task, meta: dict[str, Any], seconds: float) -> None:
        """Learn the seconds of an answered edit.

        Args:
            run: run of the edit.
            task: task of the edit.
            meta: META of the answer.
            seconds: seconds from sending to the answer.
        """
        waited = meta.get("timings_ms", {}).get("queue", 0.0) / 1e3
        run_s = max(seconds - waited, 0.0)
        step = run.plan.name, task.call.id
        average_s = self._edit_s.get(step, run_s)
        self._edit_s[step] = average_s + _NEWEST_WEIGHT * (run_s - average_s)

    def learn_encoding(self, seconds: float) -> None:
        """Learn the seconds of an encoding for several edits, from sending to the answer."""
        average_s = seconds if self._encode_s is None else self._encode_s
        self._encode_s = average_s + _NEWEST_WEIGHT * (seconds - average_s)

    def due_of(self, run: RunTime, task: Task) -> float:
        """Return the due time of a node: that of the run less the seconds of the nodes after it."""
        return run.due - run.machine.chain_s(task.key, self._price(run))

    def deadline_of(self, run: RunTime, task: Task) -> float:
        """Return the time after which a node's answer is too late for the nodes after it."""
        later_s = run.machine.chain_s(task.key, self._price(run, guess=False))
        return run.until - later_s / self._slack

    def check_next(self, run: RunTime, task: Task) -> None:
        """Check that a run can still be in time before a node begins.

        Raises:
            DeadlineExceeded: the node and the nodes after it take too long.
        """
        if run.until == math.inf:
            return
        price, remaining_s = self._price(run, guess=False), self._left(run)
        needed = self._seconds_of(run, task, price) + run.machine.chain_s(task.key, price)
        if needed > remaining_s * self._slack:
            raise DeadlineExceeded(
                f"{task.key} and the nodes after it take about {needed:.1f} s, and "
                f"{max(remaining_s, 0.0):.1f} s are left for {run.plan.name}"
            )

    def _check(self, run: RunTime) -> None:
        now_s, new = time.monotonic(), self._remaining_work(run)
        places = [NodePlace(str(n), now_s + busy_s) for n, busy_s in enumerate(self._workers())]
        admitted = [self._remaining_work(admitted_run) for admitted_run in self._runs]
        if not places or admits(new, admitted, places, Prices(), now_s, self._order) is not None:
            return
        remaining_s, needed = self._left(run), new.chain_s + new.run_s
        if needed > remaining_s * self._slack:
            raise DeadlineExceeded(
                f"{max(remaining_s, 0.0):.1f} s are too short for {run.plan.name}, "
                f"which takes about {needed:.1f} s"
            )
        ends = predicted_ends([*admitted, new], places, Prices(), now_s, self._order)[new.key]
        raise RetryLater(
            f"{run.plan.name} would take about {ends - now_s:.1f} s while earlier runs go on, and "
            f"{remaining_s:.1f} s are left",
            max(ends - now_s - remaining_s, 1.0),
        )

    def _remaining_work(self, run: RunTime) -> ReadyNode:
        """Return the remaining work of a run: its edits at workers, then all other nodes.

        It leaves out edits that have a row, because they are part of their worker's load.
        """
        price = self._price(run, guess=False)

        def remaining(task: Task, *, rows: bool = True) -> float:
            share = self._share_left(run.sent[task.key]) if task.key in run.sent else None
            task_s = self._seconds_of(run, task, price)
            return task_s if share is None else task_s * share * rows

        def edits(call: NodeCall) -> float:
            return price(call) if is_edit(call) else 0.0

        def waiting(task: Task) -> float:
            return remaining(task, rows=False) if is_edit(task.call) else 0.0

        path, _ = run.machine.remaining_s(price, remaining)
        _, work = run.machine.remaining_s(edits, waiting)
        due_time = run.begin + (run.until - run.begin) * self._slack
        return in_pieces(str(id(run)), run.begin, due_time, path, work)

    def _left(self, run: RunTime) -> float:
        return run.until - time.monotonic()

    def _seconds_of(self, run: RunTime, task: Task, price: Price) -> float:
        """Return the seconds of a ready task."""
        return run.edit_s.get(task.key, price(task.call))

    def _price(self, run: RunTime, *, guess: bool = True) -> Price:
        """Return a function from a call of a run to its seconds.

        Args:
            run: run of the calls.
            guess: whether edits with unknown masks count with the mean of recent edits, and calls
                that were never measured with their declared seconds; otherwise both count as 0.
        """

        def seconds(call: NodeCall) -> float:
            if is_edit(call):
                measured_s = run.edit_s.get(call.id)
                if measured_s is None and guess:
                    measured_s = self._edit_s.get((run.plan.name, call.id))
            elif call.node == ENCODE:
                measured_s = self._encode_s
            else:
                measured_s = self._node_s(call.node)
            return (
                (NODE_TYPES[call.node].price_s if guess else 0.0)
                if measured_s is None
                else measured_s
            )

        return seconds
