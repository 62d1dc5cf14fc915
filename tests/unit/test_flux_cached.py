"""Cached rows against dense ones where the two must agree (design §4, §8)."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from maskserve_core.config import Config
from maskserve_engine.families.flux.adapter import FluxAdapter
from maskserve_engine.families.flux.forward import Packed, forward
from maskserve_engine.families.flux.rows import FluxRow, PrimingRow
from maskserve_engine.families.flux.schedule import Schedule, Walk
from maskserve_engine.families.flux.vectors import embed, vectors
from maskserve_engine.families.registry import Encoder, load_adapter, load_encoder
from maskserve_engine.job import EditJob
from maskserve_harness.benchmarks.replay import Replay, in_memory
from tests.fakes.jobs import config_of, encode_case, guided, random_case, tolerance

NOISE_SEED = 1234


@pytest.fixture(scope="module", params=["fill", "inpaint"])
def config(request: pytest.FixtureRequest, tiny_fill: Path, tiny_inpaint: Path) -> Config:
    return config_of(tiny_fill if request.param == "fill" else tiny_inpaint)


@pytest.fixture(scope="module")
def encoder(config: Config) -> Encoder:
    return load_encoder(config)


@pytest.fixture(scope="module")
def adapter(config: Config) -> FluxAdapter:
    adapter = load_adapter(config)
    assert isinstance(adapter, FluxAdapter)
    return adapter


def make_job(encoder: Encoder, seed: int, **settings: Any) -> EditJob:
    rng = np.random.default_rng(seed)
    if encoder.facts.true_cfg and seed % 2:
        settings = {**guided(rng), **settings}
    case = random_case(rng, **settings)
    return encode_case(encoder, case, f"edit-{seed}")


def prime(
    adapter: FluxAdapter, encoder: Encoder, job: EditJob, kind: str = "both", format: str = "model"
) -> PrimingRow:
    anchors = adapter.anchors(tokens(job), 4, 1)
    kept = (frozenset({"h", "kv"} if kind == "both" else {kind}),) * adapter.blocks
    row = adapter.priming_row(job, anchors, encoder.encode_prompt(""), NOISE_SEED, kept, format)
    while row.step < row.steps:
        adapter.step([row], None)
    return row


def tokens(job: EditJob) -> int:
    return job.moments.shape[1] * job.moments.shape[2] // 4


def cached(replay: Replay, job: EditJob, primed: PrimingRow) -> FluxRow:
    """A cached row that reads, at each step, the entry nearest in sigma."""
    entries = [
        min(primed.done, key=lambda entry: abs(entry.anchor.sigma - sigma))
        for sigma, _ in replay.adapter.sigmas(job)
    ]
    row = replay.cached_row(job, entries, NOISE_SEED)
    assert isinstance(row, FluxRow)
    return row


@pytest.fixture
def replay(adapter: FluxAdapter) -> Replay:
    return Replay(adapter)


def run(replay: Replay, rows: list[FluxRow], kinds: tuple[str, ...]) -> None:
    while live := [row for row in rows if row.step < row.steps]:
        replay.step(live, kinds)


@pytest.mark.parametrize("kind", ["dense", "project", "kv"])
def test_with_all_tokens_active_cached_equals_dense(
    adapter: FluxAdapter, replay: Replay, encoder: Encoder, kind: str
) -> None:
    job = make_job(encoder, 1)
    job = replace(job, edit_mask=np.full_like(job.edit_mask, 255))
    row, dense = cached(replay, job, prime(adapter, encoder, job)), adapter.dense_row(job)
    run(replay, [row], (kind,) * adapter.blocks)
    run(replay, [dense], ())
    expected = dense.result()
    assert np.abs(row.result() - expected).max() <= tolerance(expected)


@pytest.mark.parametrize("kind", ["dense", "project", "kv"])
def test_with_a_ring_over_the_whole_picture_cached_equals_dense(
    adapter: FluxAdapter, replay: Replay, encoder: Encoder, kind: str
) -> None:
    """The ring's tokens take the inputs of the dense row, whose mask is the small one."""
    job = make_job(encoder, 2, mask_ring=64)
    job = replace(job, edit_mask=np.zeros_like(job.edit_mask))
    job.edit_mask[-3:, :5] = 255
    row, dense = cached(replay, job, prime(adapter, encoder, job)), adapter.dense_row(job)
    run(replay, [row], (kind,) * adapter.blocks)
    run(replay, [dense], ())
    expected = dense.result()
    assert np.abs(row.result() - expected).max() <= tolerance(expected)


def as_primed(replay: Replay, job: EditJob, primed: PrimingRow, anchor: int) -> FluxRow:
    """A cached row whose every model input is that of the priming forward at an anchor."""
    row = cached(replay, job, primed)
    assert row.inactive is not None
    entry, active = primed.done[anchor], row.inactive.active
    inputs = primed.template.at(torch.tensor(entry.anchor.sigma))
    latents = inputs.shape[1] if row.condition is None else row.latents.shape[1]
    row.latents = inputs[active, :latents]
    row.condition = None if row.condition is None else inputs[active, latents:]
    row.text, row.pooled, row.guidance = primed.text, primed.pooled, primed.guidance
    sigma, timestep = entry.anchor.sigma, entry.anchor.timestep
    row.schedule = Schedule(torch.tensor([sigma, 0.0]), (Walk(timestep, sigma, -sigma),))
    row.entry, row.step = in_memory(entry, row.inactive.selection), 0
    return row


def outputs_of(
    adapter: FluxAdapter, rows: Sequence[FluxRow | PrimingRow], kinds: Sequence[str]
) -> list[torch.Tensor]:
    """What the model answers for each row, which takes no step."""
    packed = Packed([row.model_input() for row in rows])
    timesteps = torch.tensor([row.walk[0].timestep for row in rows])
    emb = embed(adapter.weights, timesteps[None], packed.pooled, packed.guidance)
    [step] = vectors(adapter.weights, emb)
    output = forward(adapter.weights, packed, step, kinds)
    return [output[begin:end] for begin, end in packed.ways.narrow.image_stream.spans]


@pytest.mark.parametrize("seed", range(3))
def test_on_the_priming_inputs_any_mix_of_kinds_equals_dense(
    adapter: FluxAdapter, replay: Replay, encoder: Encoder, seed: int
) -> None:
    """Entries in model dtype hold exactly what the inactive tokens would have been."""
    jobs = [make_job(encoder, 10 * seed + i) for i in range(3)]
    primed = [prime(adapter, encoder, job) for job in jobs]
    anchor = seed % len(primed[0].done)
    mixes = list(itertools.product(("dense", "project", "kv"), repeat=adapter.blocks))
    with torch.inference_mode():
        for kinds in mixes:
            rows = [as_primed(replay, job, p, anchor) for job, p in zip(jobs, primed, strict=True)]
            outputs = outputs_of(adapter, rows, kinds)
            for row, p, output in zip(rows, primed, outputs, strict=True):
                p.step = anchor
                assert row.inactive is not None
                expected = outputs_of(adapter, [p], ())[0][row.inactive.active]
                difference = (output - expected).abs().max() if len(output) else 0.0
                assert difference <= tolerance(expected.numpy()), kinds


@pytest.mark.parametrize("kind", ["dense", "project", "kv"])
def test_a_mixed_batch_equals_each_row_alone(
    adapter: FluxAdapter, replay: Replay, encoder: Encoder, kind: str
) -> None:
    kinds = (kind,) * adapter.blocks
    jobs = [make_job(encoder, seed) for seed in range(20, 26)]
    primed = [prime(adapter, encoder, job) for job in jobs]

    def rows() -> list[FluxRow]:
        return [
            adapter.dense_row(job) if number % 3 == 0 else cached(replay, job, p)
            for number, (job, p) in enumerate(zip(jobs, primed, strict=True))
        ]

    alone = rows()
    for row in alone:
        run(replay, [row], kinds)
    together = rows()
    run(replay, together[:2], kinds)  # leave before the others join
    rest = together[2:]
    replay.step(rest[:2], kinds)
    rest.pop(1)  # cancelled mid-flight
    run(replay, rest, kinds)
    for one, other in zip(alone, together, strict=True):
        if other.step == other.steps:
            expected = one.result()
            assert np.abs(other.result() - expected).max() <= tolerance(expected)


def test_a_step_without_an_anchor_computes_the_pinned_tokens(
    adapter: FluxAdapter, replay: Replay, encoder: Encoder
) -> None:
    """It equals the all-dense plan: both compute inactive tokens from the template's inputs."""
    job = make_job(encoder, 30)
    primed = prime(adapter, encoder, job)
    with_plan, without = cached(replay, job, primed), cached(replay, job, primed)
    replay.reads(without, [None] * without.steps)
    run(replay, [with_plan], ("dense",) * adapter.blocks)
    run(replay, [without], ("kv",) * adapter.blocks)
    expected = with_plan.result()
    assert np.abs(without.result() - expected).max() <= tolerance(expected)


def test_inactive_tokens_come_back_as_the_template(
    adapter: FluxAdapter, replay: Replay, encoder: Encoder
) -> None:
    job = make_job(encoder, 31)
    primed = prime(adapter, encoder, job)
    row = cached(replay, job, primed)
    run(replay, [row], ("kv",) * adapter.blocks)
    assert row.inactive is not None
    from maskserve_engine.families.flux.latents import pack_latents

    out = pack_latents(torch.from_numpy(row.result()))
    assert torch.equal(out[row.inactive.index], primed.template.clean[row.inactive.index])


def test_a_one_token_mask_runs(adapter: FluxAdapter, replay: Replay, encoder: Encoder) -> None:
    job = make_job(encoder, 32)
    mask = np.zeros_like(job.edit_mask)
    mask[5, 7] = 255
    job = replace(job, edit_mask=mask)
    row = cached(replay, job, prime(adapter, encoder, job))
    assert len(row.latents) == 1
    run(replay, [row], ("kv",) * adapter.blocks)
    assert np.isfinite(row.result()).all()


def test_entries_are_never_written_by_rows(
    adapter: FluxAdapter, replay: Replay, encoder: Encoder
) -> None:
    job = make_job(encoder, 33)
    primed = prime(adapter, encoder, job)
    before = [
        c.data.clone()
        for entry in primed.done
        for block in entry.blocks
        for c in (block.hidden, block.keys, block.values)
        if c is not None
    ]
    for kind in ("kv", "project", "dense"):
        run(replay, [cached(replay, job, primed)], (kind,) * adapter.blocks)
    after = [
        c.data
        for entry in primed.done
        for block in entry.blocks
        for c in (block.hidden, block.keys, block.values)
        if c is not None
    ]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("format", ["int8", "float8", "int4"])
def test_stored_formats_stay_close_to_the_model_dtype(
    adapter: FluxAdapter, replay: Replay, encoder: Encoder, format: str
) -> None:
    job = make_job(encoder, 34)
    mask = np.zeros_like(job.edit_mask)
    mask[:16, :24] = 255
    job, results = replace(job, edit_mask=mask), []
    for each in ("model", format):
        row = cached(replay, job, prime(adapter, encoder, job, "kv", each))
        run(replay, [row], ("kv",) * adapter.blocks)
        results.append(row.result())
    spread = results[0].std()
    assert 0 < np.abs(results[0] - results[1]).max() < 0.2 * spread
