"""The study of due times on a real worker: what it makes of what it has measured."""

from __future__ import annotations

import math
from typing import Any

import pytest

from maskserve_studies.deadlines import gangs
from maskserve_studies.due_times.command import (
    CONFIGS,
    DUE,
    MASKED,
    Times,
    parse,
    policies,
    sides,
    simulate,
    summary,
    tetriserve,
)
from tests.support.draws import fresh_rng

TIMES = {side: Times((side / 1e3, side / 1.8e3), 0.02, 0.03, 0.01) for side in DUE}
"""Seconds."""


def test_edits_far_apart_are_in_time_where_they_can_be() -> None:
    arrivals = [(10.0 * number, side) for number, side in enumerate(sorted(DUE))]
    due_by_side = {side: 0.05 + 0.9 * MASKED.steps * t.step[0] for side, t in TIMES.items()}
    none = dict.fromkeys(map(str, sorted(DUE)), 0.0)
    for name, policy in policies().items():
        figures = simulate(policy, TIMES, MASKED.steps, arrivals, due_by_side, math.inf)
        assert figures["sar"] == (0.0 if name == "fixed1" else 1.0)
        assert name != "fixed1" or figures["by_side"] == none


def test_decoding_takes_cores_from_steps() -> None:
    """Four edits on two devices: on three cores the last two step beside the first's decoding, and
    all are decoded one by one until 1.6 + 4 x 1.5 s; on two cores later.
    """
    times = {side: Times((0.1, 0.1), 0.0, 1.5, 0.0) for side in DUE}
    arrivals, due_by_side = [(0.0, 64)] * 4, dict.fromkeys(DUE, 1.6 + 4 * 1.5 + 0.05)
    three, with_two = [
        simulate(policies()["fixed1"], times, MASKED.steps, arrivals, due_by_side, k)["sar"]
        for k in (3, 2)
    ]
    assert three == 1.0
    assert with_two < 1.0


def test_the_error_is_that_of_rounds_and_not_of_edits() -> None:
    def point(real: float, simulated: float) -> dict[str, Any]:
        names = {"deadline": {"sar": real}, "fixed1": {"sar": 0.5}}
        return {"real": names, "simulated": {**names, "deadline": {"sar": simulated}}}

    rounds = [
        {"load": 0.5, "scale": scale, **point(real, 0.8)}
        for scale in (1.0, 1.5)
        for real in (0.7, 0.8, 0.9, 0.8)
    ]
    by_point = summary(rounds)
    assert list(by_point) == ["0.5", "0.5, due times x 1.5"]
    for figures in by_point.values():
        assert figures["apart deadline"] == 0.0
        assert figures["error deadline"] == pytest.approx(100 * 0.0816 / 2, abs=0.1)
        assert figures["error fixed1"] == 0.0


def test_all_sizes_come_equally_often() -> None:
    drawn = sides(4 * len(DUE), MASKED.shares, fresh_rng())
    assert [drawn.count(side) for side in DUE] == [4] * len(DUE)


@pytest.mark.parametrize("mix", gangs.MIXES)
def test_tetriserves_pictures_at_small_scale(mix: str) -> None:
    """Due times in its proportions; the largest picture needs both devices, at scale 1.5 one."""
    problem = tetriserve(mix, (1.0, 1.5))
    times = {side: Times((side**2 / 1e5, side**2 / 1.8e5), 0.02, 0.03) for side in problem.shares}
    patience, largest = problem.patience(times), max(times)
    single_s, pair_s = times[largest].step
    assert pair_s < patience[largest] < single_s < 1.5 * patience[largest]
    assert patience[32] / patience[largest] == pytest.approx(1.5 / 5.0)
    drawn = sides(400, problem.shares, fresh_rng())
    shares = [drawn.count(side) / 400 for side in sorted(times)]
    expected = {"uniform": [0.25] * 4, "skewed": [0.167, 0.175, 0.211, 0.447]}[mix]
    assert shares == pytest.approx(expected, abs=0.01)
    assert set(problem.servers) == set(CONFIGS)


def test_too_few_edits_are_refused_in_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["--edits", "1"])
    assert "--edits: accepted: 3 or more" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        parse(["--edits", "3", "--mix", "skewed"])
    assert "--edits: accepted: 4 or more" in capsys.readouterr().err
