"""No edit waits for a kernel that is compiled in front of it, nor for a plan of cuDNN: the warm-up
has had them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import patch

import numpy as np
import pytest
import torch

from maskserve_engine.base.job import EditJob
from maskserve_engine.batch.padding import Sizes
from maskserve_engine.families.adapter import Adapter
from maskserve_engine.families.encoder import Encoder
from maskserve_engine.families.mmdit import adapter as flow_adapter
from maskserve_engine.families.mmdit.adapter import FlowAdapter
from maskserve_engine.families.registry import load_adapter, load_encoder
from maskserve_engine.families.unet.adapter import UnetAdapter
from maskserve_engine.layers.shrink_expand import compile_kernels
from maskserve_engine.loop.engine import Engine
from maskserve_engine.loop.warm_up import warm_up
from maskserve_engine.start.assembly import assemble
from maskserve_studies.kernels.fake_cuda import DEVICE, FakeCuda, fake_weights
from maskserve_studies.kernels.kernel_counts import MIXED, fake_bench
from tests.fakes.jobs import config_of, encode_case, random_case, unet_case
from tests.fakes.tiny_families import FAMILIES
from tests.support.draws import fresh_rng
from tests.support.first_calls import FirstCalls
from tests.support.sink import Sink

T = TypeVar("T")
MOST = 4
"""Rows of a step."""
EDITS = 12
REPEATED = (1, 8, 60)
"""How often an edit's prompt is said: short, middle and long ones."""
SECTIONS = {
    "qwen-image": {"native_resolution": 128, "max_sequence_length": 192},
    "z-image-turbo": {"native_resolution": 128, "max_sequence_length": 160, "guidance_scale": 0},
}
"""Settings with which a model whose prompts have any length has lone steps of several sizes."""


def aside(call: Callable[[], T]) -> T:
    """Return what a call in another thread returns, where tensors are real."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call).result()


def on_fake(real: Adapter) -> Adapter:
    """Return the adapter with its model on the fake device, and recorded steps."""
    assert isinstance(real, FlowAdapter | UnetAdapter)
    model, rule = fake_weights(real.model.to("meta")), real._refresh_rule
    if isinstance(real, UnetAdapter):
        return UnetAdapter(
            real.spec, model, real.sampler, exact_vae=False, graphs=True, refresh_rule=rule
        )
    return type(real)(real.spec, model, real.sampler, recorded_rows=2.3, refresh_rule=rule)


@contextmanager
def engine_on(
    folder: Path, real: Adapter, encoder: Encoder, model_section: Mapping[str, int]
) -> Iterator[Engine]:
    """An engine on the fake device of the context, with recorded steps of a real adapter's
    model.
    """
    adapter = on_fake(real)
    config = config_of(
        folder,
        model={**model_section, "device": str(DEVICE), "dtype": "bfloat16"},
        cache={"budget_bytes": 2**28},
        engine={"max_rows": MOST},
    )
    engine = assemble(config, adapter, lambda: aside(lambda: encoder.encode_prompt("")))
    engine.output.start()

    def anchors(*of: int) -> object:
        return aside(lambda: real.anchors(*of))

    with patch.object(adapter, "anchors", anchors), adapter.session():
        yield engine
    engine.output.close(5.0)
    engine.cache.store.close()


def edits_of(encoder: Encoder, side: int) -> Iterator[EditJob]:
    """First edits, of pictures of the model's size, by masks of any usual size and prompts of any
    length.
    """
    rng, is_guided = fresh_rng(), encoder.spec.family == "unet"
    draw = unet_case if is_guided else random_case
    guidance: dict[str, Any] = {"guidance_scale": 7.5} if is_guided else {}
    for number in range(EDITS):
        steps = int(rng.integers(4, 12))
        case = draw(rng, num_inference_steps=steps, strength=1.0, **guidance)
        mask = np.zeros((side, side), np.uint8)
        top, left = (int(rng.integers(0, side // 2)) for _ in range(2))
        height, width = (int(rng.integers(1, side // 2)) for _ in range(2))
        mask[top : top + height, left : left + width] = 255
        pixels = rng.integers(0, 256, (side, side, 3), dtype=np.uint8)
        prompt = " ".join([case.prompt] * REPEATED[number % len(REPEATED)])
        case = replace(case, pixels=pixels, mask=mask, prompt=prompt)
        yield aside(partial(encode_case, encoder, case, str(number)))


def lone_sizes(engine: Engine) -> set[Sizes]:
    """Return the sizes of lone steps that were recorded."""
    adapter = engine.adapter
    assert isinstance(adapter, FlowAdapter | UnetAdapter)
    assert adapter.weights.graphs is not None
    recorded = [key for key, step in adapter.weights.graphs._steps.items() if step is not None]
    return {key for key in recorded if isinstance(key, Sizes) and key.passes == 1}


def first_calls(folder: Path, **model_section: int) -> set[Hashable]:
    """Return what edits that come and go do first, and the warm-up has not done: kernels, plans,
    and recorded sizes of lone steps.
    """
    encoder = load_encoder(config_of(folder, model=model_section))
    real = load_adapter(config_of(folder, model={**model_section, "dtype": "bfloat16"}))
    with (
        FakeCuda() as cuda,
        FirstCalls() as calls,
        engine_on(folder, real, encoder, model_section) as engine,
    ):
        planner, adapter = engine.runner.planner, engine.adapter
        warm_up(engine.config, adapter, engine._store_and_kinds(), planner)
        warm = calls.keys | lone_sizes(engine)
        edits = edits_of(encoder, adapter.spec.native_resolution)
        waiting: list[Sink] = []
        for turn, job in enumerate(edits):
            waiting.append(Sink())
            aside(partial(engine.submit, job, waiting[-1]))
            for _ in range(2 + turn % 3 * 4):
                if len(engine.manager.scheduler) or not engine.inbox.empty():
                    engine.run_once()
                    cuda.catch_up()
        while len(engine.manager.scheduler):
            engine.run_once()
            cuda.catch_up()
        assert all(sink.final() for sink in waiting)
        return (calls.keys | lone_sizes(engine)) - warm


def is_plan(call: Hashable) -> bool:
    return str(call).startswith("('attention'")


def brief(call: Hashable) -> str:
    """Return a kernel's name and constants, of its whole key."""
    if isinstance(call, Sizes):
        return str(call)
    assert isinstance(call, tuple)
    name, *parts = call
    return f"{name} {[part for part in parts if is_plan(call) or 'constexpr' in part]}"


@pytest.mark.parametrize(
    "name",
    [
        "flux-fill",
        "klein",
        "sdxl-base",
        pytest.param("qwen-image", marks=pytest.mark.slow),  # minutes
        pytest.param("z-image-turbo", marks=pytest.mark.slow),
    ],
)
def test_a_first_edit_compiles_and_plans_nothing(name: str, tmp_path: Path) -> None:
    calls = first_calls(FAMILIES[name](tmp_path / name), **SECTIONS.get(name, {}))
    assert list(map(brief, calls)) == []


@pytest.mark.parametrize("ranks", [(16,), (4, 40)])
def test_an_edit_with_a_lora_compiles_none_of_its_kernels(ranks: tuple[int, ...]) -> None:
    with FakeCuda(), FirstCalls() as calls:
        compile_kernels(DEVICE, torch.bfloat16)
        warm = set(calls.keys)
        assert len(warm) == 2
        bench = fake_bench((1, 1), "int8")
        bench.fill_entry("kv")
        rows = [bench.row(ratio, seed) for seed, ratio in enumerate(MIXED[: len(ranks)])]
        for row, rank in zip(rows, ranks, strict=True):
            row.adapters = ((bench.lora(rank), 0.8),)
        bench.step(rows, "kv")
        new = calls.keys - warm
    of_loras = [call for call in new if str(call).startswith(("('shrink", "('expand"))]
    assert list(map(brief, of_loras)) == []


def test_without_rows_of_all_lengths_edits_plan_attention(
    tiny_fill: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flow_adapter, "plans_lengths", lambda device: False)
    assert any(map(is_plan, first_calls(tiny_fill)))
