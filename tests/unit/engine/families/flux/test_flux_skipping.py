"""Rows that skip blocks: each by itself, as diffusers' FirstBlockCache does for a whole batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import structs
from numpy.typing import NDArray

from maskserve_benchmarks.steps.replay import Replay
from maskserve_common.config import Config, ConfigError
from maskserve_engine.base.job import EditJob
from maskserve_engine.batch.skipping import FirstBlockCache
from maskserve_engine.families.encoder import Encoder
from maskserve_engine.families.flux.adapter import FluxAdapter
from maskserve_engine.families.mmdit.rows import FlowRow
from maskserve_engine.families.registry import load_adapter, load_encoder
from maskserve_engine.loop.engine import Engine
from maskserve_engine.start.assembly import load_engine
from tests.fakes.jobs import config_of, encode_case, guided, random_case, tolerance
from tests.fakes.pipelines import diffusers_latents
from tests.support.cached_rows import Primed, cached
from tests.support.sink import Sink

pytestmark = pytest.mark.spread("folder")

STEPS = 12
THRESHOLD = 0.2
"""Under which these models of random weights skip some steps and not others."""
LONG = {"num_inference_steps": STEPS, "strength": 1.0}


@pytest.fixture(scope="module")
def config(folder: Path) -> Config:
    return config_of(folder, model={"outside_noise": "edit"})


def job_of(encoder: Encoder, seed: int) -> EditJob:
    """Every other one with a negative prompt, where the model takes any."""
    rng = np.random.default_rng(seed)
    settings = guided(rng) if encoder.spec.true_cfg and seed % 2 else {}
    return encode_case(encoder, random_case(rng, **LONG, **settings), f"edit-{seed}")


def rows_of(replay: Replay, encoder: Encoder) -> list[FlowRow]:
    """Dense rows and cached ones, two of which do not skip; some with a negative prompt."""
    adapter = replay.adapter
    rows: list[FlowRow] = []
    for number, seed in enumerate(range(40, 46)):
        job = job_of(encoder, seed)
        if number % 3:
            row = cached(replay, job, Primed(adapter, encoder, job))
        else:
            row = adapter.dense_row(job)
        assert isinstance(row, FlowRow)
        if number % 3 < 2:
            row.first_block = FirstBlockCache(THRESHOLD * (1 + number // 3))
        rows.append(row)
    return rows


def run(replay: Replay, rows: list[FlowRow], kinds: tuple[str, ...]) -> list[NDArray[np.float32]]:
    while rows[0].step < rows[0].steps:
        replay.step(rows, kinds)
    return [row.result().array() for row in rows]


@pytest.mark.parametrize("kinds", ["kv", "project", "dense", "mixed"])
def test_a_batch_in_which_rows_skip_equals_each_row_alone(
    replay: Replay, encoder: Encoder, kinds: str
) -> None:
    blocks = replay.adapter.blocks
    plan = (kinds,) * blocks if kinds != "mixed" else ("dense", *("kv",) * (blocks - 1))
    alone = rows_of(replay, encoder)
    expected = [run(replay, [row], plan)[0] for row in alone]
    together = rows_of(replay, encoder)
    result = run(replay, together, plan)
    assert [row.skipped for row in together] == [row.skipped for row in alone]
    assert any(0 < row.skipped < STEPS - 1 for row in together)
    for one, other in zip(result, expected, strict=True):
        assert np.abs(one - other).max() <= tolerance(other)


def test_at_threshold_zero_nothing_is_skipped_bit_for_bit(replay: Replay, encoder: Encoder) -> None:
    plan = ("kv",) * replay.adapter.blocks
    plain, watched = rows_of(replay, encoder), rows_of(replay, encoder)
    for row in plain:
        row.first_block = None
    for row in watched:
        row.first_block = FirstBlockCache(0.0)
    for one, other in zip(run(replay, plain, plan), run(replay, watched, plan), strict=True):
        assert np.array_equal(one, other)


def test_a_dense_row_equals_the_pipeline_with_first_block_cache(
    folder: Path, adapter: FluxAdapter, encoder: Encoder
) -> None:
    from diffusers import FluxFillPipeline, FluxInpaintPipeline
    from diffusers.hooks import FirstBlockCacheConfig

    fill = adapter.spec.semantics.masked_picture
    pipeline: Any = (FluxFillPipeline if fill else FluxInpaintPipeline).from_pretrained(folder)
    pipeline.set_progress_bar_config(disable=True)
    transformer = pipeline.transformer
    forward = transformer.forward

    def in_context(*args: Any, **kwargs: Any) -> Any:  # the pipelines name no cache context
        with transformer.cache_context("edit"):
            return forward(*args, **kwargs)

    transformer.enable_cache(FirstBlockCacheConfig(threshold=THRESHOLD))
    transformer.forward = in_context
    case = random_case(np.random.default_rng(7), **LONG, first_block_threshold=THRESHOLD)
    row = adapter.dense_row(encode_case(encoder, case, "r"))
    while row.step < row.steps:
        adapter.step([row], None)
    expected = diffusers_latents(pipeline, case)
    assert 0 < row.skipped < STEPS - 1
    assert np.abs(row.result().array() - expected).max() <= tolerance(expected)


@pytest.fixture
def engine(tiny_fill: Path) -> Iterator[Engine]:
    engine = load_engine(config_of(tiny_fill))
    encoder = load_encoder(config_of(tiny_fill))
    engine.cache.prompt = lambda: encoder.encode_prompt("")
    engine.start()
    yield engine
    engine.close(5.0)


def test_meta_says_how_many_steps_were_skipped(engine: Engine, tiny_fill: Path) -> None:
    encoder = load_encoder(config_of(tiny_fill))
    skipped, ran = [], Counter[str]()
    for number, settings in enumerate(({}, {"first_block_threshold": 10.0})):
        case = random_case(np.random.default_rng(3), **LONG, **settings, cache="require")
        sink = Sink()
        engine.submit(encode_case(encoder, case, str(number)), sink)
        meta = sink.final().meta
        skipped.append(meta["steps_skipped"])
        ran.update(meta["kinds"])
        blocks = engine.adapter.blocks
        assert sum(meta["kinds"].values()) == STEPS * blocks - skipped[-1] * (blocks - 1)
    assert skipped == [0, STEPS - 1]
    assert engine.counters["skipped_rows_total"] == STEPS - 1
    assert {kind: engine.counters[f"plan_blocks_total.{kind}"] for kind in ran} == ran


def test_a_unet_refuses_to_be_served_with_a_threshold(tiny_unets: dict[str, Path]) -> None:
    config = config_of(tiny_unets["sd-base"])
    model = structs.replace(config.model, first_block_threshold=0.1)
    with pytest.raises(ConfigError, match="first_block_threshold"):
        load_adapter(structs.replace(config, model=model))
