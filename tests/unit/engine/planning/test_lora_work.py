"""Work that LoRAs add, against torch's own counter, and its price."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import FluxTransformer2DModel, UNet2DConditionModel
from peft import LoraConfig
from torch import nn

from maskserve_benchmarks.steps.replay import Replay
from maskserve_common.line_fit import Line
from maskserve_engine.families.flux.spec import flux_work
from maskserve_engine.families.registry import load_adapter, load_encoder
from maskserve_engine.families.specs import counted_work, load_spec
from maskserve_engine.families.unet.spec import unet_work
from maskserve_engine.families.unet.weights import places_of as unet_places
from maskserve_engine.layers.low_rank import Factors
from maskserve_engine.planning.cost_model import CostModel
from maskserve_engine.planning.entry_bytes import FORMATS
from maskserve_engine.planning.flops import LoraFlops, Totals
from maskserve_engine.planning.planner import plan_totals
from maskserve_engine.planning.two_stream import step_costs
from maskserve_engine.spec.estimate import pricing_of
from tests.fakes.jobs import config_of, encode_case, random_case, unet_case
from tests.support import cached_rows
from tests.support.draws import fresh_rng
from tests.support.flop_count import counted
from tests.support.model_configs import TINY_FLUX, TINY_SD21, TINY_SDXL

pytestmark = pytest.mark.each_value

UNETS = pytest.mark.parametrize("config", [TINY_SDXL, TINY_SD21], ids=["sdxl", "sd21"])


def with_lora(model: Any, layers: list[str]) -> dict[str, int]:
    """Give these layers a LoRA by PEFT; the numbers in each one's factors."""
    model.add_adapter(LoraConfig(r=3, target_modules=layers))
    return {
        name: layer.lora_A["default"].weight.numel() + layer.lora_B["default"].weight.numel()
        for name, layer in model.named_modules()
        if hasattr(layer, "lora_A")
    }


def layers_of(model: nn.Module) -> list[str]:
    return [n for n, m in model.named_modules() if isinstance(m, nn.Linear | nn.Conv2d)]


@pytest.mark.parametrize("layers", ["all", "some"])
def test_a_dense_step_of_flux_adds_what_torch_counts(layers: str) -> None:
    with torch.device("meta"):
        model: Any = FluxTransformer2DModel(**TINY_FLUX)
    tokens, text = 24, 5

    def run() -> None:
        with torch.device("meta"):
            model(
                hidden_states=torch.zeros(1, tokens, model.config.in_channels),
                encoder_hidden_states=torch.zeros(1, text, model.config.joint_attention_dim),
                pooled_projections=torch.zeros(1, model.config.pooled_projection_dim),
                timestep=torch.ones(1),
                guidance=torch.ones(1) if model.config.guidance_embeds else None,
                img_ids=torch.zeros(tokens, 3),
                txt_ids=torch.zeros(text, 3),
            )

    before = counted(run)
    names = layers_of(model)
    if layers == "some":
        names = list(fresh_rng().choice(names, len(names) // 2, replace=False))
    base = flux_work(TINY_FLUX, 8, 12)
    added = base.lora_work(with_lora(model, names))
    row = base.row_at(1.0, text)
    assert added.step_flops([row], "dense") == counted(run) - before > 0
    totals = base.totals([row]).with_loras([added])
    assert base.batch_flops(None, (), totals) == counted(run)
    assert base.batch_flops(None, (), totals.with_loras(())) == before


@UNETS
@pytest.mark.parametrize("layers", ["all", pytest.param("some", marks=pytest.mark.slow)])
def test_a_dense_step_of_a_unet_adds_what_torch_counts(config: dict[str, Any], layers: str) -> None:
    with torch.device("meta"):
        model: Any = UNet2DConditionModel(**config)
    height, width, text = 18, 14, 7

    def run() -> None:
        with torch.device("meta"):
            model(
                torch.zeros(2, config["in_channels"], height, width),
                torch.ones(2),
                encoder_hidden_states=torch.zeros(2, text, 40),
                added_cond_kwargs={
                    "text_embeds": torch.zeros(2, 20),
                    "time_ids": torch.zeros(2, 6),
                },
            )

    before, names = counted(run), list(unet_places(model))
    if layers == "some":
        names = list(fresh_rng().choice(names, len(names) // 2, replace=False))
    base = unet_work(config, height, width, guidance=True)
    added = base.lora_work(with_lora(model, names))
    row = base.row_at(1.0, text)
    assert added.step_flops([row], "dense") == counted(run) - before > 0


@pytest.mark.parametrize("net", ["fill", "sd-base"])
@pytest.mark.parametrize("kind", ["kv", "project"])
def test_a_cached_step_adds_what_torch_counts(
    net: str, kind: str, tiny_fill: Path, tiny_unets: dict[str, Path]
) -> None:
    """Counts the engine's own rows without the layers whose products serve several steps: a UNet
    computes keys and values of the prompt once, and FLUX its modulation for several steps.
    """
    folder = tiny_fill if net == "fill" else tiny_unets[net]
    config = config_of(folder)
    encoder, adapter = load_encoder(config), load_adapter(config)
    draw = random_case if net == "fill" else unet_case
    job = encode_case(encoder, draw(fresh_rng(), num_inference_steps=3), "r")
    places: Any = adapter
    factors = {
        name: Factors(torch.randn(2, *inner), torch.randn(out, 2, *[1] * len(inner[1:])))
        for name, place in places.places.items()
        if "norm" not in name and "attn2.to_" not in name and "embed" not in name
        for out, *inner in [place.shape]
    }
    replay = Replay(adapter)
    primed = cached_rows.Primed(adapter, encoder, job)

    def step(loras: tuple[Any, ...]) -> int:
        # Two rows: behind the last block a lone one of FLUX leaves its text out.
        rows = [cached_rows.cached(replay, job, primed) for _ in range(2)]
        for row in rows:
            adapter.attach(row, job, loras)
        kinds = (kind,) * adapter.blocks
        return counted(lambda: replay.step(rows, kinds))

    base, totals = adapter.work(*job.moments.shape[1:]), Totals.sum_of([adapter.totals(job)] * 2)
    layers = {name: factor.numbers for name, factor in factors.items()}
    lora = base.lora_work(layers)
    expected = base.batch_flops(totals.with_loras([lora]), (kind,) * adapter.blocks, None)
    expected -= base.batch_flops(totals, (kind,) * adapter.blocks, None)
    assert step(((adapter.low_rank(factors), 0.7),)) - step(()) == expected > 0


def test_what_loras_of_some_rows_add_is_theirs_alone_and_reaches_every_plan() -> None:
    base = flux_work(TINY_FLUX, 8, 12)
    lora, _ = base.typical_lora()
    plain, other = (base.totals([base.row_at(ratio, 5)]) for ratio in (0.2, 0.6))
    loras = plain.with_loras([lora, lora])
    total = loras + other
    assert total.added is not None
    assert np.array_equal(total.added.blocks, LoraFlops.count([lora, lora], plain).blocks)
    assert np.allclose(
        base.block_flops(total), base.block_flops(plain + other) + 2 * lora.block_flops(plain)
    )
    costs = CostModel("cpu", Line(0.0, 1.0))
    added = [step_costs(base, rows, costs, {}).compute.sum() for rows in (total, plain + other)]
    assert added[0] - added[1] == pytest.approx(2 * lora.block_flops(plain).sum())
    assert plan_totals(total, {}) != plan_totals(plain + other, {})


def test_a_lora_is_priced_by_the_bytes_of_its_file(tiny_fill: Path) -> None:
    spec = load_spec(tiny_fill)
    work = counted_work(spec, 16, 16)
    lora, nbytes = work.typical_lora()
    costs, text = CostModel("cpu", Line(0.0, 1e-9)), 7
    pricing = pricing_of(work, costs, FORMATS["float32"], text=text, anchors=1, lora=(lora, nbytes))
    tokens = work.tokens[0]
    for ratio in (0.0, 0.25, 1.0):
        row = work.row_at(ratio, text)
        cached = pricing.lora_seconds(3 * nbytes, ratio * tokens, tokens, cached=True)
        assert cached == pytest.approx(3e-9 * lora.step_flops([row], "kv"))
    dense = pricing.lora_seconds(nbytes, tokens, tokens, cached=False)
    assert dense == pytest.approx(1e-9 * lora.step_flops([work.row_at(1.0, text)], "dense"))
    assert replace(pricing, lora_byte=None).lora_seconds(nbytes, 1, tokens, cached=True) == 0.0
