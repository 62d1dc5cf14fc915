"""Counted work against torch's own counter on the real diffusers classes, at tiny size."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import FluxTransformer2DModel, UNet2DConditionModel

from maskserve_benchmarks.published_models import FLUX_DEV, SD21, SDXL
from maskserve_benchmarks.step_counts import flop_limit
from maskserve_common.line_fit import Line
from maskserve_engine.families.flux.spec import flux_work
from maskserve_engine.families.unet.spec import unet_work
from maskserve_engine.planning.cost_model import CostModel
from maskserve_engine.planning.flops import KINDS, KV, ModelWork, RowTokens, Totals
from maskserve_engine.planning.two_stream import step_costs
from tests.support.flop_count import counted
from tests.support.model_configs import SD21_INPAINT, TINY_FLUX, TINY_SD21, TINY_SDXL

pytestmark = pytest.mark.each_value


@pytest.fixture(autouse=True)
def on_meta() -> Iterator[None]:
    """Shapes are all that is counted; nothing is computed."""
    with torch.device("meta"):
        yield


def run_flux(model: Any, tokens: int, text: int, guidance: bool, rows: int = 1) -> Any:
    config = model.config
    return model(
        hidden_states=torch.zeros(rows, tokens, config.in_channels),
        encoder_hidden_states=torch.zeros(rows, text, config.joint_attention_dim),
        pooled_projections=torch.zeros(rows, config.pooled_projection_dim),
        timestep=torch.ones(rows),
        guidance=torch.ones(rows) if guidance else None,
        img_ids=torch.zeros(tokens, 3),
        txt_ids=torch.zeros(text, 3),
    )


@pytest.mark.parametrize("guidance", [False, True])
@pytest.mark.parametrize(("height", "width", "text"), [(8, 12, 5), (16, 4, 16)])
def test_flux_step_is_what_torch_counts(height: int, width: int, text: int, guidance: bool) -> None:
    config = {**TINY_FLUX, "guidance_embeds": guidance}
    model = FluxTransformer2DModel(**config)
    work = flux_work(config, height, width)
    row = work.row_at(0.3, text)
    (tokens,) = work.tokens
    assert tokens == height * width // 4
    assert work.step_flops([row], "dense") == counted(
        lambda: run_flux(model, tokens, text, guidance)
    )
    assert work.step_flops([row, row], "dense") == counted(
        lambda: run_flux(model, tokens, text, guidance, rows=2)
    )


@pytest.mark.parametrize("config", [TINY_SDXL, TINY_SD21], ids=["sdxl", "sd21"])
@pytest.mark.parametrize(("height", "width"), [(16, 16), (24, 8), (18, 14)])
def test_unet_step_is_what_torch_counts(config: dict[str, Any], height: int, width: int) -> None:
    model = UNet2DConditionModel(**config)
    text = 7
    added = {"text_embeds": torch.zeros(2, 20), "time_ids": torch.zeros(2, 6)}
    flops = counted(
        lambda: model(
            torch.zeros(2, config["in_channels"], height, width),
            torch.ones(2),
            encoder_hidden_states=torch.zeros(2, text, 40),
            added_cond_kwargs=added,
        )
    )
    work = unet_work(config, height, width, guidance=True)
    assert work.step_flops([work.row_at(0.3, text)], "dense") == flops
    alone = unet_work(config, height, width, guidance=False)
    assert 2 * alone.step_flops([work.row_at(0.3, text)], "dense") == flops


@pytest.mark.parametrize(
    ("config", "side"), [(SDXL, 128), (SD21_INPAINT, 96)], ids=["sdxl", "sd21"]
)
def test_real_unet_sizes(config: dict[str, Any], side: int) -> None:
    model = UNet2DConditionModel(**config)
    added = {"text_embeds": torch.zeros(2, 1280), "time_ids": torch.zeros(2, 6)}
    flops = counted(
        lambda: model(
            torch.zeros(2, config["in_channels"], side, side),
            torch.ones(2),
            encoder_hidden_states=torch.zeros(2, 77, config["cross_attention_dim"]),
            added_cond_kwargs=added,
        )
    )
    work = unet_work(config, side, side)
    assert work.step_flops([work.row_at(0.1, 77)], "dense") == flops


def test_real_flux_size() -> None:
    model = FluxTransformer2DModel(**FLUX_DEV)
    flops = counted(lambda: run_flux(model, 4096, 512, guidance=True))
    work = flux_work(FLUX_DEV, 128, 128)
    assert work.step_flops([work.row_at(0.1, 512)], "dense") == flops


def every_work() -> list[ModelWork]:
    return [
        flux_work(FLUX_DEV, 128, 128),
        unet_work(TINY_SDXL, 16, 16),
        unet_work(TINY_SD21, 16, 16),
    ]


@pytest.mark.parametrize("work", every_work(), ids=["flux", "sdxl", "sd21"])
def test_a_mask_over_everything_costs_what_dense_costs(work: ModelWork) -> None:
    flops = work.block_flops(work.totals([work.row_at(1.0, 77)]))
    np.testing.assert_allclose(flops, flops[:, :1] * np.ones(3), rtol=1e-12)


@pytest.mark.parametrize("work", every_work(), ids=["flux", "sdxl", "sd21"])
def test_a_batch_costs_the_sum_of_its_rows(work: ModelWork) -> None:
    rows = [work.row_at(m, t) for m, t in ((0.05, 77), (0.3, 20), (0.9, 512))]
    together = work.block_flops(work.totals(rows))
    total = sum(work.block_flops(work.totals([row])) for row in rows)
    np.testing.assert_allclose(together, total, rtol=1e-12)
    for kind in KINDS:
        assert work.step_flops(rows, kind) == pytest.approx(
            sum(work.step_flops([row], kind) for row in rows)
        )


@pytest.mark.parametrize(("mask_ratio", "limit"), [(0.05, 6.43), (0.11, 4.79), (0.2, 3.46)])
def test_flux_1024_limits(mask_ratio: float, limit: float) -> None:
    work = flux_work(FLUX_DEV, 128, 128)
    assert flop_limit(work, mask_ratio, 512, blocks_only=True) == pytest.approx(limit, abs=5e-3)
    # Embedders and the final layer, on both sides, take 0.1 % off.
    whole = flop_limit(work, mask_ratio, 512)
    assert limit * 0.997 < whole < limit
    # K and V of inactive tokens cost `project` more than they cost dense rows in proportion.
    assert flop_limit(work, mask_ratio, 512, kind="project") < whole


def test_rows_that_do_not_fit_are_refused() -> None:
    work = unet_work(TINY_SDXL, 16, 16)
    with pytest.raises(ValueError, match="active"):
        work.totals([RowTokens((1.0,), 7)])
    with pytest.raises(ValueError, match="active"):
        work.totals([RowTokens((257.0, 1.0, 1.0), 7)])
    with pytest.raises(ValueError, match="mask_ratio"):
        work.row_at(1.5, 7)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("mid_block_type", "UNetMidBlock2DSimpleCrossAttn"),
        ("addition_embed_type", "image"),
        ("down_block_types", ("KDownBlock2D",) * 3),
    ],
)
def test_unets_with_uncounted_parts_are_refused(key: str, value: Any) -> None:
    with pytest.raises(ValueError, match=key):
        unet_work({**TINY_SDXL, key: value}, 16, 16)


@pytest.mark.parametrize(
    ("name", "work"),
    [
        ("", flux_work(FLUX_DEV, 128, 128)),
        ("SD 2.1, ", unet_work(SD21, 96, 96, guidance=False, recorded=True)),
        ("SDXL, ", unet_work(SDXL, 128, 128, guidance=False, recorded=True)),
    ],
)
def test_launches_are_within_a_tenth_of_those_counted_on_a_fake_device(
    name: str, work: ModelWork
) -> None:
    table = json.loads(Path("docs/benchmarks/kernels.json").read_text(encoding="utf-8"))
    for kind, case in zip(KINDS, ("dense", "project int8", "kv int8"), strict=True):
        counted_there = table.get(f"{name}{case}, 1 row")
        if counted_there is not None:
            launches = work.batch_launches((kind,) * len(work.blocks))
            assert launches == pytest.approx(counted_there["step"], rel=0.1)


@pytest.mark.parametrize(("kind", "case"), [("dense", "dense"), ("kv", "kv int8")])
def test_launches_of_flux_steps_that_are_recorded_are_counted_too(kind: str, case: str) -> None:
    table = json.loads(Path("docs/benchmarks/kernels.json").read_text(encoding="utf-8"))
    work = flux_work(FLUX_DEV, 128, 128, recorded=True)
    launches = work.batch_launches((kind,) * len(work.blocks))
    assert launches == pytest.approx(table[f"{case}, 1 row, graphs"]["step"], rel=0.1)


def test_rows_with_tiles_launch_a_recorded_step_each() -> None:
    """Rows that share a call launch as many kernels as one, and no dense row is in their calls."""
    table = json.loads(Path("docs/benchmarks/kernels.json").read_text(encoding="utf-8"))
    work = unet_work(SDXL, 128, 128, guidance=False, halo=1, recorded=True)
    model = CostModel("gpu", Line(0.0, 0.0), launch=1.0)
    guided = work.totals([work.row_at(0.2, 77)] * 2)
    alone = replace(guided, alone=1, together=False)

    def launches(rows: list[Totals], dense: Totals | None = None) -> float:
        costs = step_costs(work, Totals.sum_of(rows), model, {}, dense=dense)
        return costs.host([KV] * len(work.blocks))

    one = table["SDXL, own int8, 1 guided row"]["step"]
    assert launches([alone]) == launches([guided] * 4) == pytest.approx(one, rel=0.1)
    four = table["SDXL, own int8, 4 guided rows, mixed"]["step"]
    assert launches([alone] * 4) == pytest.approx(four, rel=0.1)
    assert launches([alone] * 4 + [guided] * 2) == launches([alone] * 5)
    assert launches([alone] * 4, dense=guided) == launches([alone] * 4) + work.fixed_launches


def test_launches_of_steps_that_are_not_recorded_are_counted_too() -> None:
    table = json.loads(Path("docs/benchmarks/kernels.json").read_text(encoding="utf-8"))
    work = unet_work(SDXL, 128, 128, guidance=False)
    launches = work.batch_launches(("kv",) * len(work.blocks))
    counted_there = table["SDXL, kv int8, 1 guided row, no graphs"]["step"]
    assert launches == pytest.approx(counted_there, rel=0.1)
