"""Settings of dense rows, and what a row predicts of its result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from tests.fakes.jobs import random_case
from tests.support.cached_rows import assert_equal, result
from tests.support.family_cases import FamilyModel

pytestmark = pytest.mark.spread("model")


@pytest.fixture(params=["flux-fill", "flux-base", "flux-kontext"])
def model(
    request: pytest.FixtureRequest, family_model: Callable[[str], FamilyModel]
) -> FamilyModel:
    return family_model(request.param)


def test_a_negative_prompt_and_its_scale_matter(
    family_model: Callable[[str], FamilyModel],
) -> None:
    model = family_model("flux-base")
    settings = {"num_inference_steps": 3, "strength": 1.0}
    results = []
    for negative in ({}, {"negative_prompt": "x", "true_cfg_scale": 2.0},
                     {"negative_prompt": "x", "true_cfg_scale": 4.0},
                     {"negative_prompt": "a red star", "true_cfg_scale": 4.0}):  # fmt: skip
        edit = random_case(np.random.default_rng(9), cache="off", **settings, **negative)
        results.append(result(model.replay, model.adapter.dense_row(model.encoded(edit))))
        assert_equal(results[-1], model.oracle(edit))
    for one, other in pairwise(results):
        assert np.abs(one - other).max() > 1e-3


def test_the_seed_matters_and_equal_seeds_are_bit_equal(model: FamilyModel) -> None:
    edit = random_case(np.random.default_rng(7), num_inference_steps=3, strength=1.0)
    edits = edit, edit, replace(edit, seed=edit.seed + 1)
    once, again, other = (
        result(model.replay, model.adapter.dense_row(model.encoded(edit))) for edit in edits
    )
    assert np.array_equal(once, again)
    assert np.abs(once - other).max() > 0.01


def test_the_estimate_after_the_last_step_is_the_result(model: FamilyModel) -> None:
    edit = random_case(np.random.default_rng(8), num_inference_steps=4, strength=1.0)
    row = model.adapter.dense_row(model.encoded(edit))
    latents = result(model.replay, row)
    assert np.abs(row.estimate().array() - latents).max() <= 1e-5
