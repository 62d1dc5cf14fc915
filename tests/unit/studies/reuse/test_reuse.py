"""Limits and line of the study of controlled refresh steps, and its coarse lookaheads."""

from __future__ import annotations

import numpy as np
import pytest

from maskserve_studies.reuse.coarse import coarse_refreshes
from maskserve_studies.reuse.command import MODELS, Trial, fitted, passes
from tests.support.draws import fresh_rng


def test_the_line_through_points_on_a_line_is_that_line() -> None:
    rng = fresh_rng()
    intercept, slope = rng.uniform(20, 40), rng.uniform(5, 15)
    errors = rng.uniform(0.001, 0.5, 40)
    line = fitted([(float(e), float(intercept - slope * np.log10(e))) for e in errors])
    assert line["intercept"] == pytest.approx(intercept, abs=0.06)
    assert line["slope"] == pytest.approx(slope, abs=0.06)
    assert line["rms"] == 0.0


def test_each_limit_can_be_missed() -> None:
    figures = {"fidelity": 40.0, "mean": 44.0, "worst_class": 41.0, "under_30": 0.0, "kept": 0.99}
    assert passes(figures)
    for missed in ({"mean": 39.9}, {"worst_class": 33.9}, {"under_30": 0.01}, {"kept": 0.94}):
        assert not passes({**figures, **missed})
    assert passes({**figures, "fidelity": 36.0, "mean": 36.5})


def test_with_a_margin_as_wide_as_the_picture_refresh_steps_are_whole() -> None:
    trial = Trial(*MODELS["klein4"], 1)
    whole = trial.figures(40.0)
    with coarse_refreshes(16, first=True):
        assert trial.figures(40.0)["mean"] == pytest.approx(whole["mean"], abs=0.1)
    with coarse_refreshes(0, first=True):
        assert trial.figures(40.0)["mean"] < whole["mean"]
