"""Rows whose model runs in some steps (`step_interval`), like diffusers' TaylorSeer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import structs

from maskserve_common.config import Config, ConfigError
from maskserve_common.contracts.request import model_steps
from maskserve_engine.families.encoder import Encoder
from maskserve_engine.families.flux.adapter import FluxAdapter
from maskserve_engine.families.mmdit.schedule import Schedule, Walk, at_model_steps
from maskserve_engine.families.specs import check_family, load_spec
from tests.fakes.jobs import config_of, encode_case, random_case, tolerance
from tests.fakes.pipelines import diffusers_latents
from tests.support.draws import fresh_rng

pytestmark = pytest.mark.spread("folder")


@pytest.fixture(scope="module")
def config(folder: Path) -> Config:
    return config_of(folder, model={"outside_noise": "edit"})


@pytest.mark.parametrize("interval", [2, 3, 5])
def test_a_dense_row_equals_the_pipeline_with_taylorseer(
    folder: Path, adapter: FluxAdapter, encoder: Encoder, interval: int
) -> None:
    from diffusers import FluxFillPipeline, FluxInpaintPipeline
    from diffusers.hooks import TaylorSeerCacheConfig

    fill = adapter.spec.semantics.masked_picture
    pipeline: Any = (FluxFillPipeline if fill else FluxInpaintPipeline).from_pretrained(folder)
    pipeline.set_progress_bar_config(disable=True)
    transformer = pipeline.transformer
    transformer.enable_cache(
        TaylorSeerCacheConfig(
            cache_interval=interval,
            disable_cache_before_step=2,
            taylor_factors_dtype=torch.float32,
            use_lite_mode=True,
        )
    )
    forward = transformer.forward

    def in_context(*args: Any, **kwargs: Any) -> Any:  # the pipelines name no cache context
        with transformer.cache_context("edit"):
            return forward(*args, **kwargs)

    transformer.forward = in_context
    rng = fresh_rng()
    steps = int(rng.integers(4, 14))
    case = random_case(rng, num_inference_steps=steps, strength=1.0, step_interval=interval)
    every_step = structs.replace(case.settings, step_interval=1)
    rows = []
    for settings in (case.settings, every_step):
        job = encode_case(encoder, replace(case, settings=settings), "r")
        rows.append(adapter.dense_row(job))
        assert rows[-1].steps == adapter.steps(job)
        while rows[-1].step < rows[-1].steps:
            adapter.step(rows[-1:], None)
    assert [row.steps for row in rows] == [len(model_steps(steps, interval)), steps]
    expected = diffusers_latents(pipeline, case)
    errors = [np.abs(row.result().array() - expected).max() for row in rows]
    assert errors[0] <= tolerance(expected) < errors[1]


@pytest.mark.parametrize("memory", [0, 1, 2])
def test_joined_steps_equal_the_sampler_s_own_on_predicted_answers(memory: int) -> None:
    rng = fresh_rng()
    count, interval, size = int(rng.integers(1, 20)), int(rng.integers(1, 6)), memory + 1
    moves = rng.normal(size=(count, size, size + 1)) / size
    sigmas = np.append(np.sort(rng.uniform(size=count))[::-1], 0.0)
    changes = np.diff(sigmas)
    if not memory:
        moves = np.stack([np.ones_like(changes), changes], axis=1)[:, None]
    schedule = Schedule(
        torch.from_numpy(sigmas),
        tuple(
            Walk(1000 * s, s, c) for s, c in zip(sigmas.tolist(), changes.tolist(), strict=False)
        ),
        tuple(tuple(map(tuple, move.tolist())) for move in moves) if memory else (),
    )
    answers = rng.normal(size=count)
    computed = model_steps(count, interval)
    expected, known = np.append(rng.normal(), np.zeros(memory)), list[tuple[int, float]]()
    state = np.append(expected, 0.0)
    for step in range(count):
        if step in computed:
            known.append((step, float(answers[step])))
            answer = known[-1][1]
        else:
            (first, before), (last, answer_there) = known[-2:]
            answer = answer_there + (answer_there - before) * (step - last) / (last - first)
        expected = moves[step] @ np.append(expected, answer)
    joined = at_model_steps(schedule, interval)
    assert [walk.sigma for walk in joined.walk] == [sigmas[step] for step in computed]
    assert sum(walk.change for walk in joined.walk) == pytest.approx(-sigmas[0])
    if len(computed) == count:
        assert joined is schedule
        return
    for step, move in zip(computed, joined.moves, strict=True):
        state = np.array(move) @ np.append(state, answers[step])
    assert state[:size] == pytest.approx(expected, rel=1e-9, abs=1e-9)


def test_a_model_without_it_refuses_it_at_start(tiny_unets: dict[str, Path]) -> None:
    folder = next(iter(tiny_unets.values()))
    config = config_of(folder, model={"step_interval": 2})
    with pytest.raises(ConfigError, match="step_interval"):
        check_family(config, load_spec(folder))
