"""The refresh steps of an edit."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from maskserve_common.contracts.reuse_levels import refresh_count
from maskserve_engine.planning.refresh_steps import (
    count_with_controls,
    lookahead_steps_of,
    refresh_steps,
)


def shifted(steps: int, times: float) -> list[float]:
    """Sigmas of a flow-matching sampler that is shifted by so much."""
    even = np.linspace(1.0, 1 / steps, steps)
    return list(times * even / (1 + (times - 1) * even))


@pytest.mark.parametrize("stride", [0.2, 0.25, 0.35, 0.5, 1.0])
@pytest.mark.parametrize("steps", range(4, 60))
def test_every_edit_of_four_steps_or_more_has_some_and_half_of_its_steps_at_most(
    steps: int, stride: float
) -> None:
    assert 1 <= refresh_count(steps, stride) <= steps / 2


def test_fewer_steps_and_no_stride_have_none() -> None:
    assert refresh_count(3, 0.25) == refresh_count(20, 0.0) == 0


@pytest.mark.parametrize("count", [1, 2, 3, 4])
@pytest.mark.parametrize("steps", [20, 21, 28, 50])
def test_so_many_anchors_lie_evenly(steps: int, count: int) -> None:
    anchors = sorted(refresh_steps(count, range(steps, 0, -1), 1.0, 1.0))
    assert len(anchors) == count
    gaps = [later - sooner for sooner, later in pairwise(anchors)]
    assert max(gaps, default=0) - min(gaps, default=0) <= 1


@pytest.mark.parametrize("count", [1, 2, 3, 5])
@pytest.mark.parametrize("times", [0.3, 1.0, 3.16, 9.77, 100.0])
@pytest.mark.parametrize("steps", [10, 20, 28, 50])
@pytest.mark.parametrize("growth", [1.0, 2.15])
def test_every_shift_of_a_sampler_has_so_many(
    steps: int, times: float, count: int, growth: float
) -> None:
    anchors = refresh_steps(count, shifted(steps, times), 1.5, growth)
    assert len(anchors) == count
    assert 0 in anchors
    assert 1 not in anchors
    assert max(anchors) < steps
    assert len(lookahead_steps_of(anchors)) == count


@pytest.mark.parametrize("steps", range(4, 12))
def test_a_short_edit_looks_ahead_to_its_second_refresh_step(steps: int) -> None:
    anchors = refresh_steps(refresh_count(steps, 0.5), shifted(steps, 1.0), 1.5, 1.0)
    assert {0, 1} <= lookahead_steps_of(anchors)
    assert min(anchors - {0}) > 1


def test_refresh_steps_with_lookahead_have_steps_between_them_and_few_behind() -> None:
    flat = range(20, 0, -1)
    assert refresh_steps(3, flat, 1.0, 1.0) == {0, 8, 16}
    assert lookahead_steps_of(frozenset({0, 8, 16})) == {0, 1, 8}
    assert refresh_steps(4, shifted(20, 1.65), 1.5, 1.0) == {0, 6, 11, 16}
    assert refresh_steps(4, shifted(20, 1.65), 1.5, 2.15) == {0, 2, 7, 16}


def test_anchors_follow_a_shifted_sampler_to_where_it_goes_most_of_its_way() -> None:
    assert refresh_steps(3, shifted(20, 1.65), 1.5, 1.0) == {0, 8, 15}
    assert refresh_steps(3, shifted(20, 3.16), 1.5, 1.0) == {0, 11, 17}
    assert refresh_steps(2, shifted(4, 9.77), 1.5, 1.0) == {0, 3}
    assert refresh_steps(2, shifted(4, 1.0), 1.5, 1.0) == {0, 2}


@pytest.mark.parametrize("steps", range(1, 60))
@pytest.mark.parametrize("stride", [0.01, 0.2, 0.35, 0.55, 1.0])
def test_an_edit_with_controls_looks_ahead_once_at_least(steps: int, stride: float) -> None:
    count = count_with_controls(steps, stride)
    anchors = refresh_steps(count, shifted(steps, 1.65), 1.5, 1.0)
    assert len(anchors) == count == max(refresh_count(steps, stride), 1 + (steps > 2))
    later = frozenset({anchor + 3 for anchor in anchors})  # its nets act from the fourth step on
    assert lookahead_steps_of(later) == {step + 3 for step in lookahead_steps_of(anchors)}
