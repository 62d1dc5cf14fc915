"""What runs of workflows still take, when their nodes are due, and whether they can be in time."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from maskserve_core.errors import DeadlineExceeded
from maskserve_core.workflows.lengths import Price
from maskserve_core.workflows.node_types import EDIT
from maskserve_core.workflows.nodes import NODE_TYPES
from maskserve_core.workflows.plan import NodeCall, WorkflowPlan
from maskserve_core.workflows.run import Task, WorkflowRun
from maskserve_core.workflows.scheduling import (
    ORDERS,
    NodePlace,
    Prices,
    ReadyNode,
    admits,
    in_pieces,
    predicted,
)
from maskserve_router.config import RouterConfig
from maskserve_router.failures import RetryLater

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


class RunTimes:
    """Used from the event loop only.

    Args:
        config: the order in which edits are sent, and how far predictions may be off.
        node_s: what a call of a node type has taken of late at node servers; None: not known.
        workers: how many take edits now.
    """

    def __init__(
        self,
        config: RouterConfig,
        node_s: Callable[[str], float | None],
        workers: Callable[[], int],
    ) -> None:
        self._order = ORDERS[config.routing.order]
        self._slack = config.admission.deadline_slack
        self._node_s, self._workers = node_s, workers
        self._edit_s: dict[tuple[str, str], float] = {}
        """By workflow and step: what differs between them is how large masks are."""
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
        taken = max(seconds - waited, 0.0)
        step = run.plan.name, task.call.id
        known = self._edit_s.get(step, taken)
        self._edit_s[step] = known + _REMEMBERED * (taken - known)

    def due_of(self, run: RunTime, task: Task) -> float:
        """When a node is due: as long before its run as what lies behind it takes."""
        return run.due - run.machine.behind(task.key, self._price(run.plan))

    def check_next(self, run: RunTime, task: Task) -> None:
        """Refuse to begin a node of a run that cannot be in time any more.

        Raises:
            DeadlineExceeded: it, and what lies behind it, take too long.
        """
        if run.until == math.inf:
            return
        price = self._price(run.plan, guess=False)
        needed, left = price(task.call) + run.machine.behind(task.key, price), self._left(run)
        if needed > left * self._slack:
            raise DeadlineExceeded(
                f"{task.key} and what lies behind it take about {needed:.1f} s, and "
                f"{max(left, 0.0):.1f} s are left for {run.plan.name}"
            )

    def _check(self, run: RunTime) -> None:
        now, new = time.monotonic(), self._still(run)
        places = [NodePlace(str(number), now) for number in range(self._workers())]
        admitted = [self._still(each) for each in self._runs]
        if not places or admits(new, admitted, places, Prices(), now, self._order) is not None:
            return
        left, needed = self._left(run), new.behind_s + new.run_s[0]
        if needed > left * self._slack:
            raise DeadlineExceeded(
                f"{left:.1f} s are too short for {run.plan.name}, which takes about {needed:.1f} s"
            )
        ends = predicted([*admitted, new], places, Prices(), now, self._order)[new.key]
        raise RetryLater(
            f"{run.plan.name} would take about {ends - now:.1f} s beside those that have begun, "
            f"and {left:.1f} s are left",
            max(ends - now - left, 1.0),
        )

    def _still(self, run: RunTime) -> ReadyNode:
        """What is left of a run: its edits have the workers, all else lies behind them."""
        price = self._price(run.plan, guess=False)
        path, _ = run.machine.left(price)
        _, edits = run.machine.left(lambda call: price(call) if call.node == EDIT else 0.0)
        due = run.begin + (run.until - run.begin) * self._slack
        return in_pieces(str(id(run)), run.begin, due, path, edits)

    def _left(self, run: RunTime) -> float:
        return run.until - time.monotonic()

    def _price(self, plan: WorkflowPlan, *, guess: bool = True) -> Price:
        """Seconds of a call of this plan.

        Args:
            plan: that it is of.
            guess: whether one that was never measured takes what its declaration says, or nothing.
        """

        def seconds(call: NodeCall) -> float:
            if call.node == EDIT:
                known = self._edit_s.get((plan.name, call.id))
            else:
                known = self._node_s(call.node)
            return (NODE_TYPES[call.node].price_s if guess else 0.0) if known is None else known

        return seconds
