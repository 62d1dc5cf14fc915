"""A simulated worker whose devices are processes on the cores of one machine. The encoder, the
ranks and the decoder share the cores. The production schedulers decide.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from maskserve_engine.scheduling.gangs.work import seconds_together
from maskserve_engine.scheduling.step_scheduler import Devices, Run, SchedulingPolicy, Ticket

_NOTHING_S = 1e-9


@dataclass(frozen=True, slots=True)
class StagedEdit:
    """An edit with its stages before and after the steps. Seconds are for one core of its own."""

    ticket: Ticket
    """Its `arrival` is the arrival at the front. It is due at the end of the last step."""
    before: float
    """Seconds of encoding; edits are encoded one at a time."""
    after: float
    """Seconds of decoding; edits are decoded one at a time."""


@dataclass(slots=True)
class _Job:
    """Work that uses cores at the moment."""

    left: float
    """Seconds left on a core of its own."""
    cores: int
    step: Run | None
    """The step; None: a stage."""


class Machine:
    """Runs edits until all are answered.

    Args:
        policy: from core; each decision is for one step.
        devices: of the worker; each one uses one core.
        cores: of the machine. If the jobs want more cores, all of them slow down in proportion.
            inf: nobody waits.
    """

    def __init__(self, policy: SchedulingPolicy, devices: int, cores: float = math.inf) -> None:
        self._policy, self._devices, self._cores = policy, devices, cores
        self._left: dict[str, int] = {}
        self.answered: dict[str, float] = {}
        """Times of the answers, by the ticket's name."""

    def run(self, edits: Sequence[StagedEdit]) -> dict[str, float]:
        """Times at which the edits were answered.

        Raises:
            RuntimeError: the policy left edits waiting forever.
        """
        now_s = 0.0
        arrivals = deque(sorted(edits, key=lambda edit: edit.ticket.arrival))
        encoding: deque[StagedEdit] = deque()
        decoding: deque[StagedEdit] = deque()
        by_name = {edit.ticket.request_id: edit for edit in edits}
        stages: dict[str, _Job] = {}
        steps: list[_Job] = []
        while len(self.answered) < len(by_name):
            while arrivals and arrivals[0].ticket.arrival <= now_s:
                encoding.append(arrivals.popleft())
            if encoding and "encode" not in stages:
                stages["encode"] = _Job(encoding[0].before, 1, None)
            if decoding and "decode" not in stages:
                stages["decode"] = _Job(decoding[0].after, 1, None)
            ended = [name for name, job in stages.items() if job.left <= _NOTHING_S]
            for name in ended:
                del stages[name]
                if name == "encode":
                    ticket = encoding.popleft().ticket
                    self._left[ticket.request_id] = ticket.steps
                    self._policy.submit(replace(ticket, arrival=now_s))
                else:
                    self.answered[decoding.popleft().ticket.request_id] = now_s
            for job in [job for job in steps if job.left <= _NOTHING_S]:
                steps.remove(job)
                assert job.step is not None
                for ticket in job.step.rows:
                    name = ticket.request_id
                    self._left[name] -= 1
                    if not self._left[name]:
                        self._policy.finish(name)
                        decoding.append(by_name[name])
            if ended and not steps and not len(self._policy):
                continue  # a stage may begin at once
            busy = frozenset(d for job in steps if job.step for d in job.step.devices)
            next_decision_s = math.inf
            if len(busy) < self._devices and len(self._policy):
                decision = self._policy.schedule(now_s, Devices(busy, frozenset()))
                next_decision_s = (
                    decision.next_decision if decision.next_decision > now_s else math.inf
                )
                for run in decision.runs:
                    step_s = seconds_together(run.rows, len(run.devices))
                    steps.append(_Job(step_s, len(run.devices), run))
            now_s = self._go_on(now_s, next_decision_s, arrivals, encoding, decoding, stages, steps)
        return self.answered

    def _go_on(
        self,
        now: float,
        again: float,
        arrivals: deque[StagedEdit],
        encoding: deque[StagedEdit],
        decoding: deque[StagedEdit],
        stages: dict[str, _Job],
        steps: list[_Job],
    ) -> float:
        """Advance to the next moment at which a job may begin."""
        if (encoding and "encode" not in stages) or (decoding and "decode" not in stages):
            return now
        jobs: list[Any] = [*stages.values(), *steps]
        speed = min(1.0, self._cores / max(1, sum(job.cores for job in jobs)))
        wait_s = min([job.left / speed for job in jobs], default=math.inf)
        wait_s = min(wait_s, again - now)
        if arrivals:
            wait_s = min(wait_s, arrivals[0].ticket.arrival - now)
        if wait_s == math.inf:
            raise RuntimeError(f"{len(self._policy)} edits are left lying")
        for job in jobs:
            job.left -= wait_s * speed
        return now + wait_s
