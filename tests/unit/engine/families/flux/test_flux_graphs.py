"""Recorded FLUX steps against those that are not, with operations replayed on a CPU."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from maskserve_benchmarks.steps.replay import Replay
from maskserve_common.imaging.masks import active_tokens
from maskserve_engine.base.job import ControlInput, EditJob
from maskserve_engine.batch import forward
from maskserve_engine.batch.graphs import Graphs
from maskserve_engine.batch.packing import Packed
from maskserve_engine.batch.padding import LONE_IMAGE, PaddedRows, Sizes
from maskserve_engine.families.encoder import Encoder
from maskserve_engine.families.flux.adapter import FluxAdapter
from maskserve_engine.families.mmdit import batch as flow_batch
from maskserve_engine.families.mmdit.preparation import grid_of
from maskserve_engine.families.mmdit.rows import EntryTokens
from maskserve_engine.families.registry import load_adapter
from maskserve_engine.families.specs import load_spec, recorded_rows
from maskserve_engine.layers.attention import bucket
from maskserve_engine.layers.low_rank import Factors, LowRankSet
from maskserve_engine.spec.mmdit import RECORDED_ROWS
from tests.fakes.control_nets import random_net
from tests.fakes.jobs import config_of, encode_case, guided, random_case
from tests.support import refresh_rows
from tests.support.cached_rows import Primed, assert_equal, cached
from tests.support.draws import fresh_seed
from tests.support.replayed import (
    HalfReplayed,
    Replayed,
    attend_on_a_cpu,
    finish_behind_a_lost_entry,
    update_kernels_on_a_cpu,
)

pytestmark = pytest.mark.spread("folder")

STEPS = 6
cast_any = partial(cast, Any)


@pytest.fixture(scope="module", params=["fill", "inpaint", "reference"])
def folder(request: pytest.FixtureRequest, tiny_flux: dict[str, Path]) -> Path:
    return tiny_flux[request.param]


@pytest.fixture(autouse=True)
def _padded_steps_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    attend_on_a_cpu(monkeypatch)


def adapter_of(
    folder: Path, capture: Replayed | None, *, buckets: bool = True, rows: int = 1
) -> FluxAdapter:
    """As where steps are recorded, by `capture`."""
    adapter = load_adapter(config_of(folder, cache={"placed_bytes": 0}))
    assert isinstance(adapter, FluxAdapter)
    adapter._preparation._buckets = buckets
    if capture is not None:
        adapter.stepped = replace(adapter.weights, graphs=Graphs(capture, rows))
    return adapter


def job_of(encoder: Encoder, seed: int, side: int = 64, **settings: Any) -> EditJob:
    rng = np.random.default_rng(seed)
    case = random_case(rng, num_inference_steps=STEPS, strength=1.0, **settings)
    mask = np.zeros((side, side), np.uint8)
    top, left = (int(integer) for integer in rng.integers(0, side // 2, 2))
    mask[top : top + int(rng.integers(8, 32)), left : left + int(rng.integers(8, 32))] = 255
    pixels = rng.integers(0, 256, (side, side, 3), dtype=np.uint8)
    return encode_case(encoder, replace(case, pixels=pixels, mask=mask), f"edit-{seed}")


def jobs_of(encoder: Encoder, seed: int, count: int) -> list[EditJob]:
    """Edits of two sizes; the first two are guided where the model has true guidance."""
    rng = np.random.default_rng(seed)
    return [
        job_of(
            encoder,
            seed + i,
            64 if i % 2 else 48,
            **(guided(rng) if i < 2 and encoder.spec.true_cfg else {}),
        )
        for i in range(count)
    ]


def results(
    adapter: FluxAdapter,
    jobs: Sequence[EditJob],
    primed: Sequence[Primed],
    plans: Sequence[Any],
) -> list[Any]:
    """Latents of edits that join one after another, two steps apart; every third one is dense."""
    replay = Replay(adapter)
    rows = [
        adapter.dense_row(job) if number % 3 == 2 else cached(replay, job, template)
        for number, (job, template) in enumerate(zip(jobs, primed, strict=True))
    ]
    for at in range(2 * len(rows) + STEPS):
        live = [row for row in rows[: 1 + at // 2] if row.step < row.steps]
        if live:
            replay.step(live, plans[at % len(plans)])
    return [row.result().array() for row in rows]


def graphs_of(adapter: FluxAdapter) -> Graphs:
    recorder = adapter.stepped.graphs
    assert recorder is not None
    return recorder


@pytest.mark.parametrize("format", ["model", "int8", "int4"])
def test_rows_that_join_and_leave_have_the_latents_that_they_have_without(
    folder: Path, encoder: Encoder, format: str
) -> None:
    """Each step reads another entry, and plans change. In the second round nearly all steps were
    recorded in the first.
    """
    seed = fresh_seed()
    rng = np.random.default_rng(seed)
    jobs = jobs_of(encoder, seed, 5)
    capture = Replayed()
    plain, recording = adapter_of(folder, None), adapter_of(folder, capture)
    primed = [Primed(plain, encoder, job, "both", format) for job in jobs]
    drawn = [rng.choice(["dense", "kv", kind], plain.blocks) for kind in ("kv", "project")]
    for plans in ([("kv",) * plain.blocks], [tuple(kinds) for kinds in drawn]):
        expected = results(plain, jobs, primed, plans)
        for _ in range(2):
            latents = results(recording, jobs, primed, plans)
            for one, other in zip(latents, expected, strict=True):
                assert_equal(one, other)
        assert capture.recorded > 0, seed
    assert graphs_of(recording)._capture is capture, "recording was turned off"


def test_a_lone_rows_products_that_write_in_place_are_recorded_too(
    folder: Path, encoder: Encoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, where keys and values are written where attention reads."""
    where = "maskserve_engine.families.mmdit.weights.in_epilogues"
    monkeypatch.setattr(where, lambda *_, **__: True)
    capture = Replayed()
    plain, recording = adapter_of(folder, None), adapter_of(folder, capture)
    assert all(plain.weights.writes)
    jobs = [job_of(encoder, seed) for seed in (1, 1, 2)]
    for job in jobs:
        primed, kinds = Primed(plain, encoder, job), ("kv",) * plain.blocks
        latents = []
        for adapter in (plain, recording):
            replay = Replay(adapter)
            row = cached(replay, job, primed)
            while row.step < row.steps:
                replay.step([row], kinds)
            latents.append(row.result().array())
        assert_equal(*latents)
    assert capture.recorded > 0
    assert graphs_of(recording)._capture is capture, "recording was turned off"


def test_a_recorded_step_runs_nothing_of_the_model_by_itself(
    folder: Path, encoder: Encoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another mask of the same bucket is stepped by pieces alone."""
    adapter = adapter_of(folder, Replayed())
    jobs = [job_of(encoder, 5), job_of(encoder, 6)]
    for job, (high, wide) in zip(jobs, ((16, 24), (24, 16)), strict=True):
        job.edit_mask[:] = 0
        job.edit_mask[8 : 8 + high, 8 : 8 + wide] = 255
    assert len({adapter.tokens(job).active for job in jobs}) == 1
    walked: list[int] = []
    walk = forward.forward

    def watched(*args: Any, **named: Any) -> Any:
        walked.append(1)
        return walk(*args, **named)

    primed = [Primed(adapter, encoder, job) for job in jobs]
    monkeypatch.setattr(flow_batch, "forward", watched)
    replay = Replay(adapter)
    for job, template in zip(jobs, primed, strict=True):
        row = cached(replay, job, template)
        while row.step < row.steps:
            replay.step([row], ("kv",) * adapter.blocks)
        assert len(walked) == 3  # the first, and the second once more to be recorded


@pytest.mark.parametrize("text", [True, False])
def test_steps_between_a_rows_own_anchors_are_recorded(
    folder: Path, encoder: Encoder, text: bool
) -> None:
    """So are its anchors, which keep what they compute, alone and beside other rows."""
    seed = fresh_seed()
    capture = Replayed()
    plain, recording = adapter_of(folder, None), adapter_of(folder, capture)
    jobs = jobs_of(encoder, seed, 3)
    plans = [
        refresh_rows.plan(0, 3, text=text, format="int8"),
        None,
        refresh_rows.plan(0, text=text),
    ]
    for at in ([0], [2], [0, 1, 2], [0], [0, 1, 2]):
        latents = []
        for adapter in (plain, recording):
            rows = [refresh_rows.row_of(adapter, jobs[i], plans[i]) for i in at]
            refresh_rows.run(adapter, rows, [plans[i] for i in at])
            latents.append([row.result().array() for row in rows])
        for one, other in zip(*latents, strict=True):
            assert_equal(one, other)
    assert capture.recorded > 0, seed
    assert graphs_of(recording)._capture is capture, "recording was turned off"


def lora_of(adapter: FluxAdapter, rng: np.random.Generator, *, rank: int, of: str) -> LowRankSet:
    """A random LoRA on the layers of the blocks whose names contain `of`."""

    def normal(*shape: int) -> torch.Tensor:
        return torch.from_numpy(rng.standard_normal(shape, np.float32) / shape[1] ** 0.5)

    return adapter.low_rank(
        {
            name: Factors(normal(rank, place.shape[1]), normal(place.shape[0], rank))
            for name, place in adapter.places.items()
            if "transformer_blocks" in name and of in name
        }
    )


def test_steps_of_rows_with_loras_replay_whatever_loras_they_have(
    folder: Path, encoder: Encoder
) -> None:
    """LoRAs of equal places and buckets of ranks share a recording, alone and beside rows without;
    rows change their LoRAs between two steps. The oracle adds each row's updates by itself.
    """
    seed = fresh_seed()
    rng, capture = np.random.default_rng(seed), Replayed()
    plain, recording = adapter_of(folder, None), adapter_of(folder, capture, rows=16)
    jobs = jobs_of(encoder, seed, 3)
    primed, kinds = [Primed(plain, encoder, job, "kv") for job in jobs], ("kv",) * plain.blocks
    with update_kernels_on_a_cpu():
        loras = [lora_of(plain, rng, rank=rank, of="") for rank in (18, 5, 30, 4)]
        attention_loras = [lora_of(plain, rng, rank=rank, of="attn") for rank in (7, 12)]

    def run(adapter: FluxAdapter) -> list[Any]:
        replay, latents = Replay(adapter), []
        for known in (loras, [*loras[2:], *loras[:2]], [*attention_loras, *loras[:2]]):
            for at in ([0], [1, 0], [2, 0, 1], [0]):
                rows = [cached(replay, jobs[i], primed[i]) for i in at]
                for step in range(STEPS):
                    if step in (0, 3):  # of the second row the LoRA arrives late
                        for number, row in enumerate(rows):
                            if number != 1 or step:
                                row.adapters = ((known[number], 0.3 + step / 5),) * (number < 2)
                    replay.step(rows, kinds)
                latents += [row.result().array() for row in rows]
        return latents

    expected = run(plain)
    with update_kernels_on_a_cpu():
        latents = run(recording)
    for one, other in zip(latents, expected, strict=True):
        assert_equal(one, other)
    graphs = graphs_of(recording)
    assert graphs._capture is capture, f"recording was turned off ({seed})"
    with_loras = [key for key, step in graphs._steps.items() if step and isinstance(key[-1], tuple)]
    assert 4 <= len(with_loras) <= 12, "LoRAs of the second round replay those of the first"


@pytest.mark.parametrize("folder", ["fill", "inpaint"], indirect=True)  # Kontext takes no nets
@pytest.mark.parametrize("text", [True, False])
def test_residuals_of_controlnets_are_added_between_the_pieces(
    folder: Path, encoder: Encoder, text: bool
) -> None:
    """Rows read templates, refresh and look ahead, alone and beside rows without nets; a net that
    begins late adds nothing before.
    """
    seed = fresh_seed()
    rng, capture = np.random.default_rng(seed), Replayed()
    plain, recording = adapter_of(folder, None), adapter_of(folder, capture, rows=16)
    net = random_net(21, 1, 2)
    jobs = []
    for number, job in enumerate(jobs_of(encoder, seed, 3)):
        picture = rng.integers(0, 256, (*job.edit_mask.shape, 3), dtype=np.uint8)
        moments = encoder.encode(picture, job.edit_mask, "").moments
        control = ControlInput("net", picture, scale=0.8, moments=moments, start=0.3 * number)
        jobs.append(replace(job, controls=(control,) * (number < 2)))
    primed = Primed(plain, encoder, jobs[1], "kv")
    latents = []
    for adapter in (plain, recording):
        nets, results = {"net": adapter.control_net(net)}, []
        for at in ([0], [1, 0], [2, 0, 1], [0], [2, 1]):
            replay, rows = refresh_rows.FirstEdits(adapter), []
            for i in at:
                if i == 1:
                    row: Any = cached(replay, jobs[i], primed)
                else:
                    row = replay.first_edit(jobs[i], refresh_rows.plan(0, 3, text=text))
                adapter.control(row, jobs[i], nets)
                rows.append(row)
            while rows[0].step < STEPS:
                replay.step(rows, ("kv",) * adapter.blocks)
            results += [row.result().array() for row in rows]
        latents.append(results)
    for one, other in zip(*latents, strict=True):
        assert_equal(one, other)
    graphs = graphs_of(recording)
    assert graphs._capture is capture, f"recording was turned off ({seed})"
    assert any(key[-1] == "residuals" for key, step in graphs._steps.items() if step)
    buffers = {buffer.data_ptr() for buffer in graphs._memory.buffers._buffers.values()}
    for recorded in filter(None, graphs._steps.values()):
        for action in map(cast_any, recorded._actions):
            if action.func is forward._add_residuals:
                assert action.args[1].untyped_storage().data_ptr() in buffers


def test_an_entry_that_is_lost_in_the_middle_harms_no_later_step(
    folder: Path, encoder: Encoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter, plain = adapter_of(folder, Replayed()), adapter_of(folder, None)
    job, kinds = job_of(encoder, 9), ("kv",) * plain.blocks
    primed = Primed(plain, encoder, job)
    expected = Replay(plain)
    row = cached(expected, job, primed)
    while row.step < row.steps:
        expected.step([row], kinds)
    lost_entry = finish_behind_a_lost_entry(adapter, job, primed, EntryTokens, monkeypatch)
    assert_equal(lost_entry.result().array(), row.result().array())


def test_one_that_answers_otherwise_turns_them_off(
    folder: Path, encoder: Encoder, caplog: pytest.LogCaptureFixture
) -> None:
    capture, jobs = HalfReplayed(), [job_of(encoder, 3)]
    plain, adapter = adapter_of(folder, None), adapter_of(folder, capture)
    plans, primed = [("kv",) * plain.blocks], [Primed(plain, encoder, job) for job in jobs]
    expected = results(plain, jobs, primed, plans)
    with caplog.at_level(logging.ERROR):
        latents = results(adapter, jobs, primed, plans)
    assert_equal(latents[0], expected[0])
    assert "not recorded as CUDA graphs" in caplog.text
    before = capture.recorded
    assert_equal(results(adapter, jobs, primed, plans)[0], expected[0])
    assert capture.recorded == before


def test_recorded_steps_share_what_is_written_between_their_pieces(
    folder: Path, encoder: Encoder
) -> None:
    """A larger mix has smaller ones recorded again: nobody holds a second buffer."""
    capture = Replayed()
    adapter, plain = adapter_of(folder, capture), adapter_of(folder, None)
    jobs = [job_of(encoder, seed) for seed in (11, 12)]
    primed, kinds = [Primed(plain, encoder, job) for job in jobs], ("kv",) * plain.blocks

    def run(of: FluxAdapter) -> list[Any]:
        replay, latents = Replay(of), []
        for batch in ((0,), (0, 1), (0,), (0, 1), (1,)):
            rows = [cached(replay, jobs[i], primed[i]) for i in batch]
            while rows[0].step < rows[0].steps:
                replay.step(rows, kinds)
            latents += [row.result().array() for row in rows]
        return latents

    for one, other in zip(run(adapter), run(plain), strict=True):
        assert_equal(one, other)
    graphs = graphs_of(adapter)
    buffers = {buffer.data_ptr() for buffer in graphs._memory.buffers._buffers.values()}
    recorded = [step for step in graphs._steps.values() if step is not None]
    assert len(recorded) >= 2
    for step in recorded:
        assert len(step._actions) == plain.blocks
        for action in step._actions:  # of a lone row its entries are placed, of two also read
            outs = cast(Any, action).args[1 if len(cast(Any, action).args) == 2 else 2]
            assert outs[0].untyped_storage().data_ptr() in buffers


@pytest.mark.parametrize("ring", [0, 1, 2])
def test_a_bucket_is_filled_with_the_tokens_next_to_the_mask(
    folder: Path, encoder: Encoder, ring: int
) -> None:
    """The edit is counted as its row computes it."""
    adapter, plain = adapter_of(folder, None), adapter_of(folder, None, buckets=False)
    for seed in range(12):
        job = job_of(encoder, seed, mask_ring=ring)
        ready = adapter.prepare_template(adapter.prepare(job), 7)
        rows, columns = grid_of(job)
        exact, more, all_of_it = (
            set(active_tokens(job.edit_mask, adapter.spec.token_pixels, width).tolist())
            for width in (ring, ring + 1, ring + 64)
        )
        row = adapter.cached_row(ready, 7)
        assert row.image.unmasked is not None
        computed = set(row.image.masked.ids.tolist())
        assert len(computed) == len(row.latents) == bucket(len(exact), rows * columns)
        assert adapter.tokens(job).active == adapter.tokens(ready).active == len(computed)
        assert exact <= computed <= all_of_it
        assert computed <= more or computed > more, "a farther token before a nearer one"
        assert plain.tokens(job).active == len(exact)
        wider = adapter.with_settings(ready, mask_ring=ring + 1)
        assert adapter.tokens(wider).active == bucket(len(more), rows * columns)
        assert row.recorded


def test_a_reproducible_edit_keeps_its_tokens_and_is_not_recorded(
    folder: Path, encoder: Encoder
) -> None:
    capture = Replayed()
    adapter, plain = adapter_of(folder, capture), adapter_of(folder, None, buckets=False)
    job, neighbour = job_of(encoder, 17, reproducible=True), job_of(encoder, 17)
    assert adapter.tokens(job) == plain.tokens(job)
    assert adapter.tokens(neighbour) != plain.tokens(neighbour)
    assert not adapter.cached_row(job, 7).recorded
    primed = [Primed(plain, encoder, edit) for edit in (job, neighbour)]
    replay = Replay(adapter)
    rows = [
        cached(replay, edit, template)
        for edit, template in zip((job, neighbour), primed, strict=True)
    ]
    while rows[0].step < rows[0].steps:
        replay.step(rows, ("kv",) * adapter.blocks)
    assert capture.recorded == 0


def test_where_steps_are_not_recorded_nothing_changes(folder: Path, encoder: Encoder) -> None:
    """On a CPU, setting or not."""
    adapter = load_adapter(config_of(folder, engine={"cuda_graphs": True}))
    plain = load_adapter(config_of(folder))
    assert isinstance(adapter, FluxAdapter)
    assert adapter.weights.graphs is None
    job = job_of(encoder, 18)
    assert adapter.tokens(job) == plain.tokens(job)
    assert Graphs.on(torch.device("cpu"), torch.float32) is None


def test_recorded_steps_are_of_workers_with_one_device_that_keep_nothing_placed(
    tiny_fill: Path,
) -> None:
    spec = load_spec(tiny_fill)

    def rows(**sections: dict[str, Any]) -> int:
        return recorded_rows(spec, config_of(tiny_fill, **sections))

    assert rows() == rows(cache={"placed_bytes": 0}) == RECORDED_ROWS
    assert rows(cache={"placed_bytes": 7}) == rows(engine={"devices": 2}) == 0
    off: dict[str, Any] = {"cuda_graphs": False}
    assert rows(engine=off) == 0


def test_steps_of_more_tokens_than_a_dense_row_has_are_not_recorded(
    folder: Path, encoder: Encoder
) -> None:
    """They keep a device busy, and would hold as much memory as they take."""
    capture = Replayed()
    adapter, plain = adapter_of(folder, capture), adapter_of(folder, None)
    jobs = [job_of(encoder, seed) for seed in (1, 2)]
    for _ in range(3):
        rows = [adapter.dense_row(job) for job in jobs]
        refresh_rows.run(adapter, rows, [None, None])
    assert capture.recorded == 0
    for job, row in zip(jobs, rows, strict=True):
        assert_equal(row.result().array(), refresh_rows.result(plain, job, None))


def churned(adapter: FluxAdapter, plain: FluxAdapter, encoder: Encoder, seed: int) -> list[Any]:
    """Rows of drawn edits after they have joined and left at drawn steps: first edits, edits that
    read templates (primed by `plain`), and dense ones.
    """
    rng, replay = np.random.default_rng(seed), refresh_rows.FirstEdits(adapter)
    waiting: list[tuple[int, Any]] = []
    for number in range(6):
        job, kind = job_of(encoder, seed + number), rng.choice(["first", "first", "hit", "dense"])
        if kind == "first":
            later = sorted(map(int, rng.choice(np.arange(2, STEPS), 2, replace=False)))
            row = replay.first_edit(job, refresh_rows.plan(0, *later))
        elif kind == "hit":
            row = cached(replay, job, Primed(plain, encoder, job, "kv"))
        else:
            row = adapter.dense_row(job)
        waiting.append((int(rng.integers(0, STEPS)), row))
    for at in range(2 * STEPS):
        live = [row for begin, row in waiting if begin <= at and row.step < row.steps]
        if live:
            replay.step(live, ("kv",) * adapter.blocks)
    return [row for _, row in waiting]


def cached_tensors(row: Any) -> list[Any]:
    """All tensors of a row's step cache."""
    cache = row.step_cache
    if cache is None:
        return []
    parts = [cache._refreshed.get(part) for part in sorted(cache._refreshed._contents)]
    return [tensor for part in parts for coded in part.tensors() for tensor in coded.tensors()]


def test_steps_of_drawn_batches_are_replayed_padded(folder: Path, encoder: Encoder) -> None:
    """Few sizes serve all batches; refresh steps are among them."""
    seed, capture = fresh_seed(), Replayed()
    plain, recording = adapter_of(folder, None), adapter_of(folder, capture, rows=16)
    for round in range(2):
        rows = [churned(adapter, plain, encoder, seed + round) for adapter in (recording, plain)]
        for one, other in zip(*rows, strict=True):
            assert_equal(one.result().array(), other.result().array())
            for recorded, expected in zip(cached_tensors(one), cached_tensors(other), strict=True):
                assert recorded.shape == expected.shape
                assert recorded.dtype == expected.dtype
    sizes = [name for name in graphs_of(recording)._steps if isinstance(name, Sizes)]
    assert {name.image % LONE_IMAGE for name in sizes} == {0}
    assert len(sizes) < 24, "few serve all batches"
    assert capture.recorded > 0, seed
    assert graphs_of(recording)._capture is capture, "recording was turned off"


def test_pads_change_no_byte(
    folder: Path, encoder: Encoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Latents and step caches are the same whatever the pads hold, and finite."""
    seed, take = fresh_seed(), PaddedRows.take

    def poisoned(self: PaddedRows, other: Packed) -> None:
        for name in ("tokens", "text", "cis"):
            pads = getattr(self, name)[len(getattr(other, name)) :]
            pads.fill_(torch.nan)
        take(self, other)

    rows = []
    for patched in (False, True):
        if patched:
            monkeypatch.setattr(PaddedRows, "take", poisoned)
        adapter = adapter_of(folder, Replayed(), rows=16)
        rows.append(churned(adapter, adapter_of(folder, None), encoder, seed))
    for one, other in zip(*rows, strict=True):
        assert np.isfinite(other.result().array()).all()
        np.testing.assert_array_equal(one.result().array(), other.result().array())
        for tensor, expected in zip(cached_tensors(one), cached_tensors(other), strict=True):
            assert torch.equal(tensor, expected)


def test_a_recorded_t5_gives_the_states_that_it_gives_without(encoder: Encoder) -> None:
    """One graph for each number of prompts, up to two; the second call of as many replays it."""
    capture = Replayed()
    plain = cast(Any, encoder).t5
    recorded = replace(plain, graphs=Graphs(capture))
    several = ["one", "two", "three"]
    for prompts in (["a cat"], ["a dog", ""], ["the sea"], ["a hat", "red"], several, several):
        with torch.inference_mode():
            states = [text.states(prompts) for text in (plain, recorded)]
        assert torch.equal(*states)
    assert capture.recorded == 2
    assert plain.recorded().graphs is None  # on a CPU
