"""Cached blocks: the real blocks' layers, run under torch's counter on the tokens a cached row
computes. On the meta device, where shapes are all there is.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from diffusers import FluxTransformer2DModel, UNet2DConditionModel
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from maskserve_engine.families.flux.spec import flux_work
from maskserve_engine.families.unet.spec import unet_work
from maskserve_engine.planning.flops import KINDS
from tests.support.flop_count import counted
from tests.support.model_configs import TINY_FLUX, TINY_SDXL

pytestmark = pytest.mark.each_value


@pytest.fixture(autouse=True)
def on_meta() -> Iterator[None]:
    with torch.device("meta"):
        yield


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
    width, attn1, cross = block.attn1.to_q.in_features, block.attn1, block.attn2
    image, words = zeros(active, width), zeros(text, 40)
    for layer in (attn1.to_q, attn1.to_k, attn1.to_v, attn1.to_out[0]):
        layer(image)
    keys_of_inactive(attn1, kind, total - active, width)
    attend(image, zeros(total, width), attn1.heads)
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
