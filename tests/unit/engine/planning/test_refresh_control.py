"""Places of refresh steps by the errors of lookaheads."""

from __future__ import annotations

import numpy as np
import pytest

from maskserve_common.contracts.semantics import FILL, INPAINT, REFERENCE
from maskserve_engine.planning.refresh_control import (
    RefreshControl,
    Remainder,
    fidelity_of,
    tolerance_of,
)
from tests.support.draws import fresh_rng


@pytest.fixture(params=[FILL, INPAINT, REFERENCE], ids=["fill", "inpaint", "reference"])
def control(request: pytest.FixtureRequest) -> RefreshControl:
    rng = fresh_rng()
    sigmas = np.sort(rng.uniform(0.01, 1.0, int(rng.integers(4, 51))))[::-1]
    return RefreshControl.of(float(rng.uniform(20, 60)), sigmas.tolist(), 1.5, request.param)


def remainders_of(control: RefreshControl, error: float) -> list[Remainder]:
    """Remainders of a row whose lookaheads are all off by `error`."""
    before, step, remainders = 0, min(control.begin().refresh_steps), list[Remainder]()
    while True:
        remainders.append(control.after(before, step, error))
        to_come = sorted(remainders[-1].refresh_steps)
        if not to_come or remainders[-1].dense_from is not None:
            return remainders
        before, step = step, to_come[0]


def test_more_fidelity_allows_less_error() -> None:
    low, high = sorted(fresh_rng().uniform(10, 80, 2))
    assert 0 < tolerance_of(high) < tolerance_of(low)
    assert fidelity_of(tolerance_of(low)) == pytest.approx(low)


def test_where_all_is_noisy_around_the_first_refresh_step_is_the_nearest() -> None:
    """The first steps decide most there, and no error sees what is lost before it."""
    sigmas = np.linspace(1.0, 0.05, int(fresh_rng().integers(8, 51))).tolist()
    near, far = (RefreshControl.of(44.0, sigmas, 1.5, takes) for takes in (INPAINT, REFERENCE))
    assert min(near.begin().refresh_steps) == 2 <= min(far.begin().refresh_steps)
    for error in near.tolerance * np.geomspace(1e-3, 1e3, 20):
        reach = [min(c.after(0, 2, float(error)).refresh_steps, default=99) for c in (near, far)]
        assert reach[0] <= reach[1]


def test_where_all_is_noisy_around_distances_grow_more_slowly() -> None:
    """The error is the same in both: none."""
    sigmas = np.linspace(1.0, 0.05, 28).tolist()
    near, far = (
        min(RefreshControl.of(44.0, sigmas, 1.5, takes).after(0, 2, 0.0).refresh_steps)
        for takes in (INPAINT, REFERENCE)
    )
    assert near < far


def test_in_few_steps_a_lower_promise_looks_ahead_to_the_last() -> None:
    """With references alone: FLUX Fill would keep 34 dB in its worst class."""
    steps = int(fresh_rng().integers(4, 9))
    sigmas = np.linspace(1.0, 0.05, steps).tolist()
    few, higher, fill = (
        RefreshControl.of(fidelity, sigmas, 1.5, takes)
        for fidelity, takes in ((40.0, REFERENCE), (44.0, REFERENCE), (40.0, FILL))
    )
    assert few.begin().refresh_steps == {steps - 1}
    assert (higher.first, fill.first) == (0.2, 0.2)


@pytest.mark.parametrize("scale", [0.01, 0.3, 1.0, 3.0, 100.0])
def test_each_refresh_step_leaves_room_for_its_lookahead(
    control: RefreshControl, scale: float
) -> None:
    last = len(control.distances) - 1
    step = min(control.begin().refresh_steps)
    assert step >= 2
    for remainder in remainders_of(control, scale * control.tolerance):
        to_come = sorted(remainder.refresh_steps)
        if remainder.dense_from is not None:
            assert to_come == list(range(step + 1, last + 1))
            assert remainder.dense_from == step + 1
        else:
            assert all(np.diff([step, *to_come]) >= 2)
            assert not to_come or to_come[-1] <= last
        step = to_come[0] if to_come else last


def test_the_next_refresh_step_lies_within_the_distance_that_the_error_allows(
    control: RefreshControl,
) -> None:
    before, step = 0, min(control.begin().refresh_steps)
    distances = control.distances
    if step == len(distances) - 1:
        return
    for error in control.tolerance * np.geomspace(1e-3, 1e3, 60):
        remainder = control.after(before, step, float(error))
        growth = min((control.tolerance / error) ** (1 / 2.3), control.growth)
        reach = growth * (distances[before] - distances[step]) + 1e-12
        if not remainder.refresh_steps:
            assert 2.5 * distances[step] <= reach
        elif remainder.dense_from is None:
            assert distances[step] - distances[min(remainder.refresh_steps)] <= reach
    assert remainder.dense_from == step + 1


def test_where_the_nearest_refresh_step_is_too_far_the_rest_is_dense() -> None:
    control = RefreshControl(0.1, tuple(np.linspace(1.0, 0.05, 20)))
    first = min(control.begin().refresh_steps)
    remainder = control.after(0, first, 100.0)
    assert (remainder.dense_from, remainder.failed) == (first + 1, True)
    assert control.after(0, first, 0.0) == control.after(0, first, 1e-9)
    assert control.after(0, 19, 100.0) == Remainder()
    assert control.after(16, 18, 100.0) == Remainder(frozenset({19}), 19)


def test_a_step_cache_that_begins_anew_gets_a_refresh_step_or_the_rest_is_dense(
    control: RefreshControl,
) -> None:
    last = len(control.distances) - 1
    for step in range(last):
        remainder = control.begin(step)
        assert min(remainder.refresh_steps) >= step + 2 or remainder == control.dense_after(step)
        assert (remainder.dense_from is None) == (step + 2 <= last)
