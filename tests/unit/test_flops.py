"""Counted work against torch's own counter on the real diffusers classes, at tiny size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import FluxTransformer2DModel, UNet2DConditionModel
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.flop_counter import FlopCounterMode

from maskserve_core.flops import KINDS, ModelWork, RowTokens, flop_limit, flux_work
from maskserve_core.flops_unet import unet_work

FLUX_DEV = {
    "num_attention_heads": 24,
    "attention_head_dim": 128,
    "in_channels": 64,
    "num_layers": 19,
    "num_single_layers": 38,
    "pooled_projection_dim": 768,
    "joint_attention_dim": 4096,
    "guidance_embeds": True,
}
TINY_FLUX = {
    "patch_size": 1,
    "in_channels": 20,
    "out_channels": 12,
    "num_layers": 2,
    "num_single_layers": 3,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "joint_attention_dim": 24,
    "pooled_projection_dim": 10,
    "axes_dims_rope": (4, 6, 6),
}
TINY_SDXL = {
    "in_channels": 4,
    "out_channels": 4,
    "sample_size": 16,
    "block_out_channels": (32, 64, 96),
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
    "layers_per_block": 2,
    "transformer_layers_per_block": (1, 2, 3),
    "attention_head_dim": (2, 4, 6),
    "cross_attention_dim": 40,
    "use_linear_projection": True,
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 8,
    "projection_class_embeddings_input_dim": 68,
    "norm_num_groups": 8,
}
TINY_SD21 = {
    "in_channels": 9,
    "out_channels": 4,
    "sample_size": 16,
    "block_out_channels": (32, 64, 96, 96),
    "down_block_types": ("CrossAttnDownBlock2D",) * 3 + ("DownBlock2D",),
    "up_block_types": ("UpBlock2D",) + ("CrossAttnUpBlock2D",) * 3,
    "layers_per_block": 2,
    "attention_head_dim": (2, 4, 6, 6),
    "cross_attention_dim": 40,
    "use_linear_projection": True,
    "norm_num_groups": 8,
}


def counted(run: Callable[[], Any]) -> int:
    """What torch counts; the math kernel, because the CPU's fused one is not in its registry."""
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops()


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


# --- Cached rows: the real layers, applied to the tokens a cached row computes. --------------


def attend(query: torch.Tensor, key: torch.Tensor, heads: int) -> torch.Tensor:
    def split(x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (heads, -1)).transpose(1, 2)

    return scaled_dot_product_attention(split(query), split(key), split(key))


def zeros(tokens: int, width: int) -> torch.Tensor:
    return torch.zeros(1, tokens, width)


def keys_of_inactive(attn: nn.Module, kind: str, inactive: int, width: int) -> None:
    if kind == "project":
        attn.to_k(zeros(inactive, width))
        attn.to_v(zeros(inactive, width))


def run_double(block: Any, kind: str, active: int, total: int, text: int) -> None:
    width, attn = 32, block.attn
    image, words, temb = zeros(active, width), zeros(text, width), torch.zeros(1, width)
    block.norm1(image, emb=temb)
    block.norm1_context(words, emb=temb)
    for layer in (attn.to_q, attn.to_k, attn.to_v, attn.to_out[0], block.ff):
        layer(image)
    for layer in (
        attn.add_q_proj,
        attn.add_k_proj,
        attn.add_v_proj,
        attn.to_add_out,
        block.ff_context,
    ):
        layer(words)
    keys_of_inactive(attn, kind, total - active, width)
    attend(zeros(active + text, width), zeros(total + text, width), attn.heads)


def run_single(block: Any, kind: str, active: int, total: int, text: int) -> None:
    width, attn = 32, block.attn
    joined = zeros(active + text, width)
    block.norm(joined, emb=torch.zeros(1, width))
    for layer in (attn.to_q, attn.to_k, attn.to_v, block.proj_mlp):
        layer(joined)
    block.proj_out(zeros(active + text, 5 * width))
    keys_of_inactive(attn, kind, total - active, width)
    attend(joined, zeros(total + text, width), attn.heads)


def run_unet_block(block: Any, kind: str, active: int, total: int, text: int) -> None:
    width, own, cross = block.attn1.to_q.in_features, block.attn1, block.attn2
    image, words = zeros(active, width), zeros(text, 40)
    for layer in (own.to_q, own.to_k, own.to_v, own.to_out[0]):
        layer(image)
    keys_of_inactive(own, kind, total - active, width)
    attend(image, zeros(total, width), own.heads)
    for layer, x in ((cross.to_q, image), (cross.to_k, words), (cross.to_v, words)):
        layer(x)
    cross.to_out[0](image)
    attend(image, zeros(text, width), cross.heads)
    block.ff(image)


@pytest.mark.parametrize("kind", ["project", "kv"])
@pytest.mark.parametrize("active", [0, 1, 9, 24])
def test_flux_blocks_cached_are_what_their_layers_count(kind: str, active: int) -> None:
    model = FluxTransformer2DModel(**TINY_FLUX)
    work, text = flux_work(TINY_FLUX, 8, 12), 5
    row = work.row_at(active / 24, text)
    flops = work.block_flops(work.totals([row]))[:, KINDS.index(kind)]
    blocks = [*model.transformer_blocks, *model.single_transformer_blocks]
    runs = [run_double] * 2 + [run_single] * 3
    for block, run, expected in zip(blocks, runs, flops, strict=True):
        got = counted(lambda block=block, run=run: run(block, kind, active, 24, text))
        assert got == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("kind", ["project", "kv"])
def test_unet_blocks_cached_are_what_their_layers_count(kind: str) -> None:
    model = UNet2DConditionModel(**TINY_SDXL)
    work, text = unet_work(TINY_SDXL, 16, 16, guidance=False), 7
    row = work.row_at(0.25, text)
    flops = work.block_flops(work.totals([row]))[:, KINDS.index(kind)]
    attentions = [a for down in model.down_blocks for a in getattr(down, "attentions", [])]
    attentions += list(model.mid_block.attentions)
    attentions += [a for up in model.up_blocks for a in getattr(up, "attentions", [])]
    blocks = [b for a in attentions for b in a.transformer_blocks]
    assert len(blocks) == len(work.blocks)
    assert len(attentions) == len(work.before)
    for block, counted_block, expected in zip(blocks, work.blocks, flops, strict=True):
        total = work.tokens[counted_block.level]
        got = counted(
            lambda block=block, total=total: run_unet_block(block, kind, total // 4, total, text)
        )
        assert got == expected


# --- Properties. -----------------------------------------------------------------------------


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
    apart = sum(work.block_flops(work.totals([row])) for row in rows)
    np.testing.assert_allclose(together, apart, rtol=1e-12)
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
