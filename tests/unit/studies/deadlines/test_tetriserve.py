"""TetriServe's problem: prices that others published, what is counted of a run, the figures."""

from __future__ import annotations

import json

import numpy as np
import pytest

from maskserve_benchmarks.checkout import CHECKOUT
from maskserve_engine.scheduling.gangs.fixed import Fixed
from maskserve_studies.deadlines.gangs import (
    SIZES,
    GangCosts,
    Load,
    draw,
    simulate,
    step_times,
)
from maskserve_studies.deadlines.prices import (
    A40_SHARES,
    AROUND,
    PRICES,
    XDIT,
    XDIT_STEPS,
    law_error,
    sd3_times,
    steps_at_peak,
)
from maskserve_studies.deadlines.simulation import point
from maskserve_studies.deadlines.tetriserve import WINDOW, over_time, statements
from tests.support.draws import fresh_rng

TIMES = step_times(GangCosts())


@pytest.mark.parametrize("name", XDIT)
def test_fitted_prices_give_the_published_seconds(name: str) -> None:
    law = PRICES[name].seconds(1024)
    pictures = [XDIT_STEPS * step + AROUND for step in law]
    assert pictures[0] == pytest.approx(XDIT[name][0])
    assert pictures[:3] == pytest.approx(XDIT[name], rel=law_error(name) + 1e-9)
    assert law_error("compiled") < 0.01 < law_error("eager")


def test_more_devices_do_as_many_times_the_steps_at_their_peak() -> None:
    assert steps_at_peak(8) == pytest.approx(2 * steps_at_peak(4))


def test_a_faster_card_takes_less_of_each_step() -> None:
    slow, fast = map(sd3_times, A40_SHARES)
    for side in SIZES:
        assert len(slow[side]) == 3
        assert all(f < s for f, s in zip(fast[side], slow[side], strict=True))


def test_windows_hold_each_edit_once() -> None:
    seed = int(fresh_rng().integers(2**31))
    run = simulate(Fixed(8, 8), draw(Load(edits=80, cv=3.0), TIMES, seed), 8)
    counts = np.unique([int(t.arrival / WINDOW) for t in run.tickets.values()], return_counts=True)[
        1
    ]
    assert np.dot(over_time(run), counts) / 80 == pytest.approx(run.in_time())


def test_a_fixed_degree_is_the_mean_degree_of_each_size() -> None:
    run = simulate(Fixed(8, 4), draw(Load(edits=40, steps=6), TIMES, 1), 8)
    assert [run.mean_degree(f"{side}-") for side in SIZES] == [4.0] * len(SIZES)


def test_loads_of_one_size_and_bursts_keep_the_rate() -> None:
    tickets = draw(Load("512", edits=4000, cv=2.0), TIMES, int(fresh_rng().integers(2**31)))
    assert {t.request_id.split("-")[0] for t in tickets} == {"512"}
    gaps = np.diff([0.0, *(t.arrival for t in tickets)])
    assert np.mean(gaps) == pytest.approx(5.0, rel=0.2)
    assert np.std(gaps) / np.mean(gaps) == pytest.approx(2.0, rel=0.2)


def test_statements_of_the_paper_are_judged_one_by_one() -> None:
    names = ("sp1", "sp2", "sp4", "sp8")
    low = {name: {"256": 0.5, "2048": 0.0} for name in names}
    assert statements(dict.fromkeys(names, 0.6), low) == ["A"]
    small = {"256": 0.9, "2048": 0.0}
    large = {"256": 0.1, "2048": 0.5}
    by_size = {"sp1": small, "sp2": small, "sp4": large, "sp8": large}
    assert statements(dict.fromkeys(names, 0.61), by_size) == ["B", "C"]


def test_a_committed_point_comes_out_anew() -> None:
    """A part of `simulate_cluster --tetriserve`."""
    report = json.loads((CHECKOUT / "docs" / "benchmarks" / "tetriserve.json").read_text())
    committed = next(
        at for at in report["problem"] if (at["prices"], at["steps"]) == ("compiled", 50)
    )
    names = ("sp4", "sp8", "rounds5", "deadline")
    at = point(Load(steps=50), step_times(PRICES["compiled"]), names, report["seeds"])
    assert at["sar"] == pytest.approx({n: committed["sar"][n] for n in names}, abs=1e-4)
