"""Recorded UNet steps against those that are not, with operations replayed on a CPU."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from maskserve_benchmarks.steps.replay import Replay
from maskserve_engine.base.job import ControlInput, EditJob
from maskserve_engine.batch.graphs import Graphs
from maskserve_engine.families.encoder import Encoder
from maskserve_engine.families.registry import load_adapter, load_encoder
from maskserve_engine.families.unet import graphs
from maskserve_engine.families.unet.adapter import UnetAdapter
from maskserve_engine.families.unet.rows import TemplateTokens
from maskserve_engine.layers.attention import bucket
from maskserve_engine.layers.low_rank import Factors, LowRankSet
from tests.fakes.control_nets import random_unet_net
from tests.fakes.jobs import config_of, encode_case, unet_case
from tests.support.cached_rows import Primed, assert_equal, cached
from tests.support.draws import fresh_seed
from tests.support.examples import WHOLE
from tests.support.refresh_rows import plan, row_of, run
from tests.support.replayed import (
    HalfReplayed,
    Replayed,
    attend_on_a_cpu,
    finish_behind_a_lost_entry,
    update_kernels_on_a_cpu,
)

pytestmark = pytest.mark.spread("folder")

SIDE = 96
ROWS = 5 if WHOLE else 3
TOKEN = 16
"""Pixels between two places at which a mask touches tokens of each level alike."""


@pytest.fixture(scope="module", params=["sdxl-base", "sd-fill"])
def folder(request: pytest.FixtureRequest, tiny_unets: dict[str, Path]) -> Path:
    return tiny_unets[request.param]


@pytest.fixture(autouse=True)
def _padded_steps_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    attend_on_a_cpu(monkeypatch)


@pytest.fixture(scope="module")
def encoder(folder: Path) -> Encoder:
    return load_encoder(config_of(folder))


def adapter_of(
    folder: Path, capture: Replayed | None, halo: int = 0, *, buckets: bool = True
) -> UnetAdapter:
    adapter = load_adapter(config_of(folder, cache={"conv_halo": halo}))
    assert isinstance(adapter, UnetAdapter)
    adapter._preparation._buckets = buckets  # tiles as where steps are recorded
    if capture is not None:
        adapter.weights = adapter.stepped = replace(adapter.weights, graphs=Graphs(capture))
    return adapter


def job_of(encoder: Encoder, seed: int, at: int = 0, **settings: Any) -> EditJob:
    """An edit; `at` moves its mask and changes its pixels."""
    rng = np.random.default_rng(seed)
    case = unet_case(rng, num_inference_steps=6, strength=1.0, **settings)
    mask = np.zeros((SIDE, SIDE), np.uint8)
    top, left = (int(integer) for integer in rng.integers(0, SIDE // 2, 2))
    mask[top : top + int(rng.integers(8, 48)), left : left + int(rng.integers(8, 48))] = 255
    pixels = rng.integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)
    if at:
        mask = np.roll(mask, (-TOKEN * (top // TOKEN), -TOKEN * (left // TOKEN)), (0, 1))
        mask = np.roll(mask, at * TOKEN, (0, 1))
        pixels = np.roll(pixels, at, 0)
    return encode_case(encoder, replace(case, pixels=pixels, mask=mask), f"edit-{seed}-{at}")


def primed(adapter: UnetAdapter, encoder: Encoder, jobs: Sequence[EditJob]) -> list[Primed | None]:
    """The template of each job; every third row is dense."""
    return [
        None if number % 3 == 2 else Primed(adapter, encoder, job)
        for number, job in enumerate(jobs)
    ]


def results(
    adapter: UnetAdapter,
    jobs: Sequence[EditJob],
    templates: Sequence[Primed | None],
    plans: Sequence[Any],
) -> list[Any]:
    """Latents of edits that join one after another, two steps apart."""
    replay = Replay(adapter)
    rows = [
        adapter.dense_row(job) if template is None else cached(replay, job, template)
        for job, template in zip(jobs, templates, strict=True)
    ]
    for at in range(2 * len(rows) + 6):
        live = [row for row in rows[: 1 + at // 2] if row.step < row.steps]
        if live:
            replay.step(live, plans[at % len(plans)])
    return [row.result().array() for row in rows]


@pytest.mark.parametrize(
    ("folder", "halo", "buckets"),
    [
        ("sdxl-base", 1, True),
        pytest.param("sd-fill", 2, False, marks=pytest.mark.slow),
        pytest.param("sdxl-base", 2, False, marks=pytest.mark.slow),
        pytest.param("sd-fill", 1, True, marks=pytest.mark.slow),
    ],
    indirect=["folder"],
)
def test_tiles_that_join_and_leave_have_the_latents_that_they_have_without(
    folder: Path, encoder: Encoder, halo: int, buckets: bool
) -> None:
    """Beside rows without tiles; in the second round nearly all steps were recorded in the first.
    Tiles of equal shapes lie elsewhere and read other entries.
    """
    seed = fresh_seed()
    guided = {"guidance_scale": 7.5, "negative_prompt": "blue"}
    jobs = [
        job_of(encoder, seed + i // 2 * 2, at=i, **(guided if i < 2 else {})) for i in range(ROWS)
    ]
    capture = Replayed()
    plain = adapter_of(folder, None, halo, buckets=buckets)
    recording = adapter_of(folder, capture, halo, buckets=buckets)
    plans = [("kv",) * plain.blocks]
    templates = primed(plain, encoder, jobs)
    expected = results(plain, jobs, templates, plans)
    recorded = []
    for _ in range(2):
        for result, latents in zip(
            results(recording, jobs, templates, plans), expected, strict=True
        ):
            assert_equal(result, latents)
        recorded.append(capture.recorded)
    assert recorded[0] > 0, seed
    recorder = recording.stepped.graphs
    assert isinstance(recorder, Graphs)
    assert recorder._capture is capture, "recording was turned off"


@pytest.mark.parametrize("folder", ["sdxl-base"], indirect=True)
def test_a_row_with_a_tile_replays_the_same_step_beside_any_others(
    folder: Path, encoder: Encoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit as alone; a mix of tiles that comes first walks through nothing."""
    seed, walked = fresh_seed(), list[int]()
    guided = {"guidance_scale": 7.5, "negative_prompt": "blue"}
    capture = Replayed()
    adapter = adapter_of(folder, capture, 1)
    kinds = ("kv",) * adapter.blocks
    jobs = [job_of(encoder, seed + i, **guided) for i in range(3)]
    assert [(row.alone, row.together) for row in map(adapter.totals, jobs)] == [(1, False)] * 3
    templates, replay = [Primed(adapter, encoder, job) for job in jobs], Replay(adapter)
    walk = graphs.forward

    def watched(*args: Any, **named: Any) -> Any:
        walked.append(1)
        return walk(*args, **named)

    def latents(*batches: Sequence[int]) -> list[Any]:
        rows = [cached(replay, job, of) for job, of in zip(jobs, templates, strict=True)]
        for batch in batches:
            replay.step([rows[i] for i in batch], kinds)
        return [row.result().array() for row in rows]

    alone = latents([0], [0], [1], [1], [2], [2])
    recorded = capture.recorded
    monkeypatch.setattr(graphs, "forward", watched)
    for batches in (([0, 1, 2], [2, 0, 1]), ([1, 2], [0, 1], [0, 2])):
        for one, other in zip(latents(*batches), alone, strict=True):
            np.testing.assert_array_equal(one, other, str(seed))
    assert (len(walked), capture.recorded) == (0, recorded), seed


@pytest.mark.parametrize("folder", ["sd-fill"], indirect=True)
def test_refresh_steps_and_those_between_are_recorded(folder: Path, encoder: Encoder) -> None:
    """Beside a dense row, and lookaheads. What lies round the tile is another at each step."""
    seed = fresh_seed()
    guided = {"guidance_scale": 7.5, "negative_prompt": "blue"}
    jobs = [job_of(encoder, seed, at=at, **guided) for at in range(3)]
    plans = [plan(0, 2), None, plan(0, 3)]
    capture, latents = Replayed(), []
    for adapter in (adapter_of(folder, None), adapter_of(folder, capture)):
        for _ in range(2):
            rows = [
                row_of(adapter, job, schedule) for job, schedule in zip(jobs, plans, strict=True)
            ]
            run(adapter, rows, plans)
        latents.append([row.result().array() for row in rows])
    for plain, recorded in zip(*latents, strict=True):
        assert_equal(recorded, plain)
    assert capture.recorded > 0, seed
    assert recorded_keys(adapter, capture, lambda parts, residuals: "map" in parts)


@pytest.mark.parametrize("folder", ["sd-fill"], indirect=True)
def test_residuals_of_controlnets_are_added_between_the_pieces(
    folder: Path, encoder: Encoder
) -> None:
    """Also to rows with tiles of equal shapes, at refresh steps and by lookaheads."""
    seed = fresh_seed()
    rng, guided = np.random.default_rng(seed), {"guidance_scale": 7.5}
    plans, jobs = [plan(0, 3), None, plan(0, 2)], []
    for at in range(3):
        job = job_of(encoder, seed, at=at, **(guided if at < 2 else {}))
        picture = rng.integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)
        jobs.append(replace(job, controls=(ControlInput("net", picture, 0.8, 0.3 * (at > 1)),)))
    capture, latents = Replayed(), []
    for adapter in (adapter_of(folder, None), adapter_of(folder, capture)):
        nets, results = {"net": adapter.control_net(random_unet_net(adapter.model, 1))}, []
        for at in ([0], [0, 1, 2], [2, 0], [0, 1, 2]):
            rows = [row_of(adapter, jobs[i], plans[i]) for i in at]
            for i, row in zip(at, rows, strict=True):
                adapter.control(row, jobs[i], nets)
            run(adapter, rows, [plans[i] for i in at])
            results += [row.result().array() for row in rows]
        latents.append(results)
    for plain, recorded in zip(*latents, strict=True):
        assert_equal(recorded, plain)
    assert recorded_keys(adapter, capture, lambda parts, residuals: residuals and not parts)
    assert recorded_keys(adapter, capture, lambda parts, residuals: residuals and "map" in parts)


def lora_of(adapter: UnetAdapter, rng: np.random.Generator, rank: int) -> LowRankSet:
    """A random LoRA on layers of each sort."""

    def normal(*shape: int) -> torch.Tensor:
        values = rng.standard_normal(shape, np.float32)
        return torch.from_numpy(values / np.prod(shape[1:]) ** 0.5)

    return adapter.low_rank(
        {
            name: Factors(
                normal(rank, *place.shape[1:]),
                normal(place.shape[0], rank, *[1 for _ in place.shape[2:]]),
            )
            for name, place in adapter.places.items()
            if name.startswith(("conv", "time_embedding", "mid_block"))
        }
    )


def test_steps_of_rows_with_loras_replay_whatever_loras_they_have(
    folder: Path, encoder: Encoder
) -> None:
    """Alone, and padded together with a row without. The oracle adds each pass's updates by
    itself.
    """
    seed = fresh_seed()
    rng, capture = np.random.default_rng(seed), Replayed()
    plain, recording = adapter_of(folder, None), adapter_of(folder, capture)
    guided = {"guidance_scale": 7.5, "negative_prompt": "blue"}
    jobs = [job_of(encoder, seed + i, **(guided if i < 1 else {})) for i in range(3)]
    templates, kinds = [Primed(plain, encoder, job) for job in jobs], ("kv",) * plain.blocks
    with update_kernels_on_a_cpu():
        loras = [lora_of(plain, rng, rank) for rank in (3, 17, 20, 5)]

    def results(adapter: UnetAdapter) -> list[Any]:
        latents = []
        for known in (loras[:2], loras[2:]):
            for at in ([0], [2, 0]):
                replay = Replay(adapter)
                rows: list[Any] = [cached(replay, jobs[i], templates[i]) for i in at]
                rows[0].adapters = ((known[len(at) - 1], 0.4),)
                for _ in range(2):
                    replay.step(rows, kinds)
                latents += [row.result().array() for row in rows]
        return latents

    expected = results(plain)
    with update_kernels_on_a_cpu():
        latents = results(recording)
    for one, other in zip(latents, expected, strict=True):
        assert_equal(one, other)
    keys = recorded_keys(recording, capture, lambda parts, residuals: True)
    assert all(key[-1] is not None for key in keys)
    assert len(keys) == 2, "LoRAs of the second round replay those of the first"


def recorded_keys(
    adapter: UnetAdapter, capture: Replayed, chosen: Callable[[frozenset[str], bool], object]
) -> list[Any]:
    """Keys of recorded steps, `chosen` by the parts that captures receive and by residuals."""
    recorder = adapter.stepped.graphs
    assert isinstance(recorder, Graphs)
    assert recorder._capture is capture, "recording was turned off"
    keys: list[Any] = [key for key, step in recorder._steps.items() if step is not None]
    return [key for key in keys if chosen(*key[0][1:])]


def test_a_tile_elsewhere_is_stepped_by_the_pieces_of_another(
    folder: Path, encoder: Encoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shapes are equal and the entry is another. A step without the walk gives what the walk
    gives.
    """
    adapter, plain = adapter_of(folder, Replayed(), 1), adapter_of(folder, None, 1)
    jobs = [job_of(encoder, 4, at=at) for at in (0, 2)]
    kinds = ("kv",) * plain.blocks
    replay, expected = Replay(adapter), Replay(plain)
    walked: list[int] = []
    walk = graphs.forward

    def watched(*args: Any, **named: Any) -> Any:
        walked.append(1)
        return walk(*args, **named)

    monkeypatch.setattr(graphs, "forward", watched)
    tiles = []
    for number, job in enumerate(jobs):
        template = Primed(plain, encoder, job)
        row, other = cached(replay, job, template), cached(expected, job, template)
        assert row.inactive is not None
        assert row.inactive.tile is not None
        tiles.append(row.inactive.tile[0].box)
        while row.step < row.steps:
            replay.step([row], kinds)
            expected.step([other], kinds)
        assert_equal(row.result().array(), other.result().array())
        assert len(walked) == 2, number  # the first step, and once more to be recorded
    assert tiles[0].shape == tiles[1].shape
    assert tiles[0] != tiles[1]


@pytest.mark.parametrize("folder", ["sdxl-base"], indirect=True)
def test_a_recorded_step_serves_any_number_of_tokens_at_the_finest_level(
    folder: Path, encoder: Encoder
) -> None:
    """That level has no attention, so its number is none of the step's shapes."""
    capture = Replayed()
    adapter, plain = adapter_of(folder, capture, 1), adapter_of(folder, None, 1)
    assert adapter.weights.attends[:2] == (False, True)
    kinds = ("kv",) * plain.blocks
    replay, expected = Replay(adapter), Replay(plain)
    latent = np.ones((4, 4), np.uint8)
    places = [0, 2, 4, 7]  # one in each token of the next level, up to the same edges
    few, all_of_them = np.zeros((24, 24), np.uint8), np.zeros((24, 24), np.uint8)
    few[np.ix_(places, places)] = 255
    all_of_them[:8, :8] = 255
    recorded = []
    for mask in (few, all_of_them, few):
        job = replace(job_of(encoder, 4), edit_mask=np.kron(mask, latent))
        template = Primed(plain, encoder, job)
        row, other = cached(replay, job, template), cached(expected, job, template)
        while row.step < row.steps:
            replay.step([row], kinds)
            expected.step([other], kinds)
        assert_equal(row.result().array(), other.result().array())
        recorded.append(capture.recorded)
    assert recorded[0] == recorded[-1] > 0


@pytest.mark.parametrize(
    ("folder", "mixed"),
    [
        ("sdxl-base", True),
        pytest.param("sd-fill", False, marks=pytest.mark.slow),
        pytest.param("sdxl-base", False, marks=pytest.mark.slow),
        pytest.param("sd-fill", True, marks=pytest.mark.slow),
    ],
    indirect=["folder"],
)
def test_rows_that_join_and_leave_have_the_latents_that_they_have_without(
    folder: Path, encoder: Encoder, mixed: bool
) -> None:
    seed = fresh_seed()
    rng = np.random.default_rng(seed)
    guided = {"guidance_scale": 7.5, "negative_prompt": "blue"}
    jobs = [job_of(encoder, seed + i, **(guided if i < 2 else {})) for i in range(ROWS)]
    capture = Replayed()
    plain, recording = adapter_of(folder, None), adapter_of(folder, capture)
    plans: list[Any] = [("kv",) * plain.blocks]
    if mixed:  # of dense blocks and others; projected ones are not recorded
        drawn = [rng.choice(["dense", "kv", kind], plain.blocks) for kind in ("kv", "project")]
        plans = [tuple(kinds) for kinds in drawn] + plans
    templates = primed(plain, encoder, jobs)
    expected = results(plain, jobs, templates, plans)
    for _ in range(2):  # in the second round nearly all steps were recorded in the first
        for result, latents in zip(
            results(recording, jobs, templates, plans), expected, strict=True
        ):
            assert_equal(result, latents)
    assert capture.recorded > 0, seed
    recorder = recording.stepped.graphs
    assert isinstance(recorder, Graphs)
    assert recorder._capture is capture, "recording was turned off"


def test_a_recorded_step_runs_nothing_of_the_walk(
    folder: Path, encoder: Encoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another edit of the same buckets is stepped by pieces alone."""
    adapter = adapter_of(folder, Replayed())
    walked: list[int] = []
    walk = graphs.forward

    def watched(*args: Any, **named: Any) -> Any:
        walked.append(1)
        return walk(*args, **named)

    monkeypatch.setattr(graphs, "forward", watched)
    replay, jobs = Replay(adapter), [job_of(encoder, 5), job_of(encoder, 5)]
    for job in jobs:
        row = cached(replay, job, Primed(adapter, encoder, job))
        while row.step < row.steps:
            replay.step([row], ("kv",) * adapter.blocks)
        assert len(walked) == 3  # the first, and the second once more to be recorded


def test_rows_that_are_padded_together_share_a_recording_in_any_order(
    folder: Path, encoder: Encoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each row has another number of tokens; the sum is the same."""
    seed, walked = fresh_seed(), list[int]()
    walk = graphs.forward

    def watched(*args: Any, **named: Any) -> Any:
        walked.append(1)
        return walk(*args, **named)

    monkeypatch.setattr(graphs, "forward", watched)
    adapter, plain = adapter_of(folder, Replayed()), adapter_of(folder, None)
    jobs, kinds = [job_of(encoder, seed + i) for i in range(2)], ("kv",) * plain.blocks
    templates = [Primed(plain, encoder, job) for job in jobs]
    replay, expected = Replay(adapter), Replay(plain)
    for order in ((0, 1), (1, 0)):
        rows, plain_rows = (
            [cached(which, jobs[i], templates[i]) for i in order] for which in (replay, expected)
        )
        while rows[0].step < rows[0].steps:
            replay.step(rows, kinds)
            expected.step(plain_rows, kinds)
        for row, other in zip(rows, plain_rows, strict=True):
            assert_equal(row.result().array(), other.result().array())
        assert len(walked) == 2, seed  # the first step, and once more to be recorded


def test_an_entry_that_is_lost_in_the_middle_harms_no_later_step(
    folder: Path, encoder: Encoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter, plain = adapter_of(folder, Replayed()), adapter_of(folder, None)
    job, kinds = job_of(encoder, 9), ("kv",) * plain.blocks
    template = Primed(plain, encoder, job)
    expected = Replay(plain)
    row = cached(expected, job, template)
    while row.step < row.steps:
        expected.step([row], kinds)
    lost_entry = finish_behind_a_lost_entry(adapter, job, template, TemplateTokens, monkeypatch)
    assert_equal(lost_entry.result().array(), row.result().array())


def test_one_that_answers_otherwise_turns_them_off(
    folder: Path, encoder: Encoder, caplog: pytest.LogCaptureFixture
) -> None:
    capture = HalfReplayed()
    jobs = [job_of(encoder, 3)]
    plain, adapter = adapter_of(folder, None), adapter_of(folder, capture)
    plans, templates = [("kv",) * plain.blocks], primed(plain, encoder, jobs)
    expected = results(plain, jobs, templates, plans)
    with caplog.at_level(logging.ERROR):
        latents = results(adapter, jobs, templates, plans)
    assert_equal(latents[0], expected[0])
    assert "not recorded as CUDA graphs" in caplog.text
    before = capture.recorded
    assert_equal(results(adapter, jobs, templates, plans)[0], expected[0])
    assert capture.recorded == before


def test_a_bucket_holds_its_count_and_at_most_an_eighth_more() -> None:
    for most in (1, 7, 100, 4096):
        of = [bucket(count, most) for count in range(1, most + 1)]
        assert of == sorted(of)
        for count, size in enumerate(of, 1):
            assert count <= size <= min(most, max(count + count // 8 + 1, count + 7))
    assert len({bucket(count, 4096) for count in range(1, 4097)}) < 80


def test_without_a_gpu_there_are_none(folder: Path) -> None:
    assert adapter_of(folder, None).weights.graphs is None
    assert Graphs.on(torch.device("cpu"), torch.float32) is None
