"""A short soak: every kind of visit at once, every answer right, and nothing left behind."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest

from maskserve_benchmarks.checkout import CHECKOUT
from maskserve_benchmarks.soak.run import MIX, Report, SoakOptions, soak, summary


def run(model: Path, out: Path, minutes: float, sample_s: float) -> Report:
    options = SoakOptions(
        model=model, minutes=minutes, out=out, sample_s=sample_s, say=lambda line: None
    )
    report = soak(options, threading.Event())
    assert report.problems == ()
    assert [bar.line() for bar in report.bars if not bar.ok] == []
    assert report.rest is not None
    assert summary(options, report)["passed"]
    return report


# Each visit has tests of its own in this folder, and test_serve.py sees that nothing is left.
@pytest.mark.slow
def test_mixed_visits_are_answered_right_and_leave_nothing(model: Path, tmp_path: Path) -> None:
    report = run(model, tmp_path, minutes=0.25, sample_s=0.5)
    assert len(report.ends) > len(MIX) / 2
    samples = report.samples
    assert {"server", "denoiser", "edit", "edit_stream"} <= samples[-1].processes.keys()
    assert all(p.memory > 0 and p.handles > 0 for p in samples[-1].processes.values())
    assert samples[-1].shared_memory > 0
    assert max(sample.running for sample in samples) > 1
    assert samples[-1].counters["edits_total"] > 0
    assert (tmp_path / "soak.png").stat().st_size > 0
    lines = (tmp_path / "samples.jsonl").read_text(encoding="utf-8").splitlines()
    assert len(lines) == len(samples)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_three_minutes_at_capacity(model: Path, tmp_path: Path) -> None:
    report = run(model, tmp_path, minutes=3, sample_s=2.0)
    assert report.ends.keys() == {visit.__name__ for visit in MIX}
    assert report.samples[-1].counters["cache_evictions_total.device"] > 0
    assert all(bar.judged for bar in report.bars if bar.name.startswith(("handles", "threads")))


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_hostile_soak_that_is_ended_leaves_nothing_running(
    model: Path, tmp_path: Path, number: signal.Signals
) -> None:
    """As a shell starts it in the background, so that all its children would ignore SIGINT."""
    command = [sys.executable, str(CHECKOUT / "scripts" / "bench"), "soak", "--hostile"]
    command += ["--minutes", "10", "--model", str(model), "--out", str(tmp_path)]
    command += ["--attacks", "a_withdrawn_key"]
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        soak = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    finally:
        signal.signal(signal.SIGINT, previous)
    assert soak.stdout is not None
    with soak:
        assert "honest clients alone\n" in iter(soak.stdout.readline, "")
        started = psutil.Process(soak.pid).children(recursive=True)
        assert any("web" in process.cmdline() for process in started)
        soak.send_signal(number)
        assert soak.wait(60) == (2 if number == signal.SIGTERM else -number)
    assert psutil.wait_procs(started, timeout=30)[1] == []
