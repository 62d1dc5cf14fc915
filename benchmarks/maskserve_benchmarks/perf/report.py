"""The table of runs for a person."""

from __future__ import annotations

from maskserve_benchmarks.perf.run import Outcome

HEADER = (
    f"{'front':<25} {'load':<14} {'sent/s':>7} {'done/s':>7} {'mean':>8} {'p50':>8} {'p90':>8} "
    f"{'p95':>8} {'p99':>8}  ms to the answer"
)


def line(outcome: Outcome) -> str:
    """Return one line of the table for a run."""
    target, load = outcome.measurement.target, outcome.measurement.load
    begin = f"{target!s:<25} {load!s:<14}"
    if outcome.stamps is None:
        return f"{begin} failed: {outcome.errors[0]}"
    stamps, times = outcome.stamps, outcome.stamps.latencies()
    points = (times.mean, times.p50, times.p90, times.p95, times.p99)
    rates = f"{stamps.sent_per_s:>7.2f} {stamps.answered_per_s:>7.2f}"
    text = " ".join([begin, rates, *(f"{point:>8.1f}" for point in points)])
    if stamps.responses_per_request > 1:
        text += f"  (first response: p50 {stamps.latencies(0).p50:.1f})"
    return text
