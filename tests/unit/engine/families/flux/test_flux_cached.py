"""Cached rows against dense ones where the two must agree (design §4, §8)."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from maskserve_benchmarks.steps.replay import Replay, in_memory
from maskserve_engine.base.job import EditJob
from maskserve_engine.batch.forward import forward
from maskserve_engine.batch.packing import Packed
from maskserve_engine.families.encoder import Encoder
from maskserve_engine.families.flux.adapter import FluxAdapter
from maskserve_engine.families.mmdit.blocks import FluxStep, embed, vectors
from maskserve_engine.families.mmdit.preparation import pack_latents
from maskserve_engine.families.mmdit.rows import FlowPrimingRow, FlowRow, pass_inputs
from maskserve_engine.families.mmdit.schedule import Schedule, Walk
from maskserve_engine.families.registry import load_adapter, load_encoder
from tests.fakes.jobs import config_of, encode_case, guided, random_case, tolerance
from tests.support import cached_rows
from tests.support.cached_rows import KINDS, Primed, cached, result

pytestmark = pytest.mark.spread("folder", "seed")


@pytest.fixture(scope="module")
def kontext(tiny_kontext: Path) -> tuple[Encoder, Replay]:
    """Encoder and replay of a model that has the source as a reference."""
    config = config_of(tiny_kontext)
    return load_encoder(config), Replay(load_adapter(config))


def make_job(encoder: Encoder, seed: int, **settings: Any) -> EditJob:
    rng = np.random.default_rng(seed)
    if encoder.spec.true_cfg and seed % 2:
        settings = {**guided(rng), **settings}
    case = random_case(rng, **settings)
    return encode_case(encoder, case, f"edit-{seed}")


@pytest.mark.parametrize("kind", KINDS)
def test_with_a_ring_over_the_whole_picture_cached_equals_dense(
    replay: Replay, encoder: Encoder, kind: str
) -> None:
    cached_rows.check_ring_over_all(replay, encoder, make_job(encoder, 2, mask_ring=64), kind)


def as_primed(replay: Replay, job: EditJob, primed: Primed, anchor: int) -> FlowRow:
    """A cached row whose every model input is that of the priming forward at an anchor."""
    row = cast(FlowRow, cached(replay, job, primed))
    assert row.image.unmasked is not None
    entry, active = primed.entries[anchor], row.image.masked.ids
    inputs = primed.row.template.at(torch.tensor(entry.anchor.sigma))
    latents = inputs.shape[1] if row.image.masked.condition is None else row.latents.shape[1]
    row.image.masked.latents = inputs[active, :latents]
    row.image.masked.condition = (
        None if row.image.masked.condition is None else inputs[active, latents:]
    )
    row.passes = (replace(primed.row.prompt), *row.passes[1:])
    sigma, timestep = entry.anchor.sigma, entry.anchor.timestep
    row.schedule = Schedule(torch.tensor([sigma, 0.0]), (Walk(timestep, sigma, -sigma),))
    row.entry, row.step = in_memory(entry, row.image.unmasked.selection), 0
    return row


def outputs_of(
    adapter: FluxAdapter, rows: Sequence[FlowRow | FlowPrimingRow], kinds: Sequence[str]
) -> list[torch.Tensor]:
    """Answers of the model for the rows, which take no step."""
    packed = Packed([pass_inputs(row)[0] for row in rows])
    timesteps = torch.tensor([row.walk(row.step)[0].timestep for row in rows])
    emb = embed(adapter.weights, timesteps[None], packed.pooled, packed.guidance)
    [step] = vectors(adapter.weights, emb)
    output = forward(FluxStep(adapter.weights, step), packed, kinds)
    return [output[begin:end] for begin, end in packed.layout.narrow.image_stream.spans]


@pytest.mark.parametrize("seed", range(3))
def test_on_the_priming_inputs_any_mix_of_kinds_equals_dense(
    adapter: FluxAdapter, replay: Replay, encoder: Encoder, seed: int
) -> None:
    """Entries in model dtype hold exactly what the cached tokens would have been."""
    mixes = itertools.product(KINDS, repeat=adapter.blocks)
    check_priming_inputs(replay, encoder, seed, mixes)


def check_priming_inputs(
    replay: Replay, encoder: Encoder, seed: int, mixes: Iterable[Sequence[str]]
) -> None:
    adapter = cast(FluxAdapter, replay.adapter)
    jobs = [make_job(encoder, 10 * seed + i) for i in range(3)]
    primed = [Primed(adapter, encoder, job) for job in jobs]
    anchor = seed % len(primed[0].entries)
    with torch.inference_mode():
        for kinds in mixes:
            rows = [as_primed(replay, job, p, anchor) for job, p in zip(jobs, primed, strict=True)]
            outputs = outputs_of(adapter, rows, kinds)
            for row, p, output in zip(rows, primed, outputs, strict=True):
                p.row.step = anchor
                assert row.image.unmasked is not None
                expected = outputs_of(adapter, [p.row], ())[0][row.image.masked.ids]
                difference = (output - expected).abs().max() if len(output) else 0.0
                assert difference <= tolerance(expected.numpy()), kinds


def test_inactive_tokens_come_back_as_the_template(
    adapter: FluxAdapter, replay: Replay, encoder: Encoder
) -> None:
    job = make_job(encoder, 31)
    primed = Primed(adapter, encoder, job)
    row = cast(FlowRow, cached(replay, job, primed))
    out = pack_latents(torch.from_numpy(result(replay, row, "kv")))
    assert row.image.unmasked is not None
    index = row.image.unmasked.ids
    assert torch.equal(out[index], primed.row.template.clean[index])


def test_a_one_token_mask_runs(adapter: FluxAdapter, replay: Replay, encoder: Encoder) -> None:
    job = make_job(encoder, 32)
    mask = np.zeros_like(job.edit_mask)
    mask[5, 7] = 255
    job = replace(job, edit_mask=mask)
    row = cast(FlowRow, cached(replay, job, Primed(adapter, encoder, job)))
    assert len(row.latents) == 1
    assert np.isfinite(result(replay, row, "kv")).all()


def test_entries_are_never_written_by_rows(replay: Replay, encoder: Encoder) -> None:
    cached_rows.check_entries_unwritten(replay, encoder, make_job(encoder, 33))


@pytest.mark.parametrize("format", ["int8", "float8", "int4"])
def test_stored_formats_stay_close_to_the_model_dtype(
    adapter: FluxAdapter, replay: Replay, encoder: Encoder, format: str
) -> None:
    job = make_job(encoder, 34)
    mask = np.zeros_like(job.edit_mask)
    mask[:16, :24] = 255
    job, results = replace(job, edit_mask=mask), []
    for name in ("model", format):
        row = cached(replay, job, Primed(adapter, encoder, job, "kv", name))
        results.append(result(replay, row, "kv"))
    spread = results[0].std()
    assert 0 < np.abs(results[0] - results[1]).max() < 0.2 * spread


def test_a_context_is_read_as_it_was_primed(kontext: tuple[Encoder, Replay]) -> None:
    """On the inputs of the priming, cached rows equal dense ones in any mix of kinds. With another
    prompt they do not, even if every token of the picture is computed: the context sees the text.
    """
    encoder, replay = kontext
    kinds = [(kind,) * replay.adapter.blocks for kind in KINDS]
    check_priming_inputs(replay, encoder, 0, [*kinds, KINDS, KINDS[::-1]])
    job = make_job(encoder, 1, num_inference_steps=4, strength=1.0)
    job = replace(job, edit_mask=np.full_like(job.edit_mask, 255))
    row = cast(FlowRow, cached(replay, job, Primed(replay.adapter, encoder, job)))
    gh, gw = row.image.grid
    assert row.image.unmasked is not None
    assert row.image.unmasked.ids.tolist() == list(range(gh * gw, 2 * gh * gw))
    dense = result(replay, replay.adapter.dense_row(job))
    assert np.abs(result(replay, row, "kv") - dense).max() > tolerance(dense)


def test_outside_of_a_mask_a_model_with_context_answers_the_source(
    kontext: tuple[Encoder, Replay],
) -> None:
    encoder, replay = kontext
    job = make_job(encoder, 31)
    primed = Primed(replay.adapter, encoder, job)
    row = cast(FlowRow, cached(replay, job, primed))
    out = pack_latents(torch.from_numpy(result(replay, row, "kv")))
    outside = np.setdiff1d(np.arange(len(out)), row.image.masked.ids.numpy())  # type: ignore[union-attr]
    assert torch.equal(out[outside], primed.row.template.clean[outside])
