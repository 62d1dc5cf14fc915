"""One FLUX block over packed rows, with the real modules' weights and no patched forward.

Each function computes what the matching diffusers block computes for every row by itself
(diffusers/models/transformers/transformer_flux.py); the difference is where tokens lie and that a
cached row's inactive tokens enter as keys only (FlashPS §3.1, Fig. 5 and 7).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from maskserve_engine.families.attention import attention
from maskserve_engine.families.flux.packing import Packing, Stream

FillRest = Callable[[Tensor, Tensor, Packing], None]
"""Writes keys and values of the inactive tokens into buffers [keys, heads, head_dim]."""

CaptureKeys = Callable[[Tensor, Tensor], None]
"""Sees keys (after norm and rotary embedding) and values in row order."""


@dataclass(frozen=True, slots=True)
class Parts:
    """The modules of a FluxTransformer2DModel, found once: a module looks each of its own up by
    name whenever asked.
    """

    x_embedder: Any
    time_text_embed: Any
    double_blocks: tuple[Any, ...]
    single_blocks: tuple[Any, ...]
    norm_out: Any
    proj_out: Any

    @classmethod
    def of(cls, model: Any) -> Parts:
        return cls(
            model.x_embedder,
            model.time_text_embed,
            tuple(model.transformer_blocks),
            tuple(model.single_transformer_blocks),
            model.norm_out,
            model.proj_out,
        )


def rotate(x: Tensor, cis: Tensor) -> Tensor:
    """Rotary embedding of x [N, heads, head_dim] by cis [N, head_dim / 2], complex."""
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * cis[:, None]).flatten(-2).to(x.dtype)


def _heads(x: Tensor, head_dim: int) -> Tensor:
    return x.unflatten(-1, (-1, head_dim))


def _clip(x: Tensor) -> Tensor:
    return x.clip(-65504, 65504) if x.dtype == torch.float16 else x


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    packing: Packing,
    fill: FillRest | None,
    capture: CaptureKeys | None,
) -> Tensor:
    """Attention of the computed tokens, in row order, over all of each row's keys: [N, width]."""
    if capture is not None:
        capture(k, v)
    if fill is None:
        return attention(q, k, v, packing.computed).flatten(1)
    keys = k.new_empty(packing.all_keys.k_spans[-1][1], *k.shape[1:])
    values = torch.empty_like(keys)
    packing.place(k, keys)
    packing.place(v, values)
    fill(keys, values, packing)
    return attention(q, keys, values, packing.all_keys).flatten(1)


def double_block(
    block: Any,
    text: Tensor,
    image: Tensor,
    emb: Tensor,
    packing: Packing,
    cis: Tensor,
    fill: FillRest | None = None,
    capture: CaptureKeys | None = None,
) -> tuple[Tensor, Tensor]:
    """A FluxTransformerBlock.

    Args:
        block: the diffusers module.
        text: [N_text, width], text stream.
        image: [N_image, width], image stream.
        emb: [R, width], SiLU of the rows' time-text embedding.
        packing: where the rows lie.
        cis: [N, head_dim / 2] complex rotary factors in row order.
        fill: writes the inactive tokens' keys and values; None when there are none.
        capture: sees the computed keys and values (priming).

    Returns:
        text and image streams after the block.
    """
    attn, texts, images = block.attn, packing.text_stream, packing.image_stream
    shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = block.norm1.linear(emb).chunk(6, dim=1)
    c_shift, c_scale, c_gate, c_mlp_shift, c_mlp_scale, c_mlp_gate = block.norm1_context.linear(
        emb
    ).chunk(6, dim=1)

    x = images.modulate(block.norm1.norm(image), scale, shift)
    c = texts.modulate(block.norm1_context.norm(text), c_scale, c_shift)
    d = attn.head_dim
    q = packing.rows_from(
        attn.norm_added_q(_heads(attn.add_q_proj(c), d)), attn.norm_q(_heads(attn.to_q(x), d))
    )
    k = packing.rows_from(
        attn.norm_added_k(_heads(attn.add_k_proj(c), d)), attn.norm_k(_heads(attn.to_k(x), d))
    )
    v = packing.rows_from(_heads(attn.add_v_proj(c), d), _heads(attn.to_v(x), d))
    attended = _attend(rotate(q, cis), rotate(k, cis), v, packing, fill, capture)
    c_attended, x_attended = packing.split(attended)

    image = images.add_gated(image, gate, attn.to_out[0](x_attended))
    image = images.add_gated(
        image, mlp_gate, block.ff(images.modulate(block.norm2(image), mlp_scale, mlp_shift))
    )
    text = texts.add_gated(text, c_gate, attn.to_add_out(c_attended))
    text = texts.add_gated(
        text,
        c_mlp_gate,
        block.ff_context(texts.modulate(block.norm2_context(text), c_mlp_scale, c_mlp_shift)),
    )
    return _clip(text), image


def single_block(
    block: Any,
    x: Tensor,
    emb: Tensor,
    packing: Packing,
    cis: Tensor,
    fill: FillRest | None = None,
    capture: CaptureKeys | None = None,
) -> Tensor:
    """A FluxSingleTransformerBlock over x [N, width] in row order; arguments as double_block."""
    attn, rows = block.attn, packing.row_stream
    shift, scale, gate = block.norm.linear(emb).chunk(3, dim=1)
    normed = rows.modulate(block.norm.norm(x), scale, shift)
    d = attn.head_dim
    q = attn.norm_q(_heads(attn.to_q(normed), d))
    k = attn.norm_k(_heads(attn.to_k(normed), d))
    v = _heads(attn.to_v(normed), d)
    attended = _attend(rotate(q, cis), rotate(k, cis), v, packing, fill, capture)
    mlp = block.act_mlp(block.proj_mlp(normed))
    return _clip(rows.add_gated(x, gate, block.proj_out(torch.cat((attended, mlp), dim=1))))


def project_rest(
    block: Any, hidden: Tensor, emb: Tensor, stream: Stream, cis: Tensor
) -> tuple[Tensor, Tensor]:
    """Keys and values of inactive image tokens from their hidden states (FlashPS Fig. 5).

    Args:
        block: a double or single block.
        hidden: [M, width] at the block's input, packed by row.
        emb: [R, width], as in double_block.
        stream: where the rows lie in `hidden`.
        cis: [M, head_dim / 2] complex rotary factors.

    Returns:
        keys (after norm and rotary embedding) and values, [M, heads, head_dim].
    """
    norm = block.norm1 if hasattr(block, "norm1") else block.norm
    parts = norm.linear(emb).chunk(6 if hasattr(block, "norm1") else 3, dim=1)
    normed = stream.modulate(norm.norm(hidden), parts[1], parts[0])
    attn = block.attn
    keys = rotate(attn.norm_k(_heads(attn.to_k(normed), attn.head_dim)), cis)
    return keys, _heads(attn.to_v(normed), attn.head_dim)


def last_layer(model: Parts, image: Tensor, emb: Tensor, stream: Stream) -> Tensor:
    """What FluxTransformer2DModel does after its blocks.

    Args:
        model: whose last modules are run.
        image: [N, width], computed image tokens.
        emb: [R, width], SiLU of the rows' time-text embedding.
        stream: how the rows lie in `image`.

    Returns:
        [N, out_channels].
    """
    scale, shift = model.norm_out.linear(emb.to(image.dtype)).chunk(2, dim=1)
    return model.proj_out(stream.modulate(model.norm_out.norm(image), scale, shift))
