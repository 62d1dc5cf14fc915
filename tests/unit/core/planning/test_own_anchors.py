"""Which steps of an edit are its own anchors."""

from __future__ import annotations

from itertools import pairwise

import pytest

from maskserve_core.planning.own_anchors import own_steps, spread_steps


@pytest.mark.parametrize("stride", [0.2, 0.25, 0.35, 0.5, 1.0])
@pytest.mark.parametrize("steps", range(4, 60))
def test_every_edit_of_four_steps_or_more_has_some_and_half_of_its_steps_at_most(
    steps: int, stride: float
) -> None:
    anchors = sorted(own_steps(steps, stride))
    assert anchors[0] == 0
    assert 1 <= len(anchors) <= steps / 2
    assert all(later - sooner >= 2 for sooner, later in pairwise(anchors))
    assert anchors[-1] < steps


def test_fewer_steps_and_no_stride_have_none() -> None:
    assert own_steps(3, 0.25) == own_steps(20, 0.0) == frozenset()


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("steps", [6, 7, 9, 20, 21, 28, 50])
def test_so_many_anchors_lie_evenly(steps: int, count: int) -> None:
    anchors = [*sorted(spread_steps(steps, count)), steps]
    assert len(anchors) == count + 1
    gaps = [later - sooner for sooner, later in pairwise(anchors)]
    assert max(gaps) - min(gaps) <= 1
