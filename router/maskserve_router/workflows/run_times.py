"""What runs of workflows still take, when their nodes are due, and whether they can be in time."""

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
from maskserve_workflows.node_types import EDIT
from maskserve_workflows.nodes import NODE_TYPES
from maskserve_workflows.plan import NodeCall, WorkflowPlan
from maskserve_workflows.run import Task, WorkflowRun
from maskserve_workflows.scheduling import (
    ORDERS,
    NodePlace,
    Prices,
    ReadyNode,
    admits,
    in_pieces,
    predicted,
)

_REMEMBERED = 0.2
"""Weight of the last edit in what those of a step take."""


@dataclass(slots=True, eq=False)
class RunTime:
    """Of a run that is under way, on time.monotonic's clock."""

    plan: WorkflowPlan
    machine: WorkflowRun
    begin: float
    due: float
    """When its answer is due; infinite: at no time."""
    until: float
    """When nobody wants it any more."""
    edit_s: dict[str, float] = field(default_factory=dict)
    """What edits whose masks are known take by themselves, by step, and by task once that is ready.
    """
    sent: dict[str, str] = field(default_factory=dict)
    """Task -> request id of its edit."""


class RunTimes:
    """Used from the event loop only.

    Args:
        config: the order in which edits are sent, and how far predictions may be off.
        node_s: what a call of a node type has taken of late at node servers; None: not known.
        workers: of each that takes edits now, seconds until all that has a row there has ended.
        share_left: of the steps of an edit that has a row, by its request id; None: it waits.
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
        """What they took of late, by workflow and step: for those whose masks are not known yet."""
        self._runs: list[RunTime] = []

    def begin(self, run: RunTime) -> None:
        """A run begins: it counts until it ends.

        Raises:
            DeadlineExceeded: it could not be in time, whatever else was to do.
            RetryLater: it cannot be now, or one that has begun could not be any more.
        """
        if run.until < math.inf:
            self._check(run)
        self._runs.append(run)

    def end(self, run: RunTime) -> None:
        """It has ended."""
        self._runs.remove(run)

    def learn(self, run: RunTime, task: Task, meta: dict[str, Any], seconds: float) -> None:
        """An edit was answered.

        Args:
            run: that it is of.
            task: that it was.
            meta: the answer's.
            seconds: that it took in all.
        """
        waited = meta.get("timings_ms", {}).get("queue", 0.0) / 1e3
        run_s = max(seconds - waited, 0.0)
        step = run.plan.name, task.call.id
        average_s = self._edit_s.get(step, run_s)
        self._edit_s[step] = average_s + _REMEMBERED * (run_s - average_s)

    def due_of(self, run: RunTime, task: Task) -> float:
        """When a node is due: as long before its run as what lies behind it takes."""
        return run.due - run.machine.behind(task.key, self._price(run))

    def wanted_until(self, run: RunTime, task: Task) -> float:
        """When nobody wants a node's answer any more: what lies behind it would be too late."""
        behind = run.machine.behind(task.key, self._price(run, guess=False))
        return run.until - behind / self._slack

    def check_next(self, run: RunTime, task: Task) -> None:
        """Refuse to begin a node of a run that cannot be in time any more.

        Raises:
            DeadlineExceeded: it, and what lies behind it, take too long.
        """
        if run.until == math.inf:
            return
        price, remaining_s = self._price(run, guess=False), self._left(run)
        needed = self._own(run, task, price) + run.machine.behind(task.key, price)
        if needed > remaining_s * self._slack:
            raise DeadlineExceeded(
                f"{task.key} and what lies behind it take about {needed:.1f} s, and "
                f"{max(remaining_s, 0.0):.1f} s are left for {run.plan.name}"
            )

    def _check(self, run: RunTime) -> None:
        now_s, new = time.monotonic(), self._still(run)
        places = [NodePlace(str(n), now_s + busy_s) for n, busy_s in enumerate(self._workers())]
        admitted = [self._still(admitted_run) for admitted_run in self._runs]
        if not places or admits(new, admitted, places, Prices(), now_s, self._order) is not None:
            return
        remaining_s, needed = self._left(run), new.behind_s + new.run_s[0]
        if needed > remaining_s * self._slack:
            raise DeadlineExceeded(
                f"{max(remaining_s, 0.0):.1f} s are too short for {run.plan.name}, "
                f"which takes about {needed:.1f} s"
            )
        ends = predicted([*admitted, new], places, Prices(), now_s, self._order)[new.key]
        raise RetryLater(
            f"{run.plan.name} would take about {ends - now_s:.1f} s beside those that have begun, "
            f"and {remaining_s:.1f} s are left",
            max(ends - now_s - remaining_s, 1.0),
        )

    def _still(self, run: RunTime) -> ReadyNode:
        """What is left of a run: its edits have the workers, all else lies behind them. Those that
        have a row already hold their workers by themselves.
        """
        price = self._price(run, guess=False)

        def rest(task: Task, *, rows: bool = True) -> float:
            share = self._share_left(run.sent[task.key]) if task.key in run.sent else None
            task_s = self._own(run, task, price)
            return task_s if share is None else task_s * share * rows

        def edits(call: NodeCall) -> float:
            return price(call) if call.node == EDIT else 0.0

        def waiting(task: Task) -> float:
            return rest(task, rows=False) if task.call.node == EDIT else 0.0

        path, _ = run.machine.left(price, rest)
        _, work = run.machine.left(edits, waiting)
        due_time = run.begin + (run.until - run.begin) * self._slack
        return in_pieces(str(id(run)), run.begin, due_time, path, work)

    def _left(self, run: RunTime) -> float:
        return run.until - time.monotonic()

    def _own(self, run: RunTime, task: Task, price: Price) -> float:
        """Seconds of a task that is ready."""
        return run.edit_s.get(task.key, price(task.call))

    def _price(self, run: RunTime, *, guess: bool = True) -> Price:
        """Seconds of a call of a run.

        Args:
            run: that it is of.
            guess: whether an edit whose mask is not known yet takes what its like took of late, and
                a call that was never measured what its declaration says; else either takes nothing.
        """

        def seconds(call: NodeCall) -> float:
            if call.node == EDIT:
                measured_s = run.edit_s.get(call.id)
                if measured_s is None and guess:
                    measured_s = self._edit_s.get((run.plan.name, call.id))
            else:
                measured_s = self._node_s(call.node)
            return (
                (NODE_TYPES[call.node].price_s if guess else 0.0)
                if measured_s is None
                else measured_s
            )

        return seconds
