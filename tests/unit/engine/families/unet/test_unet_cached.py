"""Cached UNet rows against dense ones where the two must agree (design §4, §8)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import structs

from maskserve_benchmarks.steps.replay import Replay, in_memory, plan_of_kinds
from maskserve_common.config import Config
from maskserve_engine.base.job import EditJob
from maskserve_engine.families.encoder import Encoder
from maskserve_engine.families.registry import load_adapter, load_encoder
from maskserve_engine.families.unet.adapter import UnetAdapter
from maskserve_engine.families.unet.forward import PackedPasses, PassInput, forward
from maskserve_engine.families.unet.rows import TemplateTokens, UnetPrimingRow
from maskserve_engine.planning.entry_bytes import FORMATS, entry_bytes
from tests.fakes.jobs import config_of, encode_case, tolerance, unet_case
from tests.fakes.tiny_unet import EACH_SORT, TEXT_LENGTH
from tests.support import cached_rows
from tests.support.cached_rows import KINDS, NOISE_SEED, Primed, cached, result
from tests.support.flop_count import counted

pytestmark = pytest.mark.spread("config", "seed")


@pytest.fixture(scope="module", params=EACH_SORT)
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


def make_job(
    encoder: Encoder, seed: int, side: tuple[int, int] = (48, 40), **settings: Any
) -> EditJob:
    """An edit of a fixed size: rows of a batch have one latent shape."""
    rng = np.random.default_rng(seed)
    case = unet_case(rng, **settings)
    mask = np.zeros(side, np.uint8)
    top, left = (int(rng.integers(0, n - 8)) for n in side)
    mask[top : top + int(rng.integers(4, 30)), left : left + int(rng.integers(4, 30))] = 255
    pixels = rng.integers(0, 256, (*side, 3), dtype=np.uint8)
    return encode_case(encoder, replace(case, pixels=pixels, mask=mask), f"edit-{seed}")


@pytest.fixture
def replay(adapter: UnetAdapter) -> Replay:
    return Replay(adapter)


def outputs(
    adapter: UnetAdapter, rows: list[UnetPrimingRow], kinds: tuple[str, ...],
    edits: list[Any],
) -> torch.Tensor:  # fmt: skip
    """The model's answers on the priming rows' inputs, computing only active tokens."""
    sample = torch.stack([row.template.at(row.timestep) for row in rows])
    passes = [
        PassInput(
            row.prompts[0].text,
            row.prompts[0].added,
            None if edit is None else edit.inactive.active,
            None if edit is None else TemplateTokens(edit, 0),
        )
        for row, edit in zip(rows, edits, strict=True)
    ]
    height, width = sample.shape[2:]
    packed = PackedPasses(passes, (height, width), len(adapter.model.down_blocks), sample.device)
    timesteps = torch.tensor([row.timestep for row in rows])
    with torch.inference_mode():
        return forward(adapter.weights, packed, sample, timesteps, kinds)


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
    rows = [template.row for template in primed]
    inactive: list[Any] = []
    for job, template in zip(jobs, primed, strict=True):
        template.row.step = anchor
        row = adapter.cached_row(job, NOISE_SEED)
        assert row.inactive is not None
        row.entry = in_memory(template.entries[anchor], row.inactive.selection)
        inactive.append(row)
    inactive[1] = None  # a dense row among them
    expected = outputs(adapter, rows, (), [None] * 3)
    mixes = [(kind,) * adapter.blocks for kind in KINDS]
    mixes += [tuple(rng.choice(KINDS, size=adapter.blocks)) for _ in range(8)]
    for kinds in mixes:
        answer = outputs(adapter, rows, kinds, inactive)
        assert (answer - expected).abs().max() <= tolerance(expected.numpy()), kinds


@pytest.mark.parametrize("kind", KINDS)
def test_with_a_ring_over_the_whole_picture_cached_equals_dense(
    replay: Replay, encoder: Encoder, kind: str
) -> None:
    cached_rows.check_ring_over_all(replay, encoder, make_job(encoder, 2, mask_ring=64), kind)


def test_entries_are_never_written_by_rows(replay: Replay, encoder: Encoder) -> None:
    cached_rows.check_entries_unwritten(replay, encoder, make_job(encoder, 33))


def test_a_priming_row_beside_edits_keeps_what_it_keeps_alone(
    adapter: UnetAdapter, replay: Replay, encoder: Encoder
) -> None:
    jobs = [make_job(encoder, seed, guidance_scale=7.5) for seed in (40, 41)]
    primed = Primed(adapter, encoder, jobs[0])
    other = Primed(adapter, encoder, jobs[1])
    priming_row = adapter.priming_row(
        jobs[0],
        primed.row.anchors,
        encoder.encode_prompt(""),
        NOISE_SEED,
        primed.row.kinds,
        "model",
    )
    edit = cached(replay, jobs[1], other)
    plan = plan_of_kinds(("kv",) * adapter.blocks)
    adapter.step([edit, priming_row], plan, [replay.next_read(edit), None])
    for block, two in zip(primed.entries[0].blocks, priming_row.take_entry().blocks, strict=True):
        for a, b in ((block.hidden, two.hidden), (block.keys, two.keys), (block.end, two.end)):
            assert (a is None) == (b is None)
            if a is not None and b is not None:
                assert (a.data - b.data).abs().max() <= tolerance(a.data.numpy())


def test_inactive_tokens_come_back_as_the_template(
    adapter: UnetAdapter, replay: Replay, encoder: Encoder
) -> None:
    job = make_job(encoder, 31)
    primed = Primed(adapter, encoder, job)
    row = cached(replay, job, primed)
    out = torch.from_numpy(result(replay, row, "kv"))
    assert row.inactive is not None
    outside = ~row.inactive.mask.expand_as(primed.row.template.clean)
    assert torch.equal(out[outside], primed.row.template.clean[outside])


def test_a_mask_of_one_pixel_runs_and_a_ring_widens_it(
    adapter: UnetAdapter, replay: Replay, encoder: Encoder
) -> None:
    job = make_job(encoder, 32)
    mask = np.zeros_like(job.edit_mask)
    mask[5, 7] = 255
    for ring, active in ((0, 1), (1, 9)):
        settings = structs.replace(job.request.settings, mask_ring=ring)
        small = replace(job, edit_mask=mask, request=replace(job.request, settings=settings))
        assert adapter.tokens(small).active == active
        row = cached(replay, small, Primed(adapter, encoder, small))
        assert np.isfinite(result(replay, row, "project")).all()
        assert np.isfinite(row.estimate().array()).all()


def test_only_what_the_inactive_tokens_lack_is_loaded(
    adapter: UnetAdapter, encoder: Encoder
) -> None:
    """The naive rival loads whole entries whatever the mask."""
    job = make_job(encoder, 33)
    row = adapter.cached_row(job, NOISE_SEED)
    assert row.selection is not None
    assert row.inactive is not None
    _, height, width = job.moments.shape
    blocks = Primed(adapter, encoder, job, "kv").entries[0].blocks
    assert len(blocks) == adapter.blocks
    for number, block in enumerate(blocks):
        assert block.keys is not None
        total = len(block.keys.data)
        active = row.inactive.active[adapter.work(height, width).tokens.index(total)].tolist()
        assert sorted([*row.selection.of(number).tolist(), *active]) == list(range(total))


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


@pytest.mark.parametrize(("guidance", "passes"), [(1.0, 1), (7.5, 2)])
def test_what_is_counted_of_an_edit_is_what_torch_counts(
    adapter: UnetAdapter, encoder: Encoder, guidance: float, passes: int
) -> None:
    """Both passes of guided steps, and the text that the tokenizer makes of any prompt."""
    job = make_job(encoder, 60, guidance_scale=guidance)
    job = replace(job, edit_mask=np.full_like(job.edit_mask, 255))
    totals = adapter.totals(job)
    assert (totals.rows, totals.text) == (passes, passes * TEXT_LENGTH)
    _, height, width = job.moments.shape
    priced = adapter.work(height, width).batch_flops(None, (), totals)
    assert priced == counted(lambda: adapter.step([adapter.dense_row(job)], None))


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
        for compared in (row, dense):
            packed = PackedPasses(
                compared.passes(), (12, 10), len(adapter.model.down_blocks), sample.device
            )
            with torch.inference_mode():
                answers.append(
                    forward(adapter.weights, packed, sample, torch.tensor([at.anchor.timestep] * 2),
                            ("kv",) * adapter.blocks)
                )  # fmt: skip
        difference = (answers[0] - answers[1]).abs().amax(dim=(1, 2, 3))
        differences[setting] = difference.tolist()
        assert difference[0] <= tolerance(answers[1].numpy())
    assert differences["own"][1] <= 1e-4
    assert differences["shared"][1] > 1e-3
