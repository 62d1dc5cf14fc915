"""Judge whether a worker grows: compare its memory, files and threads late and early in a run."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from maskserve_benchmarks.soak.sampler import Sample

WARM_UP_SHARE = 0.2
"""Share of the run that counts as warm-up: pools grow to the largest need, kernels are chosen, the
cache fills."""
GROWTH = 0.02
SLACK_BYTES = 2 * 2**20
"""Growth that one process may have in any case. A heap is some blocks larger at its latest peak,
and the small processes hold less than 40 MiB. The sum over all processes has no such slack."""
MEMORY_NEEDS_S = 480.0
"""Seconds after the warm-up from which a growth of memory by 2 % is no longer chance. The compared
fifths must be long compared to variations of the mix of edits."""
COUNTS_SLACK = {"files": 0, "handles": 2, "threads": 4}
"""Allowed growth of each count. Pools of threads grow to the largest simultaneous demand, which may
come late. A leak at each edit, or in every hour, grows far beyond this."""
COUNTS_NEED_S = {"files": 10.0, "handles": 10.0, "threads": 100.0}
"""Seconds after the warm-up that a judgement of each count needs."""


@dataclass(frozen=True, slots=True)
class Bar:
    """A condition that must hold."""

    name: str
    ok: bool
    finding: str
    judged: bool = True
    """False: the run was too short to judge."""
    growth: float | None = None
    """If the bar is on growth: the share, or the number for counts."""

    def line(self) -> str:
        mark = ("ok" if self.ok else "MISSED") if self.judged else "not judged"
        return f"{mark:>10}  {self.name}: {self.finding}"


def steady(samples: Sequence[Sample]) -> list[Sample]:
    """Return the samples after the warm-up: after a fifth of the time, and after the cache has been
    full.
    """
    if not samples:
        return []
    end = WARM_UP_SHARE * samples[-1].time_s
    evicted = [s.time_s for s in samples if s.counters.get("cache_evictions_total.device", 0) > 0]
    if evicted:
        end = max(end, evicted[0])
    return [sample for sample in samples if sample.time_s > end]


def fifths(values: Sequence[float]) -> tuple[Sequence[float], Sequence[float]]:
    """Return the first fifth of a series and the last, each with at least one value."""
    size = max(1, len(values) // 5)
    return values[:size], values[-size:]


def growth(values: Sequence[float]) -> float:
    """Return the growth from the median of the first fifth to that of the last, as a share of the
    former.
    """
    first, last = (statistics.median(part) for part in fifths(values))
    return last / first - 1.0 if first else float(last > 0)


def rise(values: Sequence[float]) -> float:
    """Return the difference between the minimum of the last fifth and that of the first.

    This is for counts: handles and threads come and go with the clients, and a leak raises their
    minimum.
    """
    first, last = fifths(values)
    return min(last) - min(first)


def judge_growth(samples: Sequence[Sample]) -> list[Bar]:
    """Return bars over the samples of a constant load."""
    late = steady(samples)
    span = late[-1].time_s - late[0].time_s if late else 0.0
    bars = [_memory("memory", late, span, lambda s: s.memory)]
    names = sorted({name for sample in late for name in sample.processes})
    whole = [name for name in names if all(name in sample.processes for sample in late)]
    bars += [
        _memory(f"memory of {n}", late, span, _field_of(n, "memory"), SLACK_BYTES) for n in whole
    ]
    bars.append(_memory("shared memory", late, span, lambda s: s.shared_memory))
    bars.append(_count("files", "", late, span, lambda s: s.runtime_files))
    for field in ("handles", "threads"):
        bars += [_count(field, f" of {n}", late, span, _field_of(n, field)) for n in whole]
    return bars


def judge_rest(samples: Sequence[Sample], rest: Sample) -> list[Bar]:
    """Return bars over the worker at rest, after the end of the load.

    Args:
        samples: samples under load.
        rest: a sample taken some seconds after the load.
    """
    counts = {
        "running": rest.running,
        "waiting": rest.waiting,
        "in flight": rest.in_flight,
        "registered": rest.registered,
        "pinned": rest.pinned,
        "priming": rest.priming,
    }
    leftovers = {name: count for name, count in counts.items() if count}
    pids = {(name, p.pid) for s in (*samples, rest) for name, p in s.processes.items()}
    has_same_processes = rest.restarts == 0 and len(pids) == len({name for name, _ in pids})
    return [
        Bar("nothing left behind", not leftovers, str(leftovers or f"none of {', '.join(counts)}")),
        Bar(
            "no restart",
            has_same_processes,
            "one process each" if has_same_processes else f"{sorted(pids)}",
        ),
    ]


def judge_answers(visits: int, unexpected: int, served: float) -> list[Bar]:
    """Return bars over the visitors' answers."""
    finding = f"{unexpected} of {visits} visits had an answer that should not have been given"
    return [
        Bar("answers", unexpected == 0 and visits > 0, finding),
        Bar("edits", served > 0, f"{served:g} edits were finished"),
    ]


def _field_of(name: str, field: str) -> Callable[[Sample], float]:
    """Return a function that reads a field of one process."""
    return lambda sample: float(getattr(sample.processes[name], field))


def _memory(
    name: str,
    late: Sequence[Sample],
    span: float,
    value: Callable[[Sample], float],
    slack: float = 0.0,
) -> Bar:
    if span < MEMORY_NEEDS_S:
        finding = f"{span:.0f} s after the warm-up; {MEMORY_NEEDS_S:.0f} s are needed"
        growth_share = growth([value(s) for s in late]) if late else None
        return Bar(name, True, finding, judged=False, growth=growth_share)
    values = [value(sample) for sample in late]
    growth_share = growth(values)
    first, last = (statistics.median(part) / 2**20 for part in fifths(values))
    most = max(GROWTH, slack / 2**20 / first) if first else GROWTH
    finding = f"{first:.1f} to {last:.1f} MiB, {growth_share:+.2%} (at most {most:+.1%})"
    return Bar(name, growth_share <= most, finding, growth=growth_share)


def _count(
    field: str, suffix: str, late: Sequence[Sample], span: float, value: Callable[[Sample], float]
) -> Bar:
    name, needed, slack = field + suffix, COUNTS_NEED_S[field], COUNTS_SLACK[field]
    if span < needed:
        return Bar(name, True, f"{span:.0f} s after the warm-up; {needed:g} are needed", False)
    values = [value(sample) for sample in late]
    up = rise(values)
    first, last = (min(part) for part in fifths(values))
    finding = f"at least {first:g}, in the end {last:g} (at most {slack} more)"
    return Bar(name, up <= slack, finding, growth=up)
