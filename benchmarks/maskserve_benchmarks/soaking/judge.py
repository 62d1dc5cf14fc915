"""Judge whether a worker stayed as it was: what it holds late in a run against early in the run."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from maskserve_benchmarks.soaking.sampler import Sample

WARM_UP_SHARE = 0.2
"""Of the whole time: pools grow to the largest need, kernels are chosen, the cache fills."""
GROWTH = 0.02
SLACK_BYTES = 2 * 2**20
"""What one process may grow by in any case: a heap is some blocks larger at its latest peak, and
the small processes hold less than 40 MiB. All of them together have no such slack."""
MEMORY_NEEDS_S = 480.0
"""Seconds after the warm-up from which on a growth of memory by 2 % is no chance any more: the
fifths that are compared must be long against what the mix of edits does to it."""
COUNTS_SLACK = {"files": 0, "handles": 2, "threads": 4}
"""What may be more of it: pools of threads grow to the most that was ever asked at once, which may
come late; what is leaked at each edit or hour after hour goes far beyond."""
COUNTS_NEED_S = {"files": 10.0, "handles": 10.0, "threads": 100.0}
"""Seconds after the warm-up."""


@dataclass(frozen=True, slots=True)
class Bar:
    """Something that must hold."""

    name: str
    ok: bool
    says: str
    judged: bool = True
    """False: the run was too short to say."""
    growth: float | None = None
    """Where growth is what is judged: the share, or for what is counted the number."""

    def line(self) -> str:
        mark = ("ok" if self.ok else "MISSED") if self.judged else "not judged"
        return f"{mark:>10}  {self.name}: {self.says}"


def steady(samples: Sequence[Sample]) -> list[Sample]:
    """The samples after the warm-up: a fifth of the time, and until the cache has been full."""
    if not samples:
        return []
    end = WARM_UP_SHARE * samples[-1].time_s
    evicted = [s.time_s for s in samples if s.counters.get("cache_evictions_total.device", 0) > 0]
    if evicted:
        end = max(end, evicted[0])
    return [sample for sample in samples if sample.time_s > end]


def fifths(values: Sequence[float]) -> tuple[Sequence[float], Sequence[float]]:
    """The first fifth of a series and the last, of at least one value each."""
    size = max(1, len(values) // 5)
    return values[:size], values[-size:]


def growth(values: Sequence[float]) -> float:
    """From the median of the first fifth to that of the last, as a share of the former."""
    first, last = (statistics.median(part) for part in fifths(values))
    return last / first - 1.0 if first else float(last > 0)


def rise(values: Sequence[float]) -> float:
    """From the least of the first fifth to the least of the last.

    For things that are counted: handles and threads come and go with the clients, and what is
    never given back raises the least there is.
    """
    first, last = fifths(values)
    return min(last) - min(first)


def judge_growth(samples: Sequence[Sample]) -> list[Bar]:
    """Bars over the samples of a load that was the same all the time."""
    late = steady(samples)
    span = late[-1].time_s - late[0].time_s if late else 0.0
    bars = [_memory("memory", late, span, lambda s: s.memory)]
    names = sorted({name for sample in late for name in sample.processes})
    whole = [name for name in names if all(name in sample.processes for sample in late)]
    bars += [_memory(f"memory of {n}", late, span, _of(n, "memory"), SLACK_BYTES) for n in whole]
    bars.append(_memory("shared memory", late, span, lambda s: s.shared_memory))
    bars.append(_count("files", "", late, span, lambda s: s.runtime_files))
    for field in ("handles", "threads"):
        bars += [_count(field, f" of {n}", late, span, _of(n, field)) for n in whole]
    return bars


def judge_rest(samples: Sequence[Sample], rest: Sample) -> list[Bar]:
    """Bars over the worker at rest, when the load has ended.

    Args:
        samples: under load.
        rest: taken some seconds after.
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
    """Bars over what the visitors were told."""
    says = f"{unexpected} of {visits} visits had an answer that should not have been given"
    return [
        Bar("answers", unexpected == 0 and visits > 0, says),
        Bar("edits", served > 0, f"{served:g} edits were finished"),
    ]


def _of(name: str, field: str) -> Callable[[Sample], float]:
    """Reads a field of one process."""
    return lambda sample: float(getattr(sample.processes[name], field))


def _memory(
    name: str,
    late: Sequence[Sample],
    span: float,
    of: Callable[[Sample], float],
    slack: float = 0.0,
) -> Bar:
    if span < MEMORY_NEEDS_S:
        says = f"{span:.0f} s after the warm-up; {MEMORY_NEEDS_S:.0f} s are needed"
        grown = growth([of(s) for s in late]) if late else None
        return Bar(name, True, says, judged=False, growth=grown)
    values = [of(sample) for sample in late]
    grown = growth(values)
    first, last = (statistics.median(part) / 2**20 for part in fifths(values))
    most = max(GROWTH, slack / 2**20 / first) if first else GROWTH
    says = f"{first:.1f} to {last:.1f} MiB, {grown:+.2%} (at most {most:+.1%})"
    return Bar(name, grown <= most, says, growth=grown)


def _count(
    field: str, whose: str, late: Sequence[Sample], span: float, of: Callable[[Sample], float]
) -> Bar:
    name, needed, slack = field + whose, COUNTS_NEED_S[field], COUNTS_SLACK[field]
    if span < needed:
        return Bar(name, True, f"{span:.0f} s after the warm-up; {needed:g} are needed", False)
    values = [of(sample) for sample in late]
    up = rise(values)
    first, last = (min(part) for part in fifths(values))
    says = f"at least {first:g}, in the end {last:g} (at most {slack} more)"
    return Bar(name, up <= slack, says, growth=up)
