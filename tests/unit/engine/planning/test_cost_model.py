"""Cost model: fits, predictions, JSON and estimates."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from maskserve_common.line_fit import Line, fit
from maskserve_engine.planning.cost_model import (
    H100,
    CostModel,
    GpuProperties,
    Rates,
    cpu_rates,
    estimate,
    from_json,
    gpu_rates,
)
from tests.support.examples import examples

finite = st.just(0.0) | st.floats(1e-9, 1e3)  # seconds: less cannot be told from nothing


def test_fit_recovers_a_line() -> None:
    x = [1e12, 2e12, 5e12, 9e12]
    line = fit(x, [0.004 + 2e-15 * v for v in x])
    assert line.fixed == pytest.approx(0.004)
    assert line.per_unit == pytest.approx(2e-15)
    assert line.r2 == pytest.approx(1.0)
    assert line.samples == 4
    assert line.seconds(4e12) == pytest.approx(0.012)


def test_an_unconstrained_line_is_numpys_weighted_one_and_r2_is_of_plain_errors() -> None:
    x = np.array([1.0, 2.0, 3.0, 40.0])
    y = np.array([2.0, 2.9, 4.2, 48.0])
    line = fit(list(x), list(y))
    slope, fixed = np.polyfit(x, y, 1, w=1 / y)
    assert (line.fixed, line.per_unit) == (pytest.approx(fixed), pytest.approx(slope))
    errors = y - fixed - slope * x
    assert line.r2 == pytest.approx(1 - (errors**2).sum() / ((y - y.mean()) ** 2).sum())
    # The naive rival, plain least squares, misses the shortest sample by more.
    plain = np.polyval(np.polyfit(x, y, 1), x[0])
    assert abs(line.seconds(x[0]) - y[0]) < 0.7 * abs(plain - y[0])


def test_a_negative_intercept_is_refused_by_the_fit() -> None:
    line = fit([1.0, 2.0, 3.0], [0.5, 1.5, 3.0])
    assert line.fixed == 0.0
    shares = np.array([1 / 0.5, 2 / 1.5, 3 / 3.0])
    assert line.per_unit == pytest.approx(shares.sum() / (shares**2).sum())


def test_a_falling_line_becomes_flat() -> None:
    line = fit([1.0, 2.0, 3.0], [3.0, 2.0, 1.0])
    assert line.per_unit == 0.0
    assert line.fixed == pytest.approx((1 / 3 + 1 / 2 + 1) / (1 / 9 + 1 / 4 + 1))
    assert line.r2 is not None
    assert line.r2 < 0.0  # the plain mean is nearer in plain errors


def test_one_point_measured_often_has_no_r2() -> None:
    assert fit([2.0, 2.0], [3.0, 3.0]).r2 is None


@examples(60)
@given(st.lists(st.tuples(finite, finite), min_size=2, max_size=8), finite, finite)
def test_no_line_without_negative_coefficients_fits_better(
    points: list[tuple[float, float]], a: float, b: float
) -> None:
    x, y = (np.array(v) for v in zip(*points, strict=True))
    line = fit(list(x), list(y))

    longest = y.max() or 1.0
    scale = longest * np.maximum(y / longest, 1e-3)

    def error(fixed: float, slope: float) -> float:
        return float((((y - fixed - slope * x) / scale) ** 2).sum())

    best = error(line.fixed, line.per_unit)
    nearby = [(line.fixed * 1.01, line.per_unit), (line.fixed, line.per_unit * 0.99)]
    for other in [(a, b), (a, 0.0), (0.0, b), *nearby]:
        assert best <= error(*other) * (1 + 1e-9) + 1e-9


@pytest.mark.parametrize(
    ("x", "y"),
    [([1.0], [1.0]), ([1.0, 2.0], [1.0]), ([1.0, float("nan")], [1.0, 1.0]), ([1, -2], [1, 1])],
)
def test_bad_samples_are_refused(x: list[float], y: list[float]) -> None:
    with pytest.raises(ValueError, match="samples"):
        fit(x, y)


def test_json_round_trip() -> None:
    loads = {"host": Line(1e-5, 2e-11), "disk": Line(0, 0)}
    model = CostModel("NVIDIA H200", Line(0.004, 2e-15, 0.99, 12), loads, launch=6e-6)
    text = json.dumps(model.to_json())
    assert from_json(text) == model
    older = {key: value for key, value in model.to_json().items() if key != "launch"}
    assert from_json(older) == replace(model, launch=0.0)
    assert from_json(json.loads(text)) == model


@pytest.mark.parametrize(
    "bad",
    [
        "{}",
        "[]",
        '{"version": 2, "device": "", "source": "measured", "lines": {}}',
        '{"version": 1, "device": "", "source": "guess", '
        '"lines": {"compute": {"fixed": 0, "per_unit": 0}}}',
        '{"version": 1, "device": "", "source": "measured", '
        '"lines": {"compute": {"fixed": -1, "per_unit": 0}}}',
        '{"version": 1, "device": "", "source": "measured", '
        '"lines": {"compute": {"fixed": 0, "per_unit": 0}, '
        '"load.tape": {"fixed": 0, "per_unit": 0}}}',
        "not json",
    ],
)
def test_other_json_is_refused(bad: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - the message differs per case
        from_json(bad)


def test_predictions() -> None:
    model = CostModel("x", Line(0.5, 0.25), {"host": Line(0.1, 0.01)})
    assert model.step_seconds(2) == 1.0
    assert model.load_seconds("host", 10) == pytest.approx(0.2)
    assert model.load_seconds("host", 0) == 0.0
    with pytest.raises(ValueError, match="tier"):
        model.load_seconds("disk", 1)


@pytest.mark.parametrize(
    ("gpu", "tflops", "single"),
    [
        (GpuProperties("NVIDIA B200", 148, 1.85e9, (10, 0)), 2250, 70),
        (GpuProperties("NVIDIA H100 80GB HBM3", 132, 1.83e9, (9, 0)), 989, 62),
        (GpuProperties("NVIDIA A100-SXM4-80GB", 108, 1.41e9, (8, 0)), 312, 19.5),
        (GpuProperties("NVIDIA L40", 142, 2.49e9, (8, 9)), 362, 90.5),
        (GpuProperties("NVIDIA RTX A6000", 84, 1.8e9, (8, 6)), 155, 38.7),
        (GpuProperties("NVIDIA A10", 72, 1.695e9, (8, 6)), 125, 31.2),
        (GpuProperties("NVIDIA RTX A1000", 18, 1.14e9, (8, 6)), 21, 5.2),
        (GpuProperties("what comes next", 200, 2e9, (13, 0)), 410, 102),
    ],
)
def test_peaks_follow_from_what_a_gpu_says_of_itself(
    gpu: GpuProperties, tflops: float, single: float
) -> None:
    assert gpu_rates(gpu).product_flops == pytest.approx(tflops * 1e12, rel=0.02)
    assert gpu_rates(gpu, "float32").product_flops == pytest.approx(single * 1e12, rel=0.02)
    model = estimate(gpu_rates(gpu))
    assert (model.source, model.device) == ("estimate", gpu.name)
    assert 1e-12 / model.compute.per_unit == pytest.approx(tflops / 2, rel=0.02)
    assert from_json(json.dumps(model.to_json())) == model
    # No GPU, whatever its name, is taken for a core of a CPU.
    assert model.compute.per_unit < estimate(cpu_rates(16)).compute.per_unit


@pytest.mark.parametrize("rates", [H100, cpu_rates(), cpu_rates(16)])
def test_estimates_order_as_the_tiers_do(rates: Rates) -> None:
    model = estimate(rates)
    seconds = [model.load_seconds(t, 1e8) for t in ("device", "host", "disk", "remote")]
    assert seconds == sorted(seconds)


def test_more_cores_compute_more() -> None:
    assert estimate(cpu_rates(4)).step_seconds(1e12) < estimate(cpu_rates()).step_seconds(1e12)
