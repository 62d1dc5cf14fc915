"""Costs by degree: the fit, and a worker that starts with what was found."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from maskserve_benchmarks.published_models import FLUX_DEV
from maskserve_benchmarks.steps.profile_costs import Point, fit_costs, main, parse
from maskserve_common.line_fit import Line
from maskserve_engine.families.flux.spec import flux_work
from maskserve_engine.planning.cost_profile import read_profile
from maskserve_engine.planning.degree_costs import (
    DEGREES,
    ExchangeCosts,
    busiest,
    calls,
    seconds_by_degree,
    sent_bytes,
    uneven_flops,
)
from maskserve_engine.start.assembly import load_engine
from tests.fakes.jobs import config_of
from tests.support.draws import fresh_rng


def test_the_fit_finds_the_law_and_one_without_exchanges_does_not() -> None:
    line, exchange = Line(0.004, 2e-15), ExchangeCosts(3e11, 4e-5)
    work, rng, points = flux_work(FLUX_DEV, 64, 64), fresh_rng(), []
    for ratio in (0.1, 0.3, 1.0):
        kind, row = ("dense" if ratio == 1.0 else "kv"), work.row_at(ratio, 512.0)
        times = seconds_by_degree(work, row, kind, line, exchange)
        for degree, seconds in zip(DEGREES, times, strict=True):
            flops = work.step_flops([row], kind) / degree + uneven_flops(work, row, kind, degree)
            nbytes = sent_bytes(work, row, degree) * busiest(work.heads, degree)
            noisy = seconds * (1.0 + 0.005 * rng.standard_normal())
            counted = flops, nbytes, calls(work, degree)
            points.append(Point(512, ratio < 1, degree, *counted, noisy, noisy, seconds))
    compute, fitted_exchange = fit_costs(points)
    assert compute.per_unit == pytest.approx(line.per_unit, rel=0.05)
    assert fitted_exchange.call_seconds == pytest.approx(exchange.call_seconds, rel=0.2)
    row = work.row_at(0.2, 512.0)
    truth = seconds_by_degree(work, row, "kv", line, exchange)
    assert seconds_by_degree(work, row, "kv", compute, fitted_exchange) == pytest.approx(
        truth, rel=0.05
    )
    none = ExchangeCosts(1e30, 0.0)
    free = seconds_by_degree(work, row, "kv", compute, none)
    assert free[-1] < 0.7 * truth[-1]


def test_a_profile_by_processor_time_is_not_for_workers(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        parse(["--clock", "cpu", "--out", "costs.json"])
    assert "--out: a worker's profile is by the wall clock" in capsys.readouterr().err


@pytest.mark.slow
def test_a_worker_prices_by_its_profile_from_its_first_step(
    tiny_fill: Path, tmp_path: Path
) -> None:
    """Two processes are profiled, two more predict edits of another size by it."""
    out, report = tmp_path / "costs.json", tmp_path / "report.json"
    arguments = ["--model", str(tiny_fill), "--sides", "32", "64", "--fresh", "48", "--rounds", "1"]
    assert main([*arguments, "--out", str(out), "--json", str(report)]) == 0
    profile, report_data = read_profile(str(out)), json.loads(report.read_text())
    assert {(p["side"], p["cached"], p["degree"]) for p in report_data["fresh"]} == {
        (48, cached, degree) for cached in (False, True) for degree in (1, 2)
    }
    line, exchange = profile.costs.compute, profile.exchange
    for measurement in report_data["fresh"]:
        law = line.seconds(measurement["flops"]) + measurement["sent"] / exchange.bytes_per_second
        assert measurement["predicted"] == pytest.approx(
            law + measurement["calls"] * exchange.call_seconds
        )
    engine = {"devices": 2, "policy": "deadline", "warm_up": False, "costs": str(out)}
    worker = load_engine(config_of(tiny_fill, engine=engine))
    try:
        pricing = worker.publisher._prices.pricing
        assert worker.counters["steps_total"] == 0
        assert pricing.step == line.fixed
        assert len(pricing.degrees) == 1
        assert worker.publisher._prices.measured() is not None
    finally:
        worker.close(5.0)
