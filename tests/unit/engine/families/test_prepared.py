"""All that follows from a job alone is computed before the engine's thread sees the edit."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from maskserve_benchmarks.checkout import CHECKOUT
from maskserve_engine.base.job import EditJob
from maskserve_engine.families.adapter import Adapter
from maskserve_engine.families.encoder import Encoder
from maskserve_engine.families.registry import load_adapter, load_encoder
from maskserve_engine.stages import latents
from tests.fakes.jobs import config_of, encode_case, guided, random_case, unet_case
from tests.fakes.tiny_unet import VARIANTS
from tests.support.covering import is_unet
from tests.support.draws import fresh_rng
from tests.support.engines import edit, job, make_engine

pytestmark = pytest.mark.spread("family", sort=is_unet)

FLUX, TILED = ("fill", "inpaint"), "tiled sd-base"


@pytest.fixture(params=[*FLUX, *VARIANTS, TILED])
def family(request: pytest.FixtureRequest) -> tuple[Adapter, Encoder, EditJob]:
    """An adapter, its encoder and a random edit with all that the family can draw."""
    name, rng = request.param, fresh_rng()
    if name in FLUX:
        config = config_of(request.getfixturevalue(f"tiny_{name}"))
    else:
        cache = {"entry_kind": "kv", "conv_halo": 2} if name == TILED else {}
        folders = request.getfixturevalue("tiny_unets")
        config = config_of(folders[name.removeprefix("tiled ")], cache=cache)
    encoder = load_encoder(config)
    settings: dict[str, Any] = {"strength": 0.8, "num_inference_steps": 5, "mask_ring": 1}
    if name == "inpaint":
        settings |= guided(rng)
    case = random_case(rng, **settings) if name in FLUX else unet_case(rng, **settings)
    return load_adapter(config), encoder, encode_case(encoder, case, "edit")


def prepared(adapter: Adapter, plain: EditJob) -> EditJob:
    return adapter.prepare_template(adapter.prepare(plain), 7)


def tensors(row: object) -> dict[str, torch.Tensor]:
    """All tensors in a row, by the way to them."""
    tensors: dict[str, torch.Tensor] = {}

    def look(x: object, path: str) -> None:
        if isinstance(x, torch.Tensor):
            tensors[path] = x.clone()
        elif isinstance(x, list | tuple):
            for i, item in enumerate(x):
                look(item, f"{path}[{i}]")
        elif hasattr(x, "__dataclass_fields__"):
            for name in x.__dataclass_fields__:
                look(getattr(x, name, None), f"{path}.{name}")

    look(row, "")
    return tensors


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


def test_rows_of_a_prepared_job_are_the_rows_of_the_job(
    family: tuple[Adapter, Encoder, EditJob],
) -> None:
    """Every tensor, bit for bit, again and again: no row writes to what was prepared. Whether the
    template was prepared too makes no difference.
    """
    adapter, encoder, plain = family
    prepare, prompt = adapter.prepare(plain), encoder.encode_prompt("")
    ready = adapter.prepare_template(prepare, 7)
    anchors = adapter.anchors(adapter.tokens(plain).total, 4, 1)
    kinds = (frozenset({"kv"}),) * adapter.blocks

    def primes(job: EditJob, noise_seed: int = 7) -> Any:
        return adapter.priming_row(job, anchors, prompt, noise_seed, kinds, "model")

    makers: tuple[Callable[[EditJob], Any], ...] = (
        adapter.dense_row,
        lambda job: adapter.cached_row(job, 7),
        primes,
    )
    for make in makers:
        expected = tensors(make(plain))
        assert len(expected) >= 3
        for source in (ready, ready, prepare):
            row = make(source)
            assert same(tensors(row), expected)
            while row.step < row.steps:
                adapter.step([row], None)
    assert not same(tensors(primes(plain, 8)), tensors(primes(plain)))
    assert adapter.sigmas(ready) == adapter.sigmas(plain)


def test_a_prepared_jobs_mask_is_not_looked_at_again(
    family: tuple[Adapter, Encoder, EditJob],
) -> None:
    """The engine's thread counts edits without a look at a million pixels."""
    adapter, _, plain = family
    ready = replace(prepared(adapter, plain), edit_mask=np.zeros((0, 0), np.uint8))
    assert adapter.tokens(ready) == adapter.tokens(plain)
    counted, expected = adapter.totals(ready), adapter.totals(plain)
    assert (counted.active, counted.convolved) == (expected.active, expected.convolved)


def test_a_registered_template_has_no_mask(family: tuple[Adapter, Encoder, EditJob]) -> None:
    """It is prepared and counted to be primed."""
    adapter, encoder, edit = family
    plain = replace(edit, edit_mask=np.zeros_like(edit.edit_mask))
    ready, prompt = prepared(adapter, plain), encoder.encode_prompt("")
    assert adapter.tokens(ready).active == 0
    assert adapter.totals(ready) is not None
    kinds = (frozenset({"kv"}),) * adapter.blocks
    anchors = adapter.anchors(adapter.tokens(plain).total, 4, 1)
    adapter.step([adapter.priming_row(ready, anchors, prompt, 7, kinds, "model")], None)


def test_the_engines_thread_draws_nothing(tiny_fill: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither for an edit nor for its template, which it primes."""
    drew: list[str] = []
    draw = latents.draw

    def watched(*args: Any) -> torch.Tensor:
        drew.append(threading.current_thread().name)
        return draw(*args)

    modules = [m for name, m in sys.modules.items() if name.startswith("maskserve_engine.")]
    for module in modules:
        if getattr(module, "draw", None) is draw:
            monkeypatch.setattr(module, "draw", watched)
    encoder = load_encoder(config_of(tiny_fill))
    engine = make_engine(tiny_fill, encoder)
    try:
        assert edit(engine, job(encoder, 0, "dense", cache="off")).meta["cache"] == "off"
        assert len(drew) == 3  # image, noise, masked image: its template is not asked for
        whole = job(encoder, 0, "whole")
        edit(engine, replace(whole, edit_mask=np.full_like(whole.edit_mask, 255)))
        assert len(drew) == 6  # nor is that of an edit whose mask makes it dense
        assert edit(engine, job(encoder, 0, "cached", cache="require")).meta["cache"] == "hit"
        assert len(drew) == 10
        assert engine.prime(job(encoder, 1, "template")).result(30) == "priming"
    finally:
        engine.close(5.0)
    assert set(drew) == {threading.current_thread().name}


_POOLS = """
import os, threading
from maskserve_common.config import Config
from maskserve_engine.stages.unused_libraries import hide_unused_libraries
hide_unused_libraries(Config(), text=False)
import numpy as np, torch
from maskserve_benchmarks.edits.admission import large_job, meta_engine

torch.set_num_threads(3)
engine, job = meta_engine(), large_job("auto", 0)

def native():
    return len(os.listdir("/proc/self/task")) - threading.active_count()

left = []

def leaves(prepare):
    before = native()
    prepare()
    left.append(native() - before)

def rival(job):
    engine.adapter.prepare_template(engine.adapter.prepare(job), 7)

for prepare in (lambda: engine.prepared(job), lambda: rival(job)):
    thread = threading.Thread(target=leaves, args=(prepare,))
    thread.start()
    thread.join()
print(*left, torch.get_num_threads())
"""


def test_preparing_leaves_no_pool_of_threads() -> None:
    command = [sys.executable, "-c", _POOLS]
    result = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, check=True)
    prepared_count, rival, threads = map(int, result.stdout.split())
    assert prepared_count == 0 < rival
    assert threads == 3
