"""Edits served through the engine, its store, loader, templates and shared loads. Pixels and loaded
entries show the template, anchor and step that a row reads.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import structs

from maskserve_common.contracts.keys import Anchor
from maskserve_engine.cache.entries import GROUP, PARTS, AnchorEntry, encode
from maskserve_engine.cache.tier import Note
from maskserve_engine.families.encoder import Encoder
from maskserve_engine.families.registry import load_adapter, load_encoder
from maskserve_engine.loop.engine import Engine
from tests.fakes.jobs import config_of, tolerance
from tests.fakes.tiny_flux2 import build_tiny_flux2
from tests.support.draws import fresh_rng
from tests.support.engines import accept, edit, job, make_engine
from tests.support.sink import Sink

STEPS = 6


@pytest.fixture(scope="module")
def encoder(tiny_fill: Path) -> Encoder:
    return load_encoder(config_of(tiny_fill))


@pytest.fixture
def engine(tiny_fill: Path, encoder: Encoder) -> Any:
    engine = make_engine(tiny_fill, encoder)
    yield engine
    engine.close(10.0)
    engine.cache.check_integrity()


def jobs_of_one_size(encoder: Encoder) -> list[Any]:
    """Two edits of two templates, with one prompt, one seed, one size and one mask."""
    first = job(encoder, 70, "one", cache="require", num_inference_steps=STEPS)
    size, number = first.moments.shape, 71
    while True:
        other = job(encoder, number, "other", cache="require", num_inference_steps=STEPS)
        if other.moments.shape == size:
            request = replace(other.request, seed=first.request.seed)
            return [first, replace(other, request=request, conditioning=first.conditioning)]
        number += 1


def test_two_templates_with_one_mask_at_once_give_the_pixels_of_lone_runs(
    engine: Engine, encoder: Encoder
) -> None:
    jobs = jobs_of_one_size(encoder)
    latents = [edit(engine, edit_job).latents for edit_job in jobs]
    between = np.abs(latents[0] - latents[1]).max()
    assert between > 100 * tolerance(latents[0])  # the templates can be told apart
    sinks = [Sink() for _ in jobs]
    named = [
        replace(edit_job, request=replace(edit_job.request, request_id=f"again {n}"))
        for n, edit_job in enumerate(jobs)
    ]

    def both_at_once() -> None:
        for edit_job, sink in zip(named, sinks, strict=True):
            accept(engine, edit_job, sink)

    steps, rows = (engine.counters[name] for name in ("steps_total", "cached_rows_total"))
    engine.ask(both_at_once).result(30)
    finals = [sink.final() for sink in sinks]
    assert engine.counters["cached_rows_total"] == rows + 2 * STEPS
    assert engine.counters["steps_total"] == steps + STEPS  # side by side
    for final, lone in zip(finals, latents, strict=True):
        assert final.meta["cache"] == "hit"
        assert final.meta["kinds"].keys() == {"kv"}
        assert np.abs(final.latents - lone).max() <= tolerance(lone)


def test_each_step_reads_what_its_own_template_was_at_the_nearest_anchor(
    engine: Engine, encoder: Encoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Entries are known by when priming made them, not by the name they are asked for by."""
    origins: dict[int, tuple[str, Anchor]] = {}
    primings: dict[str, tuple[Any, list[AnchorEntry]]] = {}
    read: list[tuple[int, tuple[str, Anchor]]] = []
    adapter, store, step = engine.adapter, engine.cache.store, engine.adapter.step
    put = store.put
    assert engine.manager.primings is not None
    active = engine.manager.primings.active

    def putting(key: str, entry: AnchorEntry, note: Note) -> bool:
        priming, entries = primings.setdefault(key, (active[f"prime:{key}"], []))
        origins[id(entry)] = key, priming.anchors[len(entries)]
        entries.append(entry)
        return put(key, entry, note)

    def stepping(rows: Any, plan: Any, entries: Any, *exchange: Any) -> None:
        for row, entry in zip(rows, entries, strict=True):
            if entry is not None:
                read.append((row.step, origins[id(entry.load.entry)]))
        step(rows, plan, entries, *exchange)

    monkeypatch.setattr(store, "put", putting)
    monkeypatch.setattr(adapter, "step", stepping)
    for edit_job in jobs_of_one_size(encoder):
        read.clear()
        edit(engine, edit_job)
        key = engine.cache.key_of(edit_job)
        priming, entries = primings[key]
        nearest = [
            min(priming.anchors, key=lambda a: (abs(a.sigma - sigma), -a.sigma))
            for sigma, _ in adapter.sigmas(edit_job)
        ]
        assert len(set(nearest)) > 1
        assert read == [(n, (key, anchor)) for n, anchor in enumerate(nearest)]
        # And each entry is what its anchor gives by itself.
        for anchor, entry in zip(priming.anchors, entries, strict=True):
            row = adapter.priming_row(
                edit_job, (anchor,), encoder.encode_prompt(""),
                edit_job.request.template_noise_seed, engine.cache.kinds, "model",
            )  # fmt: skip
            step([row], None, [None])
            for block, lone in zip(entry.blocks, row.take_entry().blocks, strict=True):
                for part in PARTS:
                    for x, y in zip(block.part(part), lone.part(part), strict=True):
                        assert torch.allclose(x.data, y.data, atol=1e-4)


@pytest.mark.parametrize("seed", range(2))
def test_an_edit_of_the_ratio_runs_dense_and_one_below_it_cached(
    tiny_fill: Path, encoder: Encoder, seed: int
) -> None:
    rng = fresh_rng()
    edit_job = job(encoder, int(rng.integers(2**31)), "first", cache="require")
    counts = load_adapter(config_of(tiny_fill)).tokens(edit_job)
    ratio = counts.active / counts.total
    for limit, outcome in ((ratio, "off"), (float(np.nextafter(ratio, 1.0)), "hit")):
        engine = make_engine(tiny_fill, encoder, dense_above_ratio=limit)
        try:
            assert edit(engine, edit_job).meta["cache"] == outcome  # who insists is no exception
            settings = structs.replace(edit_job.request.settings, cache="auto")
            request = replace(edit_job.request, request_id="second", settings=settings)
            final = edit(engine, replace(edit_job, request=request))
            assert final.meta["cache"] == outcome
            assert final.meta["kinds"].keys() == {"kv" if outcome == "hit" else "dense"}
        finally:
            engine.close(10.0)


def test_a_key_changes_with_all_that_entries_depend_on_and_with_nothing_else(
    engine: Engine, encoder: Encoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = job(encoder, 72, "one")
    cache, request = engine.cache, first.request
    key = cache.key_of(first)

    def key_with(**changes: Any) -> str:
        return cache.key_of(replace(first, request=replace(request, **changes)))

    def of_settings(**changes: Any) -> str:
        return key_with(settings=structs.replace(request.settings, **changes))

    conditioning = dict(first.conditioning)
    conditioning["prompt_embeds"] = conditioning["prompt_embeds"][:-1]
    other_keys = [
        key_with(pixels_id="1" * 32),
        of_settings(guidance_scale=9.0),
        cache.key_of(replace(first, conditioning=conditioning)),
    ]
    of_worker = {"model_revision": "other", "dtype": "other", "_kinds_text": "other"}
    for name, value in of_worker.items():
        with monkeypatch.context() as patch:
            patch.setattr(cache, name, value)
            other_keys.append(cache.key_of(first))
    with monkeypatch.context() as patch:
        patch.setattr(cache, "config", structs.replace(cache.config, entry_format="int4"))
        other_keys.append(cache.key_of(first))
    assert len({key, *other_keys}) == 1 + len(other_keys)
    assert key_with(seed=request.seed + 1, request_id="two", prompt="another") == key
    assert of_settings(num_inference_steps=9, mask_ring=3) == key
    assert cache.key_of(replace(first, edit_mask=first.edit_mask[::-1])) == key


def test_int4_is_off_by_half_a_step_at_most_and_by_nothing_in_the_mean() -> None:
    """Floored, not rounded, it would be off by up to one and by half a step in the mean."""
    x = torch.from_numpy(fresh_rng().uniform(-1, 1, (512, 4 * GROUP)))
    coded = encode(x.float(), "int4")
    assert coded.scale is not None
    assert coded.groups is not None
    back = torch.empty_like(x, dtype=torch.float32)
    coded.into(back)
    size = coded.groups.float().repeat_interleave(GROUP, dim=1) * coded.scale
    off = (back - x.float()) / size
    assert float(off.abs().max()) <= 0.51
    assert abs(float(off.mean())) <= 0.01


def test_references_that_see_the_prompt_serve_the_one_that_they_were_primed_with(
    tiny_kontext: Path,
) -> None:
    encoder = load_encoder(config_of(tiny_kontext))
    engine = make_engine(tiny_kontext, encoder, own_anchors=0.0)
    options: dict[str, Any] = {"cache": "require", "num_inference_steps": STEPS}
    engine.cache.prompt = lambda: None  # none that all could share is ever read
    try:
        first = job(encoder, 73, "one", **options)
        request = replace(first.request, prompt="another", request_id="two")
        other = replace(first, request=request, conditioning=encoder.encode_prompt("another"))
        assert engine.cache.priming_prompt(other) is other.conditioning
        for edit_job, primed in ((first, 1), (other, 2), (first, 2)):
            meta = edit(engine, edit_job).meta
            assert (meta["cache"], engine.cache.primed) == ("hit", primed)
    finally:
        engine.close(10.0)
        engine.cache.check_integrity()


def test_exact_references_serve_every_prompt(tmp_path: Path) -> None:
    adapter = load_adapter(config_of(build_tiny_flux2(tmp_path, exact=True)))
    assert not adapter.spec.primed_by_prompt
    assert load_adapter(config_of(build_tiny_flux2(tmp_path / "other"))).spec.primed_by_prompt
