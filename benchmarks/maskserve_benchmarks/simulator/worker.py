"""One worker's step loop in virtual time, around the production scheduler."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise

from maskserve_benchmarks.simulator.hardware import CONTROL, Hardware
from maskserve_benchmarks.simulator.job import Job
from maskserve_benchmarks.simulator.loras import NBYTES, WorkerLoras
from maskserve_benchmarks.simulator.residency import Host
from maskserve_benchmarks.simulator.scenario import Scenario
from maskserve_benchmarks.simulator.workload import Request
from maskserve_common.routing import Edit, RowLoad, WorkerView
from maskserve_engine.scheduling.step_scheduler import MakePolicy, Run, StepScheduler, Ticket

At = Callable[[float, Callable[..., None], object], None]
"""Schedules a call of a method at a time, with an argument."""


@dataclass(slots=True)
class _Prime:
    """A priming row: one anchor per step."""

    template: str
    left: int


class Worker:
    """Steps rows, reports ended edits to the cluster, and counts what must be conserved."""

    def __init__(
        self,
        name: str,
        hardware: Hardware,
        scenario: Scenario,
        host: Host | None,
        at: At,
        on_end: Callable[[Job, float], None],
        seed: int,
        policy: MakePolicy = StepScheduler,
    ) -> None:
        self.name = name
        self.hardware = hardware
        self.scenario = scenario
        self.host = host
        self.loras = WorkerLoras(scenario.loras, at) if scenario.loras else None
        self.scheduler = policy(scenario.max_rows, scenario.max_waiting, scenario.priming_share)
        self.steps = 0
        self.row_steps = 0
        self.prime_steps = 0
        self.loaded_bytes = 0.0
        self.misses = 0
        self.primed = 0
        self.intervals: list[tuple[float, float]] = []
        """(start, end) of every busy period."""
        self._at = at
        self._on_end = on_end
        self._random = random.Random(seed)
        self._assigned: dict[str, Job] = {}
        self._primes: dict[str, _Prime] = {}
        self._gate: list[Job] = []
        """Static batching: ready edits that wait for the end of the batch."""
        self._finished: list[Job] = []
        """Static batching: finished edits that wait for the end of the batch."""
        self._stepping: tuple[Run, ...] | None = None
        self._step_began = 0.0
        self._debt = 0.0
        """Strawman: seconds of post-processing before the loop's next step."""
        self._view: WorkerView | None = None

    # Routing's view

    def view(self) -> WorkerView:
        """Return the state at the last step boundary, as a status record does, plus all edits sent
        since.
        """
        if self._view is None:
            jobs = self._assigned.values()
            running = [job for job in jobs if not math.isnan(job.started) and job.left]
            waiting = [job for job in jobs if math.isnan(job.started)]
            tiers = self.host.tiers() if self.host is not None else None
            hidden = self.scenario.tiers is not None and not self.scenario.tiers.known
            self._view = WorkerView(
                self.name,
                self.hardware.pricing,
                self.scenario.max_rows,
                self.scenario.max_waiting,
                running=tuple(job.row._replace(steps=job.left) for job in running),
                waiting=tuple(job.row for job in waiting),
                templates=None if hidden else tiers,
                adapters=self.loras.view() if self.loras else None,
                # An idle worker has done nothing since then.
                as_of=math.inf if self._stepping is None else self._step_began,
            )
        return self._view

    # From arrival to the batch

    def send(self, request: Request, edit: Edit, predicted: float, now: float) -> Job:
        """Accept an edit. It enters the batch when it is prepared and its entries and LoRAs are
        ready.

        Raises:
            Overloaded: there is no room for its LoRAs.
        """
        number = str(request.number)
        arrived = self.loras.hold(number, edit.adapters, now) if self.loras else now
        row, fetch, hit = self._admission(edit, controlled=request.controlled)
        cached = row.tokens < edit.total_tokens
        refresh_steps = (
            self.hardware.refresh_steps(edit.steps) if cached and not hit else frozenset[int]()
        )
        job = Job(
            request,
            edit,
            self.name,
            cached,
            row,
            now,
            edit.steps,
            refresh_steps=refresh_steps,
            predicted=predicted,
        )
        self._assigned[number] = job
        self._view = None
        inline = self.scenario.batching == "strawman"
        prepared = max(arrived, now + (0.0 if inline else self.scenario.pre_seconds))
        if self.host is not None and edit.cache:
            if not cached or refresh_steps:
                self._record_miss(edit.template_id, now)
            elif fetch:
                arrives = self.host.fetch(edit.template_id, now)
                self._at(arrives, self._end_fetch, edit.template_id)
                prepared = max(prepared, arrives)
            else:
                self.host.use(edit.template_id)
        self._at(prepared, self._ready, job)
        return job

    def _admission(self, edit: Edit, *, controlled: bool) -> tuple[RowLoad, float, bool]:
        """Return how the worker runs the edit given its real state, the seconds of a fetch, and
        whether its template is there. Even if the policy does not know the edit's ControlNet, its
        steps compute it.
        """
        tiers = self.host.tiers() if self.host is not None else None
        loras = self.loras.view() if self.loras else None
        bare = WorkerView(self.name, self.hardware.pricing, 1, 1, templates=tiers, adapters=loras)
        hit = edit.cache and bare.tier_of(edit.template_id) is not None
        as_it_is = replace(edit, controls=CONTROL if controlled else ())
        row = bare.row(edit)._replace(tokens=bare.row(as_it_is).tokens)
        return row, bare.price(edit)[2], hit

    def _end_fetch(self, now: float, template: object) -> None:
        assert self.host is not None
        self.host.end_fetch(str(template))

    def _record_miss(self, template: str, now: float) -> None:
        self.misses += 1
        assert self.host is not None
        if self.host.should_prime(template):
            name, tokens = f"prime:{template}", self.hardware.tokens
            steps = self.hardware.anchors
            self.scheduler.submit(Ticket(name, steps, tokens, tokens, now, background=True))
            self._primes[name] = _Prime(template, steps)
            if self._stepping is None:
                self._at(now, self._begin, None)

    def _ready(self, now: float, job: object) -> None:
        assert isinstance(job, Job)
        if self.scenario.batching == "static":
            self._gate.append(job)
        else:
            self._submit(job)
        if self._stepping is None:
            self._begin(now)

    def _submit(self, job: Job) -> None:
        request = job.request
        deadline = self.scenario.deadline
        self.scheduler.submit(
            Ticket(
                str(request.number),
                request.steps,
                self.hardware.tokens,
                job.row.tokens,
                request.arrival,
                deadline=None if deadline is None else request.arrival + deadline,
                cost=self.hardware.step_seconds(*_alone(job.row.tokens, self.hardware.tokens)),
                due=None if deadline is None else request.arrival + deadline,
            )
        )

    # The loop

    def _begin(self, now: float, _: object = None) -> None:
        """Decide at a step boundary, and run until the next one."""
        if self._stepping is not None:
            return
        if self.scenario.batching == "static" and not len(self.scheduler):
            batch, self._gate = (
                self._gate[: self.scenario.max_rows],
                self._gate[self.scenario.max_rows :],
            )
            for job in batch:
                self._submit(job)
        decision = self.scheduler.schedule(now)
        if len(decision.running) > self.scenario.max_rows:
            raise RuntimeError(f"{self.name}: {len(decision.running)} rows")
        for ticket in decision.expired:
            self._end(self._assigned[ticket.request_id], "expired", now)
        self._view = None
        self._step_began = now
        admitted = [t for t in decision.admitted if not t.background]
        for ticket in admitted:
            self._assigned[ticket.request_id].started = now
        if not decision.running:
            return
        self._stepping = decision.runs
        stall, self._debt = self._debt, 0.0
        if self.scenario.batching == "strawman":
            stall += self.scenario.pre_seconds * len(admitted)
        seconds = stall + self._seconds(decision.runs)
        if self.intervals and self.intervals[-1][1] == now:
            self.intervals[-1] = (self.intervals[-1][0], now + seconds)
        else:
            self.intervals.append((now, now + seconds))
        self._at(now + seconds, self._end_step, None)

    def _seconds(self, runs: tuple[Run, ...]) -> float:
        """Return the seconds of all runs. Runs on the same devices follow one another."""
        seconds_by_devices: dict[tuple[int, ...], float] = {}
        for run in runs:
            run_s = sum(self._step_seconds(self._left(run, n)) for n in range(run.steps))
            seconds_by_devices[run.devices] = seconds_by_devices.get(run.devices, 0.0) + run_s
        return max(seconds_by_devices.values())

    def _left(self, run: Run, steps: int) -> tuple[Ticket, ...]:
        """Return the rows of a run that have more than `steps` steps left."""
        pairs: list[tuple[Ticket, _Prime | Job | None]] = [
            (
                ticket,
                self._primes.get(ticket.request_id)
                if ticket.background
                else self._assigned.get(ticket.request_id),
            )
            for ticket in run.rows
        ]
        return tuple(ticket for ticket, work in pairs if work is not None and work.left > steps)

    def _step_seconds(self, running: tuple[Ticket, ...]) -> float:
        cached = active = dense = refresh_rows = 0
        for ticket in running:
            job = self._assigned.get(ticket.request_id)
            reads = ticket.active_tokens < ticket.total_tokens
            if not reads or (job is not None and job.at_refresh_step):
                dense += 1
                if not reads or (job is not None and not job.begun):
                    continue  # later refresh steps are computed beside the step that reaches them
            cached += 1
            active += ticket.active_tokens
            if job is not None and job.refresh_steps:
                refresh_rows += 1
            else:
                self.loaded_bytes += self.hardware.load_bytes(ticket.active_tokens)
        seconds = self.hardware.step_seconds(cached, active, dense, refresh_rows)
        seconds += sum(map(self._added_seconds, running))
        if self.scenario.noise:
            seconds *= math.exp(self._random.gauss(0.0, self.scenario.noise))
        return seconds

    def _added_seconds(self, ticket: Ticket) -> float:
        """Return the seconds that a row's ControlNet and LoRAs add to a step."""
        job = self._assigned.get(ticket.request_id)
        if job is None:
            return 0.0
        seconds, cached = 0.0, ticket.active_tokens < ticket.total_tokens
        if job.request.controlled:
            seconds += self.hardware.control_seconds(ticket.active_tokens, cached=cached)
        if self.loras and job.request.loras:
            nbytes = NBYTES * len(job.request.loras)
            seconds += self.hardware.lora_seconds(nbytes, ticket.active_tokens, cached=cached)
        return seconds

    def _end_step(self, now: float, _: object) -> None:
        assert self._stepping is not None
        runs, self._stepping = self._stepping, None
        for run in runs:
            for _ in range(run.steps):
                self._end_run_step(self._left(run, 0), now)
        if self._finished and not len(self.scheduler):
            for job in self._finished:
                self._finish(job, now)
            self._finished = []
        self._begin(now)

    def _end_run_step(self, rows: tuple[Ticket, ...], now: float) -> None:
        self.steps += 1
        for ticket in rows:
            if ticket.background:
                self._end_prime_step(ticket.request_id)
                continue
            job = self._assigned[ticket.request_id]
            job.left -= 1
            job.tokens_done += job.row.tokens
            self.row_steps += 1
            if not job.left:
                self.scheduler.finish(ticket.request_id)
                job.denoised = now
                if self.scenario.batching == "static":
                    self._finished.append(job)
                else:
                    self._finish(job, now)

    def _end_prime_step(self, name: str) -> None:
        prime = self._primes[name]
        prime.left -= 1
        self.prime_steps += 1
        if not prime.left:
            self.scheduler.finish(name)
            del self._primes[name]
            self.primed += 1
            assert self.host is not None
            self.host.end_priming(prime.template)

    def _finish(self, job: Job, now: float) -> None:
        post = self.scenario.post_seconds
        if self.scenario.batching == "strawman":
            # The loop does the post-processing itself, one edit after the other, before its next
            # step.
            self._debt += post
            self._end(job, "done", now + self._debt)
        else:
            self._end(job, "done", now + post)

    def _end(self, job: Job, outcome: str, when: float) -> None:
        del self._assigned[str(job.request.number)]
        if self.loras:
            self.loras.release(str(job.request.number), when)
        self._view = None
        if job.outcome:
            raise RuntimeError(f"edit {job.request.number} ended twice")
        job.outcome, job.ended = outcome, when
        self._on_end(job, when)

    def check_empty(self) -> None:
        """Check that no work is left after the last event.

        Raises:
            RuntimeError: some work is left.
        """
        self.scheduler.check_integrity()
        if self._assigned or self._gate or self._finished or len(self.scheduler):
            raise RuntimeError(f"{self.name}: work is left: {len(self._assigned)} edits")
        for (_, end), (start, _) in pairwise(self.intervals):
            if start < end:
                raise RuntimeError(f"{self.name}: busy twice at {start}")


def _alone(active: int, total: int) -> tuple[int, int, int]:
    """Return (cached rows, their computed tokens, dense rows) of a step of one row."""
    return (1, active, 0) if active < total else (0, 0, 1)
