"""The judgement of a soak, on made-up series."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from maskserve_benchmarks.soak.judge import Bar, judge_answers, judge_growth, judge_rest, steady
from maskserve_benchmarks.soak.ledger import Window
from maskserve_benchmarks.soak.sampler import ProcessSample, Sample, drifts, rollup

HOUR_S = 3600.0
EVERY_S = 5.0
MIB = 2**20
Series = Callable[[float], float]
"""A value by seconds."""


def flat(seconds: float) -> float:
    return 500.0


def sample(time_s: float, memory: float = 500.0, handles: float = 40, threads: float = 9) -> Sample:
    """A worker with one process; `memory` in MiB."""
    process = ProcessSample(
        pid=7,
        memory=round(memory * MIB),
        rss=0,
        pss=0,
        handles=round(handles),
        threads=round(threads),
    )
    return Sample(
        time_s=time_s,
        processes={"denoiser": process},
        shared_memory=32 * MIB,
        shared_memory_size=32 * MIB,
        runtime_files=14,
        runtime_bytes=0,
        log_bytes=0,
        running=8,
        waiting=2,
        in_flight=12,
        cached=24,
        cache_bytes=0,
        registered=2,
        pinned=1,
        priming=1,
        in_use=3,
        drift_mean=None,
        drift_max=None,
        counters={"cache_evictions_total.device": float(time_s > 60)},
        restarts=0,
        window=Window(50, 10.0, 800.0, 0),
    )


def load(memory: Series = flat, seconds: float = HOUR_S, **counts: Series) -> list[Sample]:
    times = np.arange(EVERY_S, seconds, EVERY_S)
    return [sample(t, memory(t), **{name: of(t) for name, of in counts.items()}) for t in times]


def missed(bars: list[Bar]) -> list[str]:
    return [bar.name for bar in bars if not bar.ok]


def noisy(series: Series, share: float = 0.03) -> Series:
    rng = np.random.default_rng(0)
    return lambda t: series(t) * (1 + share * rng.standard_normal())


@pytest.mark.parametrize(
    "memory",
    [
        flat,
        noisy(flat),
        lambda t: 500.0 if t > 700 else 300.0,  # a step in the warm-up
        noisy(lambda t: 500 - 0.01 * t),  # what shrinks is no leak
        lambda t: 900.0 if 2000 < t < 2100 else 500.0,  # a peak that is given back
    ],
    ids=["flat", "noisy", "a step in the warm-up", "shrinking", "a peak"],
)
def test_what_stays_as_it_was_passes(memory: Series) -> None:
    bars = judge_growth(load(memory))
    assert missed(bars) == []
    assert all(bar.judged for bar in bars)


@pytest.mark.parametrize(
    "memory",
    [
        lambda t: 500 + 25 * t / HOUR_S,
        noisy(lambda t: 500 + 25 * t / HOUR_S),
        lambda t: 500.0 if t < 2500 else 520.0,
    ],
    ids=["slow leak", "noisy slow leak", "a step after the warm-up"],
)
def test_memory_that_grows_by_more_than_two_percent_is_a_leak(memory: Series) -> None:
    assert missed(judge_growth(load(memory))) == ["memory", "memory of denoiser"]


def test_a_small_process_has_some_slack_and_all_together_have_none() -> None:
    bars = judge_growth(load(lambda t: 30 + 1.5 * t / HOUR_S))
    assert missed(bars) == ["memory"]


def test_a_short_run_says_nothing_of_memory_but_of_counts() -> None:
    samples = load(lambda t: 500 + t, seconds=180, threads=lambda t: 9 + t / 20)
    bars = judge_growth(samples)
    assert missed(bars) == ["threads of denoiser"]
    assert {bar.name for bar in bars if not bar.judged} == {
        "memory",
        "memory of denoiser",
        "shared memory",
    }


def test_handles_that_come_and_go_are_no_leak() -> None:
    def busy(seconds: float) -> float:
        return 40 + 20 * (seconds // EVERY_S % 3)

    assert missed(judge_growth(load(handles=busy))) == []
    leaking = load(handles=lambda t: busy(t) + t / 300)
    assert missed(judge_growth(leaking)) == ["handles of denoiser"]


def test_the_warm_up_lasts_until_the_cache_was_full() -> None:
    late = [
        replace(s, counters={"cache_evictions_total.device": float(s.time_s > 2000)})
        for s in load()
    ]
    assert steady(late)[0].time_s > 2000
    assert steady(load())[0].time_s == pytest.approx(0.2 * HOUR_S, abs=2 * EVERY_S)
    assert not any(bar.judged for bar in judge_growth([]))


def test_at_rest_nothing_may_be_left() -> None:
    idle = replace(
        sample(HOUR_S), running=0, waiting=0, in_flight=0, registered=0, pinned=0, priming=0
    )
    assert missed(judge_rest(load(), idle)) == []
    assert missed(judge_rest(load(), replace(idle, registered=1))) == ["nothing left behind"]
    assert missed(judge_rest(load(), replace(idle, pinned=1))) == ["nothing left behind"]
    assert missed(judge_rest(load(), replace(idle, restarts=1))) == ["no restart"]
    restarted = replace(idle, processes={"denoiser": replace(idle.processes["denoiser"], pid=8)})
    assert missed(judge_rest(load(), restarted)) == ["no restart"]


def test_one_wrong_answer_is_one_too_many() -> None:
    assert missed(judge_answers(1000, 0, 900)) == []
    assert missed(judge_answers(1000, 1, 900)) == ["answers"]
    assert missed(judge_answers(0, 0, 0)) == ["answers", "edits"]


def test_sizes_of_a_process_are_read_in_bytes() -> None:
    text = "5500-7ffe ---p 0 00:00 0  [rollup]\nRss:      1760 kB\nPss_Anon:   116 kB\n"
    assert rollup(text) == {"Rss": 1760 * 1024, "Pss_Anon": 116 * 1024}


def test_drift_is_that_of_all_audited_edits() -> None:
    cached_drift = {"audits": 3, "drift_mean": 0.1, "drift_max": 0.2, "runs_dense": False}
    dense_drift = {"audits": 1, "drift_mean": 0.5, "drift_max": 0.5, "runs_dense": True}
    assert drifts([{}, cached_drift, dense_drift]) == (pytest.approx(0.2), 0.5)
    assert drifts([{}]) == (None, None)
