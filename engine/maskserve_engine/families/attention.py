"""Attention over packed rows: each row's queries see that row's keys and no others.

Rows are packed along the first axis without padding. On CUDA one variable-length kernel takes the
whole batch; elsewhere each row is one `scaled_dot_product_attention` call, or all rows together
where they have equal lengths.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

Span = tuple[int, int]


def spans(lengths: Sequence[int]) -> tuple[Span, ...]:
    """[begin, end) of each row in a stream packed from rows of these lengths."""
    out, begin = [], 0
    for length in lengths:
        out.append((begin, begin + length))
        begin += length
    return tuple(out)


def attention(
    query: Tensor, key: Tensor, value: Tensor, q_spans: Sequence[Span], k_spans: Sequence[Span]
) -> Tensor:
    """Scaled dot-product attention, row by row.

    Args:
        query: [Nq, heads, head_dim], rows packed at `q_spans`.
        key: [Nk, heads, head_dim], rows packed at `k_spans`.
        value: as `key`.
        q_spans: [begin, end) of each row's queries.
        k_spans: [begin, end) of each row's keys.

    Returns:
        [Nq, heads, head_dim] in the order of `query`.
    """
    if len(q_spans) == 1:
        return _dense(query[None], key[None], value[None])[0]
    if query.is_cuda and query.dtype in (torch.float16, torch.bfloat16):
        return _varlen(query, key, value, q_spans, k_spans)
    rows = len(q_spans)
    q_len, k_len = q_spans[0][1] - q_spans[0][0], k_spans[0][1] - k_spans[0][0]
    if all(e - b == q_len for b, e in q_spans) and all(e - b == k_len for b, e in k_spans):
        out = _dense(
            query.unflatten(0, (rows, q_len)),
            key.unflatten(0, (rows, k_len)),
            value.unflatten(0, (rows, k_len)),
        )
        return out.flatten(0, 1)
    out = torch.empty_like(query)
    for (qb, qe), (kb, ke) in zip(q_spans, k_spans, strict=True):
        out[qb:qe] = _dense(query[None, qb:qe], key[None, kb:ke], value[None, kb:ke])[0]
    return out


def _dense(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """[B, N, heads, head_dim] in and out."""
    return F.scaled_dot_product_attention(
        query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    ).transpose(1, 2)


def _varlen(
    query: Tensor, key: Tensor, value: Tensor, q_spans: Sequence[Span], k_spans: Sequence[Span]
) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    def cumulative(of: Sequence[Span]) -> Tensor:
        return torch.tensor([0, *(e for _, e in of)], dtype=torch.int32, device=query.device)

    out = varlen_attn(
        query,
        key,
        value,
        cumulative(q_spans),
        cumulative(k_spans),
        max(e - b for b, e in q_spans),
        max(e - b for b, e in k_spans),
    )
    assert isinstance(out, Tensor)  # a tuple only with return_aux
    return out
