"""References that see nothing of a row: equal for all rows of a picture, so made once of a template
and read by its dense and cached rows. Those of other models are not.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from maskserve_common.contracts.keys import STILL, template_id
from maskserve_common.contracts.request import Reference
from maskserve_engine.base.job import EditJob
from maskserve_engine.cache.entries import Recorder
from maskserve_engine.cache.loader import EntryLost
from maskserve_engine.cache.store import Handle
from maskserve_engine.families.encoder import Encoder
from maskserve_engine.families.mmdit.rows import FlowPrimingRow
from maskserve_engine.families.registry import load_adapter, load_encoder
from maskserve_engine.layers.low_rank import Factors
from maskserve_engine.loop.engine import Engine
from tests.fakes.jobs import config_of, encode_case, random_case
from tests.fakes.tiny_flux2 import build_tiny_flux2
from tests.support.cached_rows import assert_equal
from tests.support.draws import fresh_rng
from tests.support.engines import edit, make_engine

TEXT = {"max_sequence_length": 48}


@pytest.fixture(scope="module")
def folders(tiny_kontext: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {
        "kontext": tiny_kontext,
        "klein": build_tiny_flux2(root / "klein"),
        "exact": build_tiny_flux2(root / "exact", exact=True),
    }


def keys_at(adapter: Any, job: EditJob, step: int) -> Tensor:
    """[blocks, R, width] of the references in one step of a dense row."""
    row = adapter.dense_row(job)
    for _ in range(step):
        adapter.step([row], None)
    count = len(row.image.masked.cis) - len(row.latents)
    if row.references is not None:
        row.references.entry = None  # made anew for this step
        adapter.step([row], None)
        entry, count = row.references.entry, 0
    else:
        batch, recorder = adapter.batches([row]), Recorder(
            (frozenset({"kv"}),) * adapter.blocks, "model"
        )  # fmt: skip
        batch.packed.captures, batch.packed.primes = (recorder,), True
        with torch.inference_mode():
            batch.step(adapter.weights, ())
        entry = recorder.entry(STILL)
    return torch.stack([block.keys.data[-count:] for block in entry.blocks])


@pytest.mark.parametrize("name", ["kontext", "klein", "exact"])
def test_exact_references_depend_on_the_picture_alone_and_others_on_all(
    folders: dict[str, Path], name: str
) -> None:
    config = config_of(folders[name], model=TEXT if name != "kontext" else {})
    adapter, encoder = load_adapter(config), load_encoder(config)
    base = {"guidance_scale": None} if name != "kontext" else {"guidance_scale": 3.0}
    case = random_case(
        np.random.default_rng(1), **base, num_inference_steps=4, strength=1.0
    )  # fmt: skip
    case = replace(case, prompt="a red star")
    changes = {
        "prompt": (replace(case, prompt="a blue circle"), 1),
        "seed": (replace(case, seed=case.seed + 1), 1),
        "mask": (replace(case, mask=255 - case.mask), 1),
        "step": (case, 2),
    }
    expected = keys_at(adapter, encode_case(encoder, case, "a"), 1)
    assert expected.shape[1] == len(adapter.dense_row(encode_case(encoder, case, "a")).latents)
    for key, (other, step) in changes.items():
        keys = keys_at(adapter, encode_case(encoder, other, key), step)
        maximum = float((keys - expected).abs().max())
        assert maximum == 0.0 if name == "exact" else maximum > 1e-4, key
    pixels = replace(case, pixels=255 - case.pixels)
    keys = keys_at(adapter, encode_case(encoder, pixels, "pixels"), 1)
    assert float((keys - expected).abs().max()) > 1e-2


def test_references_are_made_again_with_adapters_that_came_late(
    folders: dict[str, Path], encoder: Encoder
) -> None:
    adapter = load_adapter(config_of(folders["exact"], model=TEXT))
    width, inner = adapter.weights.width, 3 * adapter.weights.width
    layer = "single_transformer_blocks.0.attn.to_qkv_mlp_proj"
    rng = np.random.default_rng(0)
    down = torch.from_numpy(rng.standard_normal((2, width), np.float32))
    up = torch.from_numpy(rng.standard_normal((3 * width + 2 * inner, 2), np.float32))
    loras = ((adapter.low_rank({layer: Factors(down, up)}), 1.0),)
    job = one(encoder, "late")

    def keys(*, late: bool) -> Tensor:
        row = adapter.dense_row(job)
        if late:
            adapter.step([row], None)
        adapter.attach(row, job, loras)
        adapter.step([row], None)
        return torch.stack([block.keys.data for block in row.references.entry.blocks])

    assert torch.equal(keys(late=True), keys(late=False))


@pytest.fixture(scope="module")
def encoder(folders: dict[str, Path]) -> Encoder:
    return load_encoder(config_of(folders["exact"], model=TEXT))


@pytest.fixture
def engine(folders: dict[str, Path], encoder: Encoder) -> Iterator[Engine]:
    engine = make_engine(folders["exact"], encoder, TEXT)
    yield engine
    engine.close(5.0)


@pytest.fixture
def references_made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Rows that made references for themselves."""
    names: list[str] = []
    real = FlowPrimingRow.of_references

    def of_references(row: Any, references: Any, blocks: int) -> FlowPrimingRow:
        names.append(row.request_id)
        return real(row, references, blocks)

    monkeypatch.setattr(FlowPrimingRow, "of_references", of_references)
    return names


def one(encoder: Encoder, name: str, seed: int = 1, *, all_of_it: bool = False, **more: Any) -> Any:
    """An edit of one picture."""
    case = random_case(
        np.random.default_rng(3), guidance_scale=None, strength=1.0, num_inference_steps=4, **more
    )
    mask = np.full_like(case.mask, 255 * all_of_it)
    mask[8:24, 8:24] = 255
    return encode_case(encoder, replace(case, mask=mask, seed=seed), name)


def test_a_template_has_its_references_once_and_all_its_rows_read_them(
    engine: Engine, encoder: Encoder, references_made: list[str]
) -> None:
    plain = edit(engine, one(encoder, "off", 7, all_of_it=True, cache="off"))
    first = edit(engine, one(encoder, "miss"))
    assert (first.meta["cache"], references_made) == ("miss", ["off", "miss"])
    hit = edit(engine, one(encoder, "hit", cache="require"))
    assert hit.meta["cache"] == "hit"
    [template] = engine.cache.templates()
    assert template["anchors"] == 1 + 4
    # Rows that compute all tokens, too: they differ from those without the cache in nothing.
    again = edit(engine, one(encoder, "all", 7, all_of_it=True))
    assert (again.meta["cache"], again.meta["dense_for"]) == ("off", "mask_ratio")
    assert_equal(again.latents, plain.latents)
    assert references_made == ["off", "miss"]
    engine.cache.store.check_integrity()


def test_a_row_whose_template_loses_its_references_makes_its_own(
    engine: Engine, encoder: Encoder, references_made: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = edit(engine, one(encoder, "first", 5, cache="require"))
    assert not references_made
    real, left = Handle.wait_whole, [1]

    def lost(handle: Handle, block: int, part: str) -> Any:
        if handle.anchor == STILL and left:
            left.pop()
            handle.load.lost = EntryLost("gone")
            raise EntryLost("gone")
        return real(handle, block, part)

    monkeypatch.setattr(Handle, "wait_whole", lost)
    final = edit(engine, one(encoder, "second", 5))
    assert (final.meta["cache"], references_made) == ("hit", ["second"])
    assert_equal(final.latents, expected.latents)


def test_an_evicted_template_is_primed_with_its_references_again(
    engine: Engine, encoder: Encoder, references_made: list[str]
) -> None:
    edit(engine, one(encoder, "a", cache="require"))
    [template] = engine.cache.templates()
    engine.cache.store.evict(str(template["key"]))
    edit(engine, one(encoder, "b", cache="off"))
    edit(engine, one(encoder, "c", cache="require"))
    assert engine.cache.templates()
    assert references_made == ["b"]


def test_rows_of_the_same_pictures_share_keys_and_values(
    folders: dict[str, Path], encoder: Encoder, references_made: list[str]
) -> None:
    """They are computed once for all that are there at a time, and each row ends as alone."""
    adapter = load_adapter(config_of(folders["exact"], model=TEXT))
    jobs = [one(encoder, f"{seed}", seed, all_of_it=True) for seed in range(3)]
    jobs += [
        one(encoder, f"own {seed}", seed, all_of_it=True, reproducible=True) for seed in (0, 1)
    ]
    [other] = fresh_rng().integers(0, 256, (1, 32, 48, 3), np.uint8)
    two = replace(jobs[0].request, references=(Reference((32, 48), template_id(other)),))
    jobs.append(replace(jobs[0], request=two, references=(encoder.moments(other),)))

    def alone(job: Any) -> Any:
        row = adapter.dense_row(job)
        for _ in range(row.steps):
            adapter.step([row], None)
        return row.result().array()

    expected = []
    for job in jobs:
        expected.append(alone(job))
        adapter.release()
    references_made.clear()
    first = adapter.dense_row(jobs[0])
    adapter.step([first], None)
    rows = [first, *map(adapter.dense_row, jobs[1:])]
    while running := [row for row in rows if row.step < row.steps]:
        adapter.step(running, None)
    assert references_made == ["0", "own 0", "own 1", "0"]
    for row, latents in zip(rows, expected, strict=True):
        assert_equal(row.result().array(), latents)
    assert first.references.entry is rows[1].references.entry is not rows[3].references.entry
    shared = weakref.ref(first.references.shared)
    del rows, first, row
    adapter.release()
    assert shared() is None
