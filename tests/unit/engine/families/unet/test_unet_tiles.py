"""Cached UNet rows whose convolutions run on tiles: against the same maps mixed the slow way,
against dense rows, and against cached rows without tiles where all must agree.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from maskserve_benchmarks.steps.replay import Replay, in_memory, plan_of_kinds
from maskserve_common.config import Config, ConfigError
from maskserve_engine.base.job import EditJob
from maskserve_engine.cache.entries import PARTS, encode
from maskserve_engine.cache.entry_file import dump_entry, read_entry
from maskserve_engine.cache.loader import Load
from maskserve_engine.families.encoder import Encoder
from maskserve_engine.families.registry import load_adapter, load_encoder
from maskserve_engine.families.unet.adapter import UnetAdapter
from maskserve_engine.families.unet.forward import PackedPasses, PassInput, forward
from maskserve_engine.families.unet.rows import UnetRow
from maskserve_engine.loop.engine import Engine
from maskserve_engine.planning.entry_bytes import FORMATS, entry_bytes
from maskserve_engine.planning.two_stream import Plan
from tests.fakes.entries import NOTE, same
from tests.fakes.jobs import config_of, encode_case, tolerance, unet_case
from tests.support.cached_rows import (
    NOISE_SEED,
    Primed,
    assert_equal,
    cached,
    check_mixed_batch,
    result,
)
from tests.support.engines import edit, make_engine
from tests.support.eventually import eventually
from tests.support.flop_count import counted
from tests.support.mixed_maps import mixed, recorded

pytestmark = pytest.mark.spread("folder")

ALL = 64
"""A halo over any picture here."""


def configured(folder: Path, halo: int, **cache: Any) -> Config:
    return config_of(folder, cache={"conv_halo": halo, **cache})


def adapter_of(config: Config) -> UnetAdapter:
    adapter = load_adapter(config)
    assert isinstance(adapter, UnetAdapter)
    return adapter


@pytest.fixture(scope="module", params=("sd-fill", "sdxl-base"))
def folder(request: pytest.FixtureRequest, tiny_unets: dict[str, Path]) -> Path:
    return tiny_unets[request.param]


@pytest.fixture(scope="module")
def encoder(folder: Path) -> Encoder:
    return load_encoder(config_of(folder))


@pytest.fixture(scope="module")
def plain(folder: Path) -> UnetAdapter:
    return adapter_of(config_of(folder))


def make_job(
    encoder: Encoder, seed: int, side: tuple[int, int] = (72, 84), **settings: Any
) -> EditJob:
    """An edit of a small random mask; sides that are odd at some level."""
    rng = np.random.default_rng(seed)
    case = unet_case(rng, **settings)
    mask = np.zeros(side, np.uint8)
    for _ in range(2):
        top, left = (int(rng.integers(0, n // 2)) for n in side)
        mask[top : top + int(rng.integers(4, 24)), left : left + int(rng.integers(4, 24))] = 255
    pixels = rng.integers(0, 256, (*side, 3), dtype=np.uint8)
    return encode_case(encoder, replace(case, pixels=pixels, mask=mask), f"edit-{seed}")


def row_of(adapter: UnetAdapter, job: EditJob, primed: Primed, at: int = 0) -> UnetRow:
    """A cached row that reads one entry."""
    row = adapter.cached_row(job, NOISE_SEED)
    assert row.inactive is not None
    entry = primed.entries[at]
    if row.inactive.tile is None:
        entry = replace(entry, blocks=entry.blocks[: adapter.blocks])
    row.entry = in_memory(entry, row.inactive.selection)
    return row


def answer(adapter: UnetAdapter, row: UnetRow) -> torch.Tensor:
    """The model's answer in the row's next step."""
    adapter.step([row], plan(adapter))
    assert row.answer is not None
    return row.answer


def plan(adapter: UnetAdapter) -> Plan:
    return plan_of_kinds(("kv",) * adapter.blocks)


def box_of(row: UnetRow) -> tuple[slice, slice]:
    assert row.inactive is not None
    assert row.inactive.tile is not None
    box = row.inactive.tile[0].box
    return slice(box.top, box.bottom), slice(box.left, box.right)


def as_stored(x: torch.Tensor, format: str) -> torch.Tensor:
    """A feature map [p, C, h, w] as an entry gives it back."""
    positions = x.permute(0, 2, 3, 1).flatten(0, 2)
    stored = torch.empty_like(positions)
    encode(positions, format).into(stored)
    return stored.unflatten(0, (len(x), *x.shape[2:])).permute(0, 3, 1, 2)


@pytest.mark.parametrize(
    ("halo", "seed", "format"), [(1, 0, "model"), (2, 1, "model"), (1, 3, "int4"), (4, 2, "int8")]
)
def test_a_tile_is_the_mixed_map_computed_in_full(
    folder: Path, encoder: Encoder, plain: UnetAdapter, halo: int, seed: int, format: str
) -> None:
    """Norms read the mixed map's means and variances, convolutions its features. The naive rival,
    a row that convolves the whole picture, is far off.
    """
    tiles = adapter_of(configured(folder, halo))
    job = make_job(encoder, seed, guidance_scale=(1.0, 7.5)[seed % 2])
    primed = Primed(tiles, encoder, job, "kv", format)
    priming_row = plain.priming_row(
        job, primed.row.anchors, encoder.encode_prompt(""), NOISE_SEED, primed.row.kinds, format
    )
    with recorded(plain.model) as maps:
        plain.step([priming_row], None)
    maps = [as_stored(map, format) for map in maps]
    row, slow, rival = (row_of(adapter, job, primed) for adapter in (tiles, plain, plain))
    with mixed(plain.model, maps, plain.prepare(job).prepared.active.levels, halo):
        expected = answer(plain, slow)
    at = (slice(None), *box_of(row))
    assert box_of(row) != (slice(0, 18), slice(0, 21))
    latents, naive = answer(tiles, row), answer(plain, rival)
    assert (latents - expected)[at].abs().max() <= tolerance(expected.numpy())
    assert (naive - expected)[at].abs().max() > 10 * tolerance(expected.numpy())


def test_a_halo_over_the_whole_picture_is_a_row_without_tiles(
    folder: Path, encoder: Encoder, plain: UnetAdapter
) -> None:
    job, latents = make_job(encoder, 10), []
    for adapter in (adapter_of(configured(folder, ALL)), plain):
        replay = Replay(adapter)
        latents.append(
            result(replay, cached(replay, job, Primed(adapter, encoder, job, "kv")), "kv")
        )
    assert_equal(latents[0], latents[1])


@pytest.mark.parametrize("own_entries", [False, True])
def test_on_the_priming_inputs_every_tile_equals_dense(
    folder: Path, encoder: Encoder, plain: UnetAdapter, own_entries: bool
) -> None:
    """In one step with a dense row, and with another template's. Where both passes of a guided row
    have entries of their own, both agree.
    """
    tiles = adapter_of(configured(folder, 1, cfg_entries="own" if own_entries else "shared"))
    samples, passes, times, boxes = [], [], [], []
    for seed in range(3):
        guided = (
            {"guidance_scale": 7.5, "negative_prompt": ""}
            if own_entries
            else {"guidance_scale": 1.0}
        )
        job = make_job(encoder, seed, **guided)
        job = replace(job, conditioning=encoder.encode_prompt(""))
        if own_entries and tiles.entry_halves == 2:
            zeros = {name: np.zeros_like(x) for name, x in job.conditioning.items()}
            job = replace(job, negative=zeros)
        primed = Primed(tiles, encoder, job, "kv")
        row = tiles.dense_row(job) if seed == 0 else row_of(tiles, job, primed, at=1)
        mine = row.passes()
        passes += mine
        anchor = primed.entries[1].anchor
        samples += [primed.row.template.at(anchor.timestep)] * len(mine)
        times += [anchor.timestep] * len(mine)
        boxes += [None if seed == 0 else box_of(row)] * len(mine)
    sample, when = torch.stack(samples), torch.tensor(times)
    size, depth = tuple(sample.shape[2:]), len(tiles.model.down_blocks)
    dense = [PassInput(part.text, part.added) for part in passes]
    answers = []
    for inputs in (passes, dense):
        packed = PackedPasses(inputs, size, depth, sample.device)
        with torch.inference_mode():
            answers.append(forward(tiles.weights, packed, sample, when, ("kv",) * tiles.blocks))
    for latents, expected, box in zip(*answers, boxes, strict=True):
        at = (slice(None), *(box or ()))
        assert (latents - expected)[at].abs().max() <= tolerance(expected.numpy())


def test_a_row_takes_its_own_of_whole_maps(folder: Path, encoder: Encoder) -> None:
    """As where entries lie on the device, or rows of different masks share what is loaded."""
    tiles, job = adapter_of(configured(folder, 1)), make_job(encoder, 15, guidance_scale=7.5)
    primed = Primed(tiles, encoder, job, "kv", "int4")
    expected, row = row_of(tiles, job, primed), row_of(tiles, job, primed)
    assert row.selection is not None
    row.entry = in_memory(primed.entries[0], row.selection, whole=True)
    assert torch.equal(answer(tiles, row), answer(tiles, expected))


def test_a_mixed_batch_equals_each_row_alone(folder: Path, encoder: Encoder) -> None:
    adapter, jobs = adapter_of(configured(folder, 2)), [make_job(encoder, n) for n in range(20, 26)]
    primed = [Primed(adapter, encoder, job, stride=2) for job in jobs]
    check_mixed_batch(Replay(adapter), jobs, primed, "kv")


def test_a_step_without_an_entry_convolves_the_whole_picture(
    folder: Path, encoder: Encoder, plain: UnetAdapter
) -> None:
    job, latents = make_job(encoder, 30), []
    for adapter in (adapter_of(configured(folder, 2)), plain):
        replay = Replay(adapter)
        row = cached(replay, job, Primed(adapter, encoder, job, "kv"))
        replay.reads(row, [None] * row.steps)
        latents.append(result(replay, row, "kv"))
    assert np.array_equal(latents[0], latents[1])


@pytest.mark.parametrize("format", ["model", "int8", "int4"])
def test_the_engine_stores_what_is_counted_and_files_give_it_back(
    folder: Path, encoder: Encoder, format: str
) -> None:
    tiles, job = adapter_of(configured(folder, 2)), make_job(encoder, 34)
    _, height, width = job.moments.shape
    entry = Primed(tiles, encoder, job, "kv", format).entries[0]
    fmt = FORMATS["float32" if format == "model" else format]
    assert entry.nbytes == entry_bytes(tiles.work(height, width), "kv", fmt)
    read, _ = read_entry(bytearray(dump_entry(entry, NOTE)))
    assert same(read, entry)


def test_a_row_loads_of_maps_what_its_tiles_read(folder: Path, encoder: Encoder) -> None:
    """The naive rival loads whole maps."""
    tiles, job = adapter_of(configured(folder, 1)), make_job(encoder, 35)
    entry = Primed(tiles, encoder, job, "kv").entries[0]
    selection = tiles.cached_row(job, NOISE_SEED).selection
    sizes = Load(entry, "host", selection).sizes[tiles.blocks :, PARTS.index("map")]
    _, height, width = job.moments.shape
    assert len(sizes) == len(tiles.work(height, width).maps) + 1
    assert 0 < sizes.sum() < 0.8 * sum(block.nbytes for block in entry.blocks[tiles.blocks :])


@pytest.mark.parametrize("guidance", [1.0, 7.5])
def test_what_is_counted_of_a_step_is_what_torch_counts(
    folder: Path, encoder: Encoder, guidance: float
) -> None:
    tiles, job = adapter_of(configured(folder, 1)), make_job(encoder, 36, guidance_scale=guidance)
    primed = Primed(tiles, encoder, job, "kv")
    _, height, width = job.moments.shape
    priced = tiles.work(height, width).batch_flops(tiles.totals(job), ("kv",) * tiles.blocks, None)
    assert priced == counted(lambda: tiles.step([row_of(tiles, job, primed)], plan(tiles)))


def test_what_does_not_go_together_is_refused(tiny_unets: dict[str, Path], tiny_fill: Path) -> None:
    with pytest.raises(ConfigError, match="conv_halo: 2 goes with entry_kind kv, not h"):
        load_adapter(configured(tiny_unets["sd-base"], 2, entry_kind="h"))
    with pytest.raises(ConfigError, match="conv_halo: a setting of UNets"):
        load_adapter(configured(tiny_fill, 2))


def test_an_engine_gives_the_same_from_memory_and_from_files(
    folder: Path, encoder: Encoder, tmp_path: Path
) -> None:
    """Templates kept without feature maps are others."""
    job = make_job(encoder, 40, cache="require", guidance_scale=7.5)
    files = {"host_dir": str(tmp_path)}
    finals, keys = [], []
    for cache in ({"conv_halo": 2}, {"conv_halo": 2, **files}, {"conv_halo": 2, **files}, files):
        engine = make_engine(folder, encoder, **cache)
        try:
            finals.append(edit(engine, job))
            keys.append(engine.cache.key_of(job))
            eventually("the rows let go", partial(_is_whole, engine))
        finally:
            engine.close(5.0)
    tiers = [final.meta["cache_tier"] for final in finals]
    assert tiers == ["device", "device", "host", "device"]
    assert set(finals[0].meta["kinds"]) == {"kv"}
    assert_equal(finals[1].latents, finals[0].latents)
    assert_equal(finals[2].latents, finals[0].latents)
    assert keys[0] == keys[1] == keys[2] != keys[3]


def _is_whole(engine: Engine) -> bool:
    """Whether the books say that nothing is held for nobody."""
    try:
        engine.cache.check_integrity()
    except AssertionError:
        return False
    return True
