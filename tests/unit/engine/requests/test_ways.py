"""Which way an edit runs: none that is more work than computing all tokens."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from maskserve_common.config import Config
from maskserve_common.contracts.settings import EditSettings
from maskserve_engine.base.job import EditJob
from maskserve_engine.cache.entries import AnchorEntry
from maskserve_engine.families.registry import load_adapter
from maskserve_engine.loop.engine import Engine
from maskserve_engine.requests.state import RequestState
from maskserve_engine.requests.templates import DENSE
from maskserve_engine.start.assembly import assemble
from maskserve_harness.benchmarks.direct import request_of
from tests.fakes.jobs import config_of
from tests.support.draws import fresh_rng
from tests.support.examples import number
from tests.support.sink import Sink

MODELS = Path(__file__).parents[4] / "assets/models"
FAMILIES = sorted(path.name for path in MODELS.iterdir() if (path / "model_index.json").exists())
"""A folder of each family; weights are not read."""
STEPS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 15, 20, 28, 37, 50)
RATIOS = (0.02, 0.2, 0.4, 0.5, 0.56, 0.6, 0.65, 0.69, 0.75, 0.81, 0.88, 0.95, 1.0)
CACHE: dict[str, Any] = {"budget_bytes": 2**38, "dense_above_ratio": 1.0}


@cache
def engine_of(name: str, **cache: Any) -> Engine:
    """One of a model without weights that was not started: the test does what its thread does."""
    config: Config = config_of(
        MODELS / name,
        model={"device": "meta", "dtype": "float32"},
        engine={"warm_up": False},
        cache={**CACHE, **cache},
    )
    adapter = load_adapter(config)
    return assemble(config, adapter, lambda: adapter.blank_prompt(8))


def job(engine: Engine, ratio: float, steps: int, name: str = "edit", **asked: Any) -> EditJob:
    """An edit of the upper share of a picture, whose last row of tokens ends where it may."""
    adapter, facts = engine.adapter, engine.adapter.facts
    side = min(facts.native_resolution, 256)
    mask, latents = np.zeros((side, side), np.uint8), side // facts.vae_scale_factor
    mask[: max(1, round(ratio * side))] = 255
    words = facts.text_tokens(engine.config.model.max_sequence_length)
    prompt = adapter.blank_prompt(facts.shown_tokens(latents, latents) + words)
    moments = np.zeros((2 * facts.latent_channels, latents, latents), np.float32)
    settings = EditSettings(
        **{
            "num_inference_steps": len(facts.sigmas) or max(steps, facts.least_steps),
            "guidance_scale": facts.guidance_default(0.0),
            "mask_ring": 1,
            "first_block_threshold": 0.0,
            **asked,
        }
    )
    return EditJob(
        request_of(np.zeros((side, side, 3), np.uint8), "a red star", settings, 0, name),
        mask,
        moments,
        moments if facts.semantics.masked_picture else np.zeros((0, 0, 0), np.float32),
        prompt,
        prompt if facts.guidance == "cfg" else None,
    )


def prime(engine: Engine, asked: EditJob) -> None:
    """Have the job's template count as primed: its entries are never read."""
    if engine.cache.wants(asked) == "primed":
        return
    priming = engine.cache.begin(asked)
    assert priming is not None
    for done, anchor in enumerate(priming.anchors, 1):
        assert engine.cache.store.put(priming.key, AnchorEntry(anchor, ()), priming.note(done))
    engine.cache.end(priming, complete=True)


def accepted(engine: Engine, asked: EditJob) -> RequestState:
    """The edit, queued by the engine's manager."""
    sink = Sink()
    edit = RequestState.of(asked, sink, engine.adapter)
    engine.manager.accept(edit)
    assert engine.manager.holds(edit), sink.events
    engine.manager.cancel(edit.request_id)
    return edit


def check(engine: Engine, edit: RequestState) -> None:
    """Its ticket can be, and no step of it is more work than a dense one."""
    ticket = edit.make_ticket()
    dense = edit.step_flops(DENSE, engine.adapter)
    assert 0 < ticket.cost <= dense * (1 + 1e-12), edit.route
    if edit.route.own is not None:
        assert ticket.cost < dense
    for level in edit.levels:
        again = replace(edit)
        again.step_down(level, engine.adapter)
        again.make_ticket()
        again.status()


@pytest.mark.parametrize("primed", [False, True])
@pytest.mark.parametrize("name", FAMILIES)
def test_no_edit_of_any_size_and_steps_is_more_work_than_a_dense_one(
    name: str, primed: bool
) -> None:
    engine = engine_of(name)
    settings: list[dict[str, Any]] = [
        {},
        {"cache": "own"},
        {"cache": "require"} if primed else {"negative_prompt": None},
        {"reuse": "elastic", "reuse_floor": 0.0},
    ]
    cases = list(product(STEPS, RATIOS))
    drawn = fresh_rng().permutation(len(cases))[: number(60)]
    # The first two, and more than those, count more tokens than a dense step has.
    for steps, ratio in [(4, 0.75), (6, 0.95), *(cases[at] for at in drawn)]:
        if primed:
            prime(engine, job(engine, ratio, steps))
        for asked in settings:
            check(engine, accepted(engine, job(engine, ratio, steps, **asked)))
