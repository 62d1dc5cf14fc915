"""The rules that choose a worker. Each is a small class behind `Policy`; ties go to the lowest
worker id, and workers that take nothing (not ready, queue full, another model) are passed over.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from maskserve_common.errors import Overloaded
from maskserve_common.routing.predict import predicted_seconds
from maskserve_common.routing.view import Edit, WorkerView


class NoWorkerAvailable(Overloaded):
    """No worker can take the edit now."""

    def __init__(self, edit: Edit, workers: Sequence[WorkerView]) -> None:
        ready = [w for w in workers if w.ready]
        fitting = [w for w in ready if not edit.model or w.model == edit.model]
        self.full = bool(fitting)
        """Whether every worker that could serve the edit has a full queue: trying again helps."""
        if fitting:
            why = f"the queues of all {len(fitting)} workers are full"
        elif ready:
            why = f"none of the {len(ready)} ready workers serves model {edit.model!r}"
        else:
            why = f"none of {len(workers)} workers is ready"
        super().__init__(f"{why}; try again later")


class Policy(Protocol):
    """Chooses a worker; it does not send, and does not change its arguments."""

    @property
    def name(self) -> str: ...

    @property
    def predicts(self) -> bool:
        """Whether it is the rule of `WorkerTable.choose`."""
        ...

    def choose(self, edit: Edit, workers: Sequence[WorkerView], now: float) -> str:
        """Return the id of the worker that should take `edit`.

        Args:
            edit: the edit.
            workers: one view per worker, in any order.
            now: seconds on the clock of the views' `as_of`.

        Raises:
            NoWorkerAvailable: no worker takes it.
        """
        ...


def _least(edit: Edit, workers: Sequence[WorkerView], score: Callable[[WorkerView], float]) -> str:
    best: tuple[float, str] | None = None
    for worker in workers:
        if worker.takes(edit):
            scored = (score(worker), worker.worker)
            if best is None or scored < best:
                best = scored
    if best is None:
        raise NoWorkerAvailable(edit, workers)
    return best[1]


class MaskAware:
    """The worker that will be done with the edit first: FlashPS Algorithm 2 on live state, with
    what waits, what ends on the way, and where the template's entries lie (see `predict`).
    """

    name = "mask_aware"
    predicts = True

    def choose(self, edit: Edit, workers: Sequence[WorkerView], now: float) -> str:
        return _least(edit, workers, lambda worker: predicted_seconds(edit, worker, now))


class RoundRobin:
    """The next worker by id after the one chosen last. The only policy with a memory."""

    name = "round_robin"
    predicts = False

    def __init__(self) -> None:
        self._last = ""

    def choose(self, edit: Edit, workers: Sequence[WorkerView], now: float) -> str:
        takers = [worker.worker for worker in workers if worker.takes(edit)]
        if not takers:
            raise NoWorkerAvailable(edit, workers)
        later = [worker for worker in takers if worker > self._last]
        self._last = min(later or takers)
        return self._last


class LeastRequests:
    """The fewest edits, running and waiting."""

    name = "least_requests"
    predicts = False

    def choose(self, edit: Edit, workers: Sequence[WorkerView], now: float) -> str:
        return _least(edit, workers, lambda w: len(w.running) + len(w.waiting))


class LeastTokens:
    """The fewest tokens to compute per step, running and waiting: the paper's token-level rule."""

    name = "least_tokens"
    predicts = False

    def choose(self, edit: Edit, workers: Sequence[WorkerView], now: float) -> str:
        return _least(
            edit,
            workers,
            lambda w: sum(row.tokens for row in w.running) + sum(row.tokens for row in w.waiting),
        )


POLICIES: dict[str, Callable[[], Policy]] = {
    "mask_aware": MaskAware,
    "round_robin": RoundRobin,
    "least_requests": LeastRequests,
    "least_tokens": LeastTokens,
}


def make_policy(name: str) -> Policy:
    """A policy by its name.

    Raises:
        ValueError: no such policy; the message names those there are.
    """
    if name not in POLICIES:
        raise ValueError(f"policy {name!r} is not one of {', '.join(POLICIES)}")
    return POLICIES[name]()
