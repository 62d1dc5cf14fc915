"""Cached UNet rows against dense ones where the two must agree (design §4, §8)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from maskserve_core.config import Config
from maskserve_core.planning.cost_model import estimate
from maskserve_core.planning.entry_bytes import FORMATS, entry_bytes
from maskserve_engine.cache.entries import AnchorEntry
from maskserve_engine.cache.sizing import choose_kinds
from maskserve_engine.families.registry import Encoder, load_adapter, load_encoder
from maskserve_engine.families.unet.adapter import UnetAdapter
from maskserve_engine.families.unet.forward import Packed, PassInput, forward
from maskserve_engine.families.unet.rows import CachedRest, UnetPrimingRow, UnetRow
from maskserve_engine.job import EditJob
from maskserve_harness.benchmarks.replay import Replay, in_memory, plan_of_kinds
from tests.fakes.jobs import config_of, encode_case, tolerance, unet_case
from tests.fakes.tiny_unet import VARIANTS

NOISE_SEED = 1234
ANY_COSTS = estimate("cpu")
KINDS = ("dense", "project", "kv")


@pytest.fixture(scope="module", params=VARIANTS)
def config(request: pytest.FixtureRequest, tiny_unets: dict[str, Path]) -> Config:
    return config_of(tiny_unets[request.param])


@pytest.fixture(scope="module")
def encoder(config: Config) -> Encoder:
    return load_encoder(config)


@pytest.fixture(scope="module")
def adapter(config: Config) -> UnetAdapter:
    adapter = load_adapter(config)
    assert isinstance(adapter, UnetAdapter)
    return adapter


class Primed:
    """A template's entries, and the row that made them."""

    def __init__(
        self, adapter: UnetAdapter, encoder: Encoder, job: EditJob, kind: str = "both",
        format: str = "model", stride: int = 1,
    ) -> None:  # fmt: skip
        anchors = adapter.anchors(adapter.tokens(job).total, 4, stride)
        prompt = encoder.encode_prompt("")
        _, height, width = job.moments.shape
        kinds = choose_kinds(kind, adapter.work(height, width), FORMATS["float32"], ANY_COSTS, 12.0)
        self.row = adapter.priming_row(job, anchors, prompt, NOISE_SEED, kinds, format)
        self.entries: list[AnchorEntry] = []
        while self.row.step < self.row.steps:
            adapter.step([self.row], None)
            self.entries.append(self.row.take_entry())


def make_job(
    encoder: Encoder, seed: int, side: tuple[int, int] = (48, 40), **asked: Any
) -> EditJob:
    """An edit of a fixed size: rows of a batch have one latent shape."""
    rng = np.random.default_rng(seed)
    case = unet_case(rng, **asked)
    mask = np.zeros(side, np.uint8)
    top, left = (int(rng.integers(0, n - 8)) for n in side)
    mask[top : top + int(rng.integers(4, 30)), left : left + int(rng.integers(4, 30))] = 255
    pixels = rng.integers(0, 256, (*side, 3), dtype=np.uint8)
    return encode_case(encoder, replace(case, pixels=pixels, mask=mask), f"edit-{seed}")


@pytest.fixture
def replay(adapter: UnetAdapter) -> Replay:
    return Replay(cast(Any, adapter))  # it is typed for FLUX


def cached(replay: Replay, job: EditJob, primed: Primed) -> UnetRow:
    """A cached row that reads, at each step, the nearest entry."""
    entries = [
        min(primed.entries, key=lambda entry: abs(entry.anchor.sigma - sigma))
        for sigma, _ in replay.adapter.sigmas(job)
    ]
    return cast(UnetRow, replay.cached_row(job, entries, NOISE_SEED))


def run(replay: Replay, rows: list[UnetRow], kinds: tuple[str, ...]) -> None:
    while live := [row for row in rows if row.step < row.steps]:
        replay.step(live, kinds)


@pytest.mark.parametrize("kind", KINDS)
def test_with_all_tokens_active_cached_equals_dense(
    adapter: UnetAdapter, replay: Replay, encoder: Encoder, kind: str
) -> None:
    job = make_job(encoder, 1)
    job = replace(job, edit_mask=np.full_like(job.edit_mask, 255))
    row = cached(replay, job, Primed(adapter, encoder, job))
    dense = adapter.dense_row(job)
    run(replay, [row], (kind,) * adapter.blocks)
    run(replay, [dense], ())
    expected = dense.result()
    assert np.abs(row.result() - expected).max() <= tolerance(expected)


def outputs(
    adapter: UnetAdapter, rows: list[UnetPrimingRow], kinds: tuple[str, ...],
    edits: list[Any],
) -> torch.Tensor:  # fmt: skip
    """What the model answers on the priming rows' inputs, computing only active tokens."""
    sample = torch.stack([row.template.at(row.timestep) for row in rows])
    passes = [
        PassInput(
            row.prompts[0].text,
            row.prompts[0].added,
            None if edit is None else edit.inactive.active,
            None if edit is None else CachedRest(edit, 0),
        )
        for row, edit in zip(rows, edits, strict=True)
    ]
    height, width = sample.shape[2:]
    packed = Packed(passes, (height, width), len(adapter.model.down_blocks), sample.device)
    timesteps = torch.tensor([row.timestep for row in rows])
    with torch.inference_mode():
        return forward(adapter.model, packed, sample, timesteps, kinds)


@pytest.mark.parametrize("seed", range(2))
def test_on_the_priming_inputs_any_mix_of_kinds_equals_dense_everywhere(
    adapter: UnetAdapter, encoder: Encoder, seed: int
) -> None:
    """Entries in model dtype hold exactly what the inactive tokens would have been, so the whole
    output of the UNet is that of the dense forward, outside the mask too.
    """
    rng = np.random.default_rng(seed)
    jobs = [make_job(encoder, 10 * seed + i) for i in range(3)]
    primed = [Primed(adapter, encoder, job) for job in jobs]
    anchor = seed % len(primed[0].entries)
    rows = [each.row for each in primed]
    inactive: list[Any] = []
    for job, each in zip(jobs, primed, strict=True):
        each.row.step = anchor
        row = adapter.cached_row(job, NOISE_SEED)
        assert row.inactive is not None
        row.entry = in_memory(each.entries[anchor], row.inactive.selection)
        inactive.append(row)
    inactive[1] = None  # a dense row among them
    expected = outputs(adapter, rows, (), [None] * 3)
    mixes = [(kind,) * adapter.blocks for kind in KINDS]
    mixes += [tuple(rng.choice(KINDS, size=adapter.blocks)) for _ in range(8)]
    for kinds in mixes:
        answer = outputs(adapter, rows, kinds, inactive)
        assert (answer - expected).abs().max() <= tolerance(expected.numpy()), kinds


@pytest.mark.parametrize("kind", KINDS)
def test_a_mixed_batch_equals_each_row_alone(
    adapter: UnetAdapter, replay: Replay, encoder: Encoder, kind: str
) -> None:
    kinds = (kind,) * adapter.blocks
    jobs = [make_job(encoder, seed) for seed in range(20, 26)]
    primed = [Primed(adapter, encoder, job, stride=2) for job in jobs]

    def rows() -> list[UnetRow]:
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


def test_a_priming_row_beside_edits_keeps_what_it_keeps_alone(
    adapter: UnetAdapter, replay: Replay, encoder: Encoder
) -> None:
    jobs = [make_job(encoder, seed, guidance_scale=7.5) for seed in (40, 41)]
    alone = Primed(adapter, encoder, jobs[0])
    other = Primed(adapter, encoder, jobs[1])
    again = adapter.priming_row(
        jobs[0], alone.row.anchors, encoder.encode_prompt(""), NOISE_SEED, alone.row.kinds, "model"
    )
    edit = cached(replay, jobs[1], other)
    replay.turn(edit)
    adapter.step([edit, again], plan_of_kinds(("kv",) * adapter.blocks))
    for one, two in zip(alone.entries[0].blocks, again.take_entry().blocks, strict=True):
        for a, b in ((one.hidden, two.hidden), (one.keys, two.keys), (one.end, two.end)):
            assert (a is None) == (b is None)
            if a is not None and b is not None:
                assert (a.data - b.data).abs().max() <= tolerance(a.data.numpy())


def test_a_step_without_an_anchor_computes_the_pinned_tokens(
    adapter: UnetAdapter, replay: Replay, encoder: Encoder
) -> None:
    """It equals the all-dense plan: both compute inactive tokens from the template's inputs."""
    job = make_job(encoder, 30)
    primed = Primed(adapter, encoder, job)
    with_plan, without = cached(replay, job, primed), cached(replay, job, primed)
    replay.reads(without, (None,) * without.steps)
    run(replay, [with_plan], ("dense",) * adapter.blocks)
    run(replay, [without], ("kv",) * adapter.blocks)
    expected = with_plan.result()
    assert np.abs(without.result() - expected).max() <= tolerance(expected)


def test_inactive_tokens_come_back_as_the_template(
    adapter: UnetAdapter, replay: Replay, encoder: Encoder
) -> None:
    job = make_job(encoder, 31)
    primed = Primed(adapter, encoder, job)
    row = cached(replay, job, primed)
    run(replay, [row], ("kv",) * adapter.blocks)
    assert row.inactive is not None
    outside = ~row.inactive.mask.expand_as(primed.row.template.clean)
    assert torch.equal(torch.from_numpy(row.result())[outside], primed.row.template.clean[outside])


def test_a_mask_of_one_pixel_runs_and_a_ring_widens_it(
    adapter: UnetAdapter, replay: Replay, encoder: Encoder
) -> None:
    job = make_job(encoder, 32)
    mask = np.zeros_like(job.edit_mask)
    mask[5, 7] = 255
    for ring, active in ((0, 1), (1, 9)):
        settings = replace(job.request.settings, mask_ring=ring)
        small = replace(job, edit_mask=mask, request=replace(job.request, settings=settings))
        assert adapter.tokens(small).active == active
        row = cached(replay, small, Primed(adapter, encoder, small))
        run(replay, [row], ("project",) * adapter.blocks)
        assert np.isfinite(row.result()).all()
        assert np.isfinite(row.estimate()).all()


def test_only_what_the_inactive_tokens_lack_is_loaded(
    adapter: UnetAdapter, encoder: Encoder
) -> None:
    """The naive rival loads whole entries whatever the mask."""
    job = make_job(encoder, 33)
    row = adapter.cached_row(job, NOISE_SEED)
    assert row.selection is not None
    assert row.inactive is not None
    _, height, width = job.moments.shape
    for block, place in enumerate(adapter.places):
        total = adapter.work(height, width).tokens[place.level]
        active = row.inactive.active[place.level].tolist()
        assert sorted([*row.selection.of(block).tolist(), *active]) == list(range(total))


@pytest.mark.parametrize("kind", ["kv", "h"])
def test_the_engine_stores_what_is_counted(
    adapter: UnetAdapter, encoder: Encoder, kind: str
) -> None:
    """Hidden states where a stack begins are at hand, so they are not kept."""
    job = make_job(encoder, 34)
    _, height, width = job.moments.shape
    work = adapter.work(height, width)
    primed = Primed(adapter, encoder, job, kind)
    assert primed.entries[0].nbytes == entry_bytes(work, kind, FORMATS["float32"])


def test_own_entries_hold_what_each_pass_would_have_been(
    tiny_unets: dict[str, Path],
) -> None:
    """With an empty prompt and no negative one, both passes of a guided row whose latents are the
    template's have the inputs of priming. Shared entries are wrong for the second pass.
    """
    differences = {}
    for setting in ("own", "shared"):
        config = config_of(tiny_unets["sdxl-fill"], cache={"cfg_entries": setting})
        encoder, adapter = load_encoder(config), load_adapter(config)
        assert isinstance(adapter, UnetAdapter)
        job = make_job(encoder, 50, guidance_scale=7.5, negative_prompt="")
        job = replace(job, conditioning=encoder.encode_prompt(""))
        primed = Primed(adapter, encoder, job)
        at, template = primed.entries[1], primed.row.template
        row = adapter.cached_row(job, NOISE_SEED)
        assert row.selection is not None
        row.entry = in_memory(at, row.selection)
        dense = adapter.dense_row(job)
        sample = torch.stack([template.at(at.anchor.timestep)] * 2)
        answers = []
        for each in (row, dense):
            packed = Packed(each.passes(), (12, 10), len(adapter.model.down_blocks), sample.device)
            with torch.inference_mode():
                answers.append(
                    forward(adapter.model, packed, sample, torch.tensor([at.anchor.timestep] * 2),
                            ("kv",) * adapter.blocks)
                )  # fmt: skip
        difference = (answers[0] - answers[1]).abs().amax(dim=(1, 2, 3))
        differences[setting] = difference.tolist()
        assert difference[0] <= tolerance(answers[1].numpy())
    assert differences["own"][1] <= 1e-4
    assert differences["shared"][1] > 1e-3
