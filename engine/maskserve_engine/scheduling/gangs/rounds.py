"""TetriServe's policy (Algorithm 1): fixed rounds, each with the most edits that survive."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from maskserve_engine.scheduling.gangs.work import (
    Aging,
    GangPlan,
    Share,
    Work,
    allocate,
    choose_block,
    devices_of,
    frontier,
    largest_gang,
)
from maskserve_engine.scheduling.step_scheduler import Run


@dataclass(frozen=True, slots=True)
class Option:
    """One way to spend a round on an edit."""

    degree: int
    """Number of devices; 0: it waits."""
    steps: int
    survives: bool
    """Whether it could still be in time if it had its fastest degree from the next round on."""


WAIT = 0
"""Index of the option of waiting, the first of each edit's."""
_IMPOSSIBLE = -1


def knapsack(groups: Sequence[Sequence[Option]], devices: int) -> list[int]:
    """Return the option of each edit with which most survive on `devices`, with the fewest devices
    (Algorithm 1, lines 13 to 22).
    """
    # survivors[used]: most edits so far that survive if exactly `used` devices are used.
    survivors = [0] + [_IMPOSSIBLE] * devices
    picks_by_edit: list[list[int]] = []
    for options in groups:
        following, picks = [_IMPOSSIBLE] * (devices + 1), [WAIT] * (devices + 1)
        for used in range(devices + 1):
            for index, option in enumerate(options):
                before = survivors[used - option.degree] if option.degree <= used else _IMPOSSIBLE
                if before > _IMPOSSIBLE and before + option.survives > following[used]:
                    following[used], picks[used] = before + option.survives, index
        survivors = following
        picks_by_edit.append(picks)
    used = max(range(devices + 1), key=lambda used: (survivors[used], -used))
    plan = []
    for options, picks in zip(reversed(groups), reversed(picks_by_edit), strict=True):
        plan.append(picks[used])
        used -= options[picks[used]].degree
    return plan[::-1]


class Rounds:
    """At each round's start it takes the cheapest degrees per edit, and a knapsack over the edits
    that must run now. Idle devices then go to waiting edits, then to those that gain most by more
    (§4.2.3).

    A round that starts without edits ends when one arrives. Edits without due time, and late ones,
    run on the remaining devices in order of arrival. An edit whose key has its turn, or that has
    waited too long, has a part of the round before all others (`Aging`).

    Args:
        devices: number of the worker's devices: 1, 2, 4 or 8.
        round_seconds: seconds of each round; None: as long as `round_steps` steps of the slowest
            edit at its start, each on the number of devices that makes it fastest (§4.2.2).
        round_steps: see `round_seconds`.
        patience: seconds without a step after which an edit is helped.

    Raises:
        ValueError: no such round.
    """

    def __init__(
        self,
        devices: int,
        round_seconds: float | None = None,
        round_steps: int = 5,
        patience: float = 10.0,
    ) -> None:
        if round_seconds is not None and not round_seconds > 0.0:
            raise ValueError(f"no such round: {round_seconds} s")
        if round_steps < 1:
            raise ValueError(f"no such round: {round_steps} steps")
        self.devices = devices
        self.round_seconds, self.round_steps = round_seconds, round_steps
        self._ends = -math.inf
        self._aging = Aging(devices, patience)

    def decide(self, now: float, works: Sequence[Work]) -> GangPlan:
        """Decide as `GangPolicy.decide` does; nothing starts between two rounds."""
        if now < self._ends - 1e-9:
            return GangPlan(next_decision=self._ends)
        idle = [work for work in works if work.until is None]
        if not idle or any(work.until not in (None, math.inf) for work in works):
            # A step longer than a round is on its way: the round starts at its end.
            return GangPlan()
        lost = sum({work.gang for work in works if work.until == math.inf})
        most = largest_gang(self.devices, lost)
        if not most:
            return GangPlan()
        seconds = self.round_seconds
        if seconds is None:
            slowest = max(min(w.ticket.seconds[: most.bit_length()]) for w in idle)
            seconds = self.round_steps * slowest * (1 + 1e-9)
        self._ends = now + seconds
        first = self._aging.choose(now, idle)
        runs = _Round(now, seconds, self.devices, lost, most, first).plan(idle)
        for run in runs:
            if first is not None and run.rows == (first.ticket,):
                self._aging.begun(now, first, len(run.devices))
        return GangPlan(tuple(runs), self._ends)


@dataclass(frozen=True, slots=True)
class _Round:
    """A round, as it starts."""

    now: float
    length_s: float
    devices: int
    lost: int
    """Devices, as a bit mask."""
    most: int
    """The largest gang without a lost device."""
    first: Work | None = None
    """Work that does not wait."""

    @property
    def living(self) -> int:
        return self.devices - self.lost.bit_count()

    def plan(self, works: Sequence[Work]) -> list[Run]:
        ordered = sorted(works, key=lambda w: (_due(w), w.ticket.arrival, w.ticket.request_id))
        groups = [self._options(work) for work in ordered]
        picked = knapsack(groups, self.living)
        degrees = [options[pick].degree for options, pick in zip(groups, picked, strict=True)]
        self._fill(ordered, groups, degrees)
        self._scale_up(ordered, degrees)
        return self._place(ordered, degrees)

    def _seconds(self, work: Work) -> tuple[float, ...]:
        """Return a step's seconds by the degrees that are possible."""
        return work.ticket.seconds[: self.most.bit_length()]

    def _options(self, work: Work) -> list[Option]:
        seconds = self._seconds(work)
        slack = _due(work) - self.now
        shares = (
            (Share(frontier(seconds)[0][0], work.remaining),)
            if slack == math.inf
            else allocate(seconds, work.remaining, slack)
        )
        # It cannot be in time: it may have its fastest degree, and does not count as a survivor.
        shares = shares or (Share(frontier(seconds)[-1][0], work.remaining),)
        slack_after, fastest = slack - self.length_s, min(seconds)
        options = [Option(0, 0, work.remaining * fastest <= slack_after)]
        for share in shares:
            steps = min(share.steps, self._steps(work, share.degree))
            if steps > 0:
                options.append(
                    Option(share.degree, steps, (work.remaining - steps) * fastest <= slack_after)
                )
        if len(options) == 1:  # no step fits into a round: the next one starts when it has ended
            degree = frontier(seconds)[-1][0]
            options.append(Option(degree, 1, (work.remaining - 1) * fastest <= slack_after))
        if work is self.first:
            least = min(options[1:], key=lambda option: option.degree)
            return [replace(least, degree=min(least.degree, self.most))]
        return options

    def _steps(self, work: Work, degree: int) -> int:
        return int(self.length_s / work.ticket.seconds[degree.bit_length() - 1] + 1e-9)

    def _fill(self, works: Sequence[Work], groups: list[list[Option]], degrees: list[int]) -> None:
        """Give remaining devices to works that need not run now, to late ones last."""
        free_devices = self.living - sum(degrees)
        late = [not any(option.survives for option in options) for options in groups]
        for index in sorted(range(len(works)), key=late.__getitem__):
            options = groups[index]
            if not degrees[index]:
                fitting = [o.degree for o in options[1:] if o.degree <= free_devices]
                if fitting:
                    degrees[index] = fitting[0]
                elif free_devices and len(options) > 1:
                    degrees[index] = min(self.most, 1 << free_devices.bit_length() - 1)
                    if not self._steps(works[index], degrees[index]):
                        degrees[index] = 0  # it would outlast the round
                free_devices -= degrees[index]

    def _scale_up(self, works: Sequence[Work], degrees: list[int]) -> None:
        """Double the devices of the edit that saves most time, while there are some."""
        free_devices = self.living - sum(degrees)
        while free_devices:
            gains = []
            for index, (work, degree) in enumerate(zip(works, degrees, strict=True)):
                if 0 < degree <= free_devices and 2 * degree <= self.most:
                    seconds = work.ticket.seconds
                    current_s, more = (
                        seconds[degree.bit_length() - 1],
                        seconds[degree.bit_length()],
                    )
                    if more < current_s:
                        gains.append((work.remaining * (current_s - more), -index))
            if not gains:
                return
            index = -max(gains)[1]
            free_devices -= degrees[index]
            degrees[index] *= 2

    def _place(self, works: Sequence[Work], degrees: list[int]) -> list[Run]:
        """Place the largest gangs first, so that aligned blocks fit; if lost devices leave none of
        a size, the edit has half as many.
        """
        occupied, runs = self.lost, []
        for index in sorted(range(len(works)), key=lambda i: (-degrees[i], i)):
            # Devices that a smaller gang leaves go to edits that would wait.
            work, degree = works[index], degrees[index] or int(bool(self.lost))
            block = 0
            while degree and not block:
                block = choose_block(degree, self.devices, occupied, work.gang)
                degree //= 2
            if block:
                occupied |= block
                steps = min(work.remaining, self._steps(work, block.bit_count()))
                runs.append(Run((work.ticket,), devices_of(block), max(1, steps)))
        return runs


def _due(work: Work) -> float:
    return math.inf if work.ticket.due is None else work.ticket.due
