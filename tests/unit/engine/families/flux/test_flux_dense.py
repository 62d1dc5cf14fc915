"""Dense rows against diffusers' own pipelines, alone and in any mix (design §4, §8)."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from maskserve_engine.families.registry import load_adapter, load_encoder
from tests.fakes.jobs import Case, config_of, encode_case, guided, random_case, tolerance
from tests.fakes.pipelines import diffusers_latents

pytestmark = pytest.mark.spread("model", "seed")


class Model:
    """One tiny model: diffusers' pipeline and our adapter over the same folder."""

    def __init__(self, folder: Path) -> None:
        from diffusers import DiffusionPipeline

        self.pipeline: Any = DiffusionPipeline.from_pretrained(folder)
        self.pipeline.set_progress_bar_config(disable=True)
        config = config_of(folder)
        self.encoder, self.adapter = load_encoder(config), load_adapter(config)

    def case(self, rng: np.random.Generator) -> Case:
        """A random edit; every other one with a negative prompt where the model takes one."""
        asked = guided(rng) if self.adapter.spec.true_cfg and rng.random() < 0.5 else {}
        return random_case(rng, cache="off", **asked)

    def oracle(self, case: Case) -> NDArray[np.float32]:
        """[C, h, w] latents of the diffusers pipeline."""
        return diffusers_latents(self.pipeline, case)

    def row(self, case: Case, name: str = "r") -> Any:
        return self.adapter.dense_row(encode_case(self.encoder, case, name))

    def alone(self, case: Case) -> NDArray[np.float32]:
        row = self.row(case)
        while row.step < row.steps:
            self.adapter.step([row], None)
        return row.result().array()


@pytest.fixture(scope="module", params=["fill", "inpaint", "reference"])
def model(request: pytest.FixtureRequest, tiny_flux: dict[str, Path]) -> Model:
    return Model(tiny_flux[request.param])


@pytest.mark.each_value
@pytest.mark.parametrize("seed", range(6))
def test_a_dense_row_equals_the_pipeline(model: Model, seed: int) -> None:
    case = model.case(np.random.default_rng(seed))
    expected = model.oracle(case)
    assert np.abs(model.alone(case) - expected).max() <= tolerance(expected)


@pytest.mark.parametrize("seed", range(4))
def test_rows_that_join_and_leave_at_any_step_do_not_change_one_another(
    model: Model, seed: int
) -> None:
    rng = np.random.default_rng(100 + seed)
    cases = [model.case(rng) for _ in range(6)]
    arrivals = sorted(int(rng.integers(0, 8)) for _ in cases)
    waiting = [model.row(case, str(i)) for i, case in enumerate(cases)]
    cancelled = int(rng.integers(len(cases)))
    running: list[Any] = []
    results: dict[str, NDArray[np.float32]] = {}
    tick = 0
    while waiting or running:
        while waiting and arrivals[len(cases) - len(waiting)] <= tick:
            running.append(waiting.pop(0))
        running = [r for r in running if not (r.request_id == str(cancelled) and r.step >= 1)]
        rng.shuffle(running)
        if running:
            model.adapter.step(running, None)
        for row in [r for r in running if r.step == r.steps]:
            results[row.request_id] = row.result().array()
        running = [r for r in running if r.step < r.steps]
        tick += 1
    for number, case in enumerate(cases):
        if number != cancelled:
            expected = model.oracle(case)
            assert np.abs(results[str(number)] - expected).max() <= tolerance(expected)


def test_a_negative_prompt_and_its_scale_matter(tiny_inpaint: Path) -> None:
    model = Model(tiny_inpaint)
    asked = {"num_inference_steps": 3, "strength": 1.0}
    results = []
    for negative in ({}, {"negative_prompt": "x", "true_cfg_scale": 2.0},
                     {"negative_prompt": "x", "true_cfg_scale": 4.0},
                     {"negative_prompt": "a red star", "true_cfg_scale": 4.0}):  # fmt: skip
        case = random_case(np.random.default_rng(9), cache="off", **asked, **negative)
        results.append(model.alone(case))
        expected = model.oracle(case)
        assert np.abs(results[-1] - expected).max() <= tolerance(expected)
    for one, other in pairwise(results):
        assert np.abs(one - other).max() > 1e-3


def test_the_seed_matters_and_equal_seeds_are_bit_equal(model: Model) -> None:
    from dataclasses import replace

    case = random_case(np.random.default_rng(7), num_inference_steps=3, strength=1.0)
    once, again = model.alone(case), model.alone(case)
    other = model.alone(replace(case, seed=case.seed + 1))
    assert np.array_equal(once, again)
    assert np.abs(once - other).max() > 0.01


def test_the_estimate_after_the_last_step_is_the_result(model: Model) -> None:
    case = random_case(np.random.default_rng(8), num_inference_steps=4, strength=1.0)
    row = model.row(case)
    while row.step < row.steps:
        model.adapter.step([row], None)
    assert np.abs(row.estimate().array() - row.result().array()).max() <= 1e-5
