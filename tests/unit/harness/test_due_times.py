"""The study of due times on a real worker: what it makes of what it has measured."""

from __future__ import annotations

import numpy as np
import pytest

from maskserve_core.worker.gangs.deadline import Deadline
from maskserve_harness.benchmarks.due_times import (
    DEVICES,
    DUE,
    STEPS,
    Times,
    parse,
    sides,
    simulated,
)
from maskserve_harness.simulator.gangs import Fixed

TIMES = {side: Times((side / 1e3, side / 1.8e3), 0.05) for side in DUE}
"""Seconds."""


def test_edits_far_apart_are_in_time_where_they_can_be() -> None:
    arrivals = [(10.0 * number, side) for number, side in enumerate(sorted(DUE))]
    due = {side: 0.05 + 0.9 * STEPS * t.step[0] for side, t in TIMES.items()}
    assert simulated(Deadline(DEVICES), TIMES, arrivals, due)["sar"] == 1.0
    assert simulated(Fixed(DEVICES, 2), TIMES, arrivals, due)["sar"] == 1.0
    alone = simulated(Fixed(DEVICES, 1), TIMES, arrivals, due)
    assert alone == {"sar": 0.0, "by_side": dict.fromkeys(map(str, sorted(DUE)), 0.0)}


def test_all_sizes_come_equally_often() -> None:
    drawn = sides(4 * len(DUE), np.random.default_rng())
    assert [drawn.count(side) for side in DUE] == [4] * len(DUE)


def test_too_few_edits_are_refused_in_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["--edits", "1"])
    assert "--edits: accepted: 3 or more" in capsys.readouterr().err
