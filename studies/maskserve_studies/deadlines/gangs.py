"""Edits with due times on one worker of several devices, in virtual time. The production policies
decide.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from maskserve_benchmarks.published_models import FLUX_DEV_SPEC
from maskserve_common.config import ModelConfig
from maskserve_common.line_fit import Line
from maskserve_engine.families.specs import counted_work
from maskserve_engine.planning.degree_costs import DEGREES, ExchangeCosts, seconds_by_degree
from maskserve_engine.planning.flops import ModelWork, RowTokens
from maskserve_engine.scheduling.gangs.fixed import Fixed
from maskserve_engine.scheduling.gangs.work import GangPolicy, Work, seconds_together
from maskserve_engine.scheduling.step_scheduler import Ticket

DUE = {256: 1.5, 512: 2.0, 1024: 3.0, 2048: 5.0}
"""Seconds until the due time, by side of the picture (TetriServe §6.1)."""
MIXES = ("uniform", "skewed")
SIZES = tuple(DUE)


@dataclass(frozen=True, slots=True)
class GangCosts:
    """Costs of a FLUX step on one kind of device."""

    tflops: float = 650.0
    """TFLOP/s that a step reaches."""
    fixed: float = 5e-3
    exchange: ExchangeCosts = field(default_factory=ExchangeCosts)

    @property
    def compute(self) -> Line:
        return Line(self.fixed, 1e-12 / self.tflops)

    def seconds(self, side: int, ratio: float | None = None) -> tuple[float, ...]:
        """Return the seconds of a step by degree. The step is dense, or reads keys and values
        cached at a mask ratio.
        """
        work, row = flux_row(side, 1.0 if ratio is None else ratio)
        kind = "dense" if ratio is None else "kv"
        return seconds_by_degree(work, row, kind, self.compute, self.exchange)


def flux_row(side: int, ratio: float = 1.0) -> tuple[ModelWork, RowTokens]:
    """Return the work of FLUX.1 dev on a square picture, and a row of this mask ratio."""
    work = counted_work(FLUX_DEV_SPEC, side // 8, side // 8, halo=0)
    text = FLUX_DEV_SPEC.text_tokens(ModelConfig().max_sequence_length)
    return work, work.row_at(ratio, text)


@dataclass(frozen=True, slots=True)
class Load:
    """Arrivals of dense edits."""

    mix: str = "uniform"
    """One of MIXES, or the side of all pictures."""
    per_minute: float = 12.0
    scale: float = 1.0
    """Factor on the due times."""
    edits: int = 300
    steps: int = 50
    cv: float = 1.0
    """Coefficient of variation of the gaps; 1 is Poisson."""


def size_shares(mix: str) -> NDArray[np.float64]:
    """Return the share of the edits of each of `SIZES` (TetriServe §6.1).

    Args:
        mix: one of MIXES, or the side of all pictures.
    """
    sides = np.array(SIZES)
    latent = (sides / 16) ** 2
    match mix:
        case "uniform":
            weight = np.ones(len(SIZES))
        case "skewed":
            weight = np.exp(latent / latent.max())
        case side:
            weight = (sides == int(side)).astype(float)
    shares: NDArray[np.float64] = weight / weight.sum()
    return shares


def draw(
    load: Load, times: dict[int, tuple[float, ...]], seed: int, shared: float = 0.0
) -> list[Ticket]:
    """Draw the edits of a load. Edits of one seed arrive at the same times, except for the factor
    of the rate.

    Args:
        load: the load to draw.
        times: seconds of a step, by side and degree.
        seed: seed of the draws.
        shared: part of each of `times` that does not depend on the step's rows.
    """
    arrivals, sizes = (np.random.default_rng(s) for s in np.random.SeedSequence(seed).spawn(2))
    sides = np.array(SIZES)
    gap, shape = 60.0 / load.per_minute, load.cv**-2
    gaps = (
        arrivals.exponential(gap, load.edits)
        if load.cv == 1.0
        else arrivals.gamma(shape, gap / shape, load.edits)
    )
    at = np.cumsum(gaps)
    drawn = sizes.choice(sides, load.edits, p=size_shares(load.mix))
    return [
        Ticket(
            f"{side}-{number}",
            load.steps,
            (side // 16) ** 2,
            (side // 16) ** 2,
            float(t),
            due=float(t) + load.scale * DUE[side],
            seconds=times[side],
            shared=shared,
        )
        for number, (t, side) in enumerate(zip(at, map(int, drawn), strict=True))
    ]


class FixedBySize(Fixed):
    """`Fixed` with a degree for each size of pictures.

    Args:
        devices: number of devices of the worker.
        degrees: degree of an edit, by side of the picture.
    """

    def __init__(self, devices: int, degrees: dict[str, int]) -> None:
        super().__init__(devices, devices)
        self._degrees = degrees

    def degree_of(self, ticket: Ticket) -> int:
        return self._degrees[ticket.request_id.split("-")[0]]


class LateLast(Fixed):
    """`Fixed` that lets other edits go first if an edit can no longer be in time."""

    def turn(self, work: Work, now: float) -> tuple[float, ...]:
        seconds = work.ticket.seconds[self.degree.bit_length() - 1]
        due_time = math.inf if work.ticket.due is None else work.ticket.due
        return (now + work.remaining * seconds > due_time, *super().turn(work, now))


@dataclass(slots=True)
class Outcome:
    """The result of a run."""

    ended: dict[str, float]
    """End of each edit's last step."""
    tickets: dict[str, Ticket]
    decisions: int = 0
    device_seconds: float = 0.0
    spans: list[tuple[str, float, int]] = field(default_factory=list)
    """Edit, seconds and number of devices of each run of steps."""

    def in_time(self, prefix: str = "") -> float:
        """Return the share of the edits that ended by their due times; `prefix` selects edits of
        one size.
        """
        among = [t for r, t in self.tickets.items() if r.startswith(prefix)]
        return sum(map(self.is_in_time, among)) / max(1, len(among))

    def is_in_time(self, ticket: Ticket) -> bool:
        return ticket.due is not None and self.ended[ticket.request_id] <= ticket.due + 1e-6

    def mean_degree(self, prefix: str) -> float:
        """Return the mean number of devices of running edits of one size."""
        among = [
            (seconds, degree) for name, seconds, degree in self.spans if name.startswith(prefix)
        ]
        return sum(s * k for s, k in among) / (sum(s for s, _ in among) or 1.0)


def simulate(
    policy: GangPolicy,
    tickets: Sequence[Ticket],
    devices: int,
    decision_seconds: float = 0.0,
    took: dict[str, tuple[float, ...]] | None = None,
) -> Outcome:
    """Run `policy` until no edit has steps left.

    Args:
        policy: a policy of the engine, or `Fixed`.
        tickets: the edits.
        devices: number of devices of the worker.
        took: actual seconds of steps, by id; None: the seconds of their tickets.
        decision_seconds: time for which a gang idles before each run, for the decision and its
            transfer.

    Raises:
        RuntimeError: the policy assigned devices twice, or did not start work while all devices
            were idle.
    """
    arrivals = deque(sorted(tickets, key=lambda t: t.arrival))
    works: dict[str, Work] = {}
    ends: list[tuple[float, int, str]] = []
    outcome = Outcome({}, {t.request_id: t for t in tickets})
    next_decision_s, number, used = math.inf, 0, 0
    while arrivals or works:
        now_s = min(
            arrivals[0].arrival if arrivals else math.inf,
            ends[0][0] if ends else next_decision_s,
            next_decision_s,
        )
        if now_s == math.inf:
            raise RuntimeError(f"{len(works)} edits are left lying")
        while arrivals and arrivals[0].arrival <= now_s:
            ticket = arrivals.popleft()
            works[ticket.request_id] = Work(ticket, ticket.steps, ticket.arrival)
        while ends and ends[0][0] <= now_s:
            at, _, name = heapq.heappop(ends)
            work = works[name]
            work.remaining -= work.running_steps
            work.until, work.running_steps, work.idle_since = None, 0, at
            used &= ~work.gang
            if not work.remaining:
                outcome.ended[name] = at
                del works[name]
        plan = policy.decide(now_s, list(works.values()))
        outcome.decisions += 1
        next_decision_s = plan.next_decision if plan.next_decision > now_s else math.inf
        for run in plan.runs:
            gang = sum(1 << d for d in run.devices)
            if gang & used or gang >> devices:
                raise RuntimeError(f"devices {run.devices} are not idle")
            used |= gang
            rows = [replace(t, seconds=took[t.request_id]) if took else t for t in run.rows]
            lasts = run.steps * seconds_together(rows, len(run.devices)) + decision_seconds
            outcome.device_seconds += lasts * len(run.devices)
            for ticket in run.rows:
                work = works[ticket.request_id]
                outcome.spans.append((ticket.request_id, lasts, len(run.devices)))
                work.gang, work.running_steps, work.until = gang, run.steps, now_s + lasts
                number += 1
                heapq.heappush(ends, (work.until, number, ticket.request_id))
    return outcome


def step_times(costs: GangCosts) -> dict[int, tuple[float, ...]]:
    """Return the seconds of dense edits' steps, by side."""
    return {side: costs.seconds(side) for side in SIZES}


def best_degrees(times: dict[int, tuple[float, ...]], steps: int) -> dict[str, int]:
    """Return for each resolution the smallest degree that meets its due time when the edit runs
    alone.
    """
    return {
        str(side): next((k for k, t in zip(DEGREES, ts, strict=True) if steps * t <= DUE[side]), 8)
        for side, ts in times.items()
    }
