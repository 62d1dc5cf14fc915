"""FLUX attention for training on CPUs: the same sums as diffusers' own, spelled as matmuls.

PyTorch's fused attention spends on its CPU backward pass, for sequences this short, several
times what plain matrix products cost.
"""

from __future__ import annotations

from typing import Any

import torch
from diffusers.models.embeddings import apply_rotary_emb
from torch.nn import functional


class MatmulAttention:
    """An attention processor for FluxTransformer2DModel, without masks or adapters."""

    def __init__(self, fused_since: int | None = None) -> None:
        """Create the processor. Sequences of at least `fused_since` tokens use PyTorch's fused
        attention.
        """
        self._fused_since = fused_since

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        image_rotary_emb: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Attend over image tokens alone (single blocks), or over image and text tokens (double
        blocks).
        """
        query, key, value = (
            project(hidden_states).unflatten(-1, (-1, attn.head_dim))
            for project in (attn.to_q, attn.to_k, attn.to_v)
        )
        query, key = _norm(query, attn.norm_q), _norm(key, attn.norm_k)
        text = 0
        if encoder_hidden_states is not None:
            text = encoder_hidden_states.shape[1]
            added = [
                project(encoder_hidden_states).unflatten(-1, (-1, attn.head_dim))
                for project in (attn.add_q_proj, attn.add_k_proj, attn.add_v_proj)
            ]
            query = torch.cat([_norm(added[0], attn.norm_added_q), query], dim=1)
            key = torch.cat([_norm(added[1], attn.norm_added_k), key], dim=1)
            value = torch.cat([added[2], value], dim=1)
        fused = self._fused_since is not None and query.shape[1] >= self._fused_since
        result = _mixed(query, key, value, image_rotary_emb, fused=fused)
        if encoder_hidden_states is None:
            return result
        return attn.to_out[0](result[:, text:]), attn.to_add_out(result[:, :text])


class FusedMatmulAttention:
    """The same for the single blocks of Flux2Transformer2DModel, which fuse their projections into
    one product.
    """

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        image_rotary_emb: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Attend over all tokens."""
        qkv, up = attn.to_qkv_mlp_proj(hidden_states).split(
            [3 * attn.inner_dim, attn.mlp_hidden_dim * attn.mlp_mult_factor], dim=-1
        )
        query, key, value = (x.unflatten(-1, (-1, attn.head_dim)) for x in qkv.chunk(3, dim=-1))
        query, key = _norm(query, attn.norm_q), _norm(key, attn.norm_k)
        mixed = _mixed(query, key, value, image_rotary_emb)
        return attn.to_out(torch.cat([mixed, attn.mlp_act_fn(up)], dim=-1))


def _mixed(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rotary: Any, *, fused: bool = False
) -> torch.Tensor:
    """Attention over (B, N, heads, width), returned as (B, N, heads · width)."""
    query = apply_rotary_emb(query, rotary, sequence_dim=1)
    key = apply_rotary_emb(key, rotary, sequence_dim=1)
    batch, tokens, heads, width = query.shape
    if fused:
        query, key = query.to(value.dtype), key.to(value.dtype)
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        mixed = functional.scaled_dot_product_attention(query, key, value)
        return mixed.transpose(1, 2).flatten(2)
    query, key, value = (
        x.transpose(1, 2).reshape(batch * heads, tokens, width) for x in (query, key, value)
    )
    weights = torch.bmm(query * width**-0.5, key.transpose(1, 2)).softmax(dim=-1)
    mixed = torch.bmm(weights.to(value.dtype), value).view(batch, heads, tokens, width)
    return mixed.transpose(1, 2).flatten(2)


def _norm(x: torch.Tensor, norm: torch.nn.RMSNorm) -> torch.Tensor:
    weight = norm.weight.to(x.dtype) if norm.weight is not None else None
    return functional.rms_norm(x, (x.shape[-1],), weight, norm.eps)
