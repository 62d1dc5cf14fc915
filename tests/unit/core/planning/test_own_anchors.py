"""Which steps of an edit are its own anchors."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from maskserve_core.planning.own_anchors import own_count, own_steps


def shifted(steps: int, times: float) -> list[float]:
    """Sigmas of a flow-matching sampler that is shifted by so much."""
    even = np.linspace(1.0, 1 / steps, steps)
    return list(times * even / (1 + (times - 1) * even))


@pytest.mark.parametrize("stride", [0.2, 0.25, 0.35, 0.5, 1.0])
@pytest.mark.parametrize("steps", range(4, 60))
def test_every_edit_of_four_steps_or_more_has_some_and_half_of_its_steps_at_most(
    steps: int, stride: float
) -> None:
    assert 1 <= own_count(steps, stride) <= steps / 2


def test_fewer_steps_and_no_stride_have_none() -> None:
    assert own_count(3, 0.25) == own_count(20, 0.0) == 0


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("steps", [6, 7, 9, 20, 21, 28, 50])
def test_so_many_anchors_lie_evenly(steps: int, count: int) -> None:
    anchors = [*sorted(own_steps(count, range(steps, 0, -1), 0.0)), steps]
    assert len(anchors) == count + 1
    gaps = [later - sooner for sooner, later in pairwise(anchors)]
    assert max(gaps) - min(gaps) <= 1


@pytest.mark.parametrize("count", [1, 2, 3, 5])
@pytest.mark.parametrize("times", [0.3, 1.0, 3.16, 9.77, 100.0])
@pytest.mark.parametrize("steps", [10, 20, 28, 50])
def test_every_shift_of_a_sampler_has_so_many(steps: int, times: float, count: int) -> None:
    anchors = own_steps(count, shifted(steps, times), 1.5)
    assert len(anchors) == count
    assert 0 in anchors
    assert max(anchors) < steps


def test_anchors_follow_a_shifted_sampler_to_where_it_goes_most_of_its_way() -> None:
    assert own_steps(3, shifted(20, 1.65), 1.5) == {0, 7, 13}
    assert own_steps(3, shifted(20, 3.16), 1.5) == {0, 10, 15}
    assert own_steps(2, shifted(4, 9.77), 1.5) == {0, 3}
    assert own_steps(2, shifted(4, 1.0), 1.5) == {0, 2}
