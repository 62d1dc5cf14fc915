"""Qwen-Image-2.1's scales and gates, and its blocks' keys and values of text, computed once per
edit.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from maskserve_common.contracts.keys import STILL
from maskserve_engine.batch.transfer import moved
from maskserve_engine.cache.entries import AnchorEntry, BlockEntry, encode
from maskserve_engine.families.mmdit.blocks import Vectors, clip, embed, split, stream_post
from maskserve_engine.families.mmdit.spans import FixedWords
from maskserve_engine.families.qwen_image21.weights import QwenImage21Weights
from maskserve_engine.layers.attention import spans
from maskserve_engine.layers.fp8 import Fp8Linear
from maskserve_engine.layers.modulation import modulate
from maskserve_engine.layers.qk_norm_rope import qk_norm_rope
from maskserve_engine.layers.scatter_kv import scatter_kv, slots_of


def vectors(weights: QwenImage21Weights, timesteps: Tensor) -> tuple[Vectors, ...]:
    """Return the vectors of each step in the form of FLUX.1's blocks, with shifts of 0 and gates
    through tanh, from timesteps [S, R] of the sampler, 0 to 1000, float32.
    """
    assert weights.shared is not None
    assert weights.last_vectors is not None
    rows = [(row, row + 1) for row in range(timesteps.shape[1])]
    emb = embed(weights, timesteps, None, None)
    scale, gate, mlp_scale, mlp_gate = weights.shared.image(emb, rows).chunk(4, dim=-1)
    none = torch.zeros_like(scale)
    parts = none, 1 + scale, gate.tanh(), none, 1 + mlp_scale, mlp_gate.tanh()
    of_blocks = torch.cat(parts, dim=-1)
    last = torch.cat((1 + weights.last_vectors(emb, rows), none), dim=-1)
    return tuple(
        Vectors(((block_vectors, block_vectors),) * len(weights.blocks), (), end)
        for block_vectors, end in zip(of_blocks, last, strict=True)
    )


def fixed_words_entry(weights: QwenImage21Weights, words: FixedWords) -> AnchorEntry:
    """Return keys and values of text in all blocks; each token attends to those before it, at time
    0. Those visible to `words` must have been computed.
    """
    device = words.embeds.device
    [at_zero] = vectors(weights, torch.zeros(1, 1, device=device))
    shared = at_zero.double[0][0].view(6, -1).unbind()
    x, rows = weights.embedded(words.embeds), ((0, len(words)),)
    places = spans([len(tokens) for tokens in words.pictures])
    visible_tokens = places[-1][1] if places else 0
    slots = moved(slots_of(places), device) if places else None
    allowed = torch.ones(len(words), visible_tokens + len(words), dtype=torch.bool, device=device)
    allowed = allowed.tril(visible_tokens)
    block_entries = []
    for number, block in enumerate(weights.double_blocks):
        product: Any = block.image.qkv
        normed = modulate(x, shared[0], shared[1], isinstance(product, Fp8Linear))
        qk, v = split(product(normed, rows), weights.head_dim)
        assert block.norms is not None, "the model normalises queries and keys"
        qk_norm_rope(qk, block.norms[1], words.cis)
        q, k = qk.unbind(1)
        block_entries.append(
            BlockEntry(None, *(encode(tokens.flatten(1), "model") for tokens in (k, v)))
        )
        if number + 1 == len(weights.blocks):
            break  # no block reads the text after the last one
        keys, values = k.new_empty(2, visible_tokens + len(words), *k.shape[1:])
        if slots is not None:
            scatter_kv([tokens.source(number) for tokens in words.pictures], (keys, values), slots)
        keys[visible_tokens:], values[visible_tokens:] = k, v
        q, keys, values = (tokens.transpose(0, 1)[None] for tokens in (q, keys, values))
        attention_out = F.scaled_dot_product_attention(q, keys, values, attn_mask=allowed)
        attended = attention_out[0].transpose(0, 1).flatten(1)
        x, _ = stream_post(block.image, x, attended, shared, rows=rows, gated=True)
        x = clip(x)
    return AnchorEntry(STILL, tuple(block_entries))
