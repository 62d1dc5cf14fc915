"""Attention over packed rows: each row's queries see that row's keys and no others.

Rows are packed along the first axis without padding. Which kernel runs follows from their lengths:

- all rows alike and nothing but computed tokens: one `scaled_dot_product_attention` call;
- on CUDA, anything else: one variable-length call. (cuDNN makes a plan for every new length, up to
  0.4 s each: it would stall at every new mask.)
- elsewhere, or where that kernel is missing: one call per row.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

Span = tuple[int, int]

_HALF = (torch.float16, torch.bfloat16)
_FLASH = {"FA3": (9,), "FA4": (9, 10)}
"""FlashAttention of packages, by torch's names, and the compute capabilities they are made for;
those before others are faster, or proven longer."""
_log = logging.getLogger(__name__)


def spans(lengths: Sequence[int]) -> tuple[Span, ...]:
    """[begin, end) of each row in a stream packed from rows of these lengths."""
    out, begin = [], 0
    for length in lengths:
        out.append((begin, begin + length))
        begin += length
    return tuple(out)


@dataclass(frozen=True)
class Segments:
    """Whose queries see which keys; made once for as long as the same rows go on."""

    q_spans: tuple[Span, ...]
    """[begin, end) of each row's queries."""
    k_spans: tuple[Span, ...]
    """[begin, end) of each row's keys."""
    q_ends: Tensor
    """[R + 1] int32, on the device: 0 and the end of each row's queries."""
    k_ends: Tensor
    """[R + 1] int32, of the keys."""
    q_uniform: int
    """Queries of each row where all have as many, else 0."""
    k_uniform: int
    """Keys of each row, likewise."""

    @property
    def q_longest(self) -> int:
        return max(end - begin for begin, end in self.q_spans)

    @property
    def k_longest(self) -> int:
        return max(end - begin for begin, end in self.k_spans)


def ends(of: Sequence[Span]) -> Tensor:
    """[R + 1] int32 on the host: 0 and the end of each span."""
    return torch.from_numpy(np.array([0, *(end for _, end in of)], np.int32))


def uniform(lengths: Sequence[int]) -> int:
    """The common length of all rows, or 0."""
    return lengths[0] if len(set(lengths)) == 1 else 0


def segments(queries: Sequence[int], keys: Sequence[int]) -> Segments:
    """Of rows with so many of each, on the host."""
    q_spans, k_spans = spans(queries), spans(keys)
    return Segments(q_spans, k_spans, ends(q_spans), ends(k_spans), uniform(queries), uniform(keys))


def attention(query: Tensor, key: Tensor, value: Tensor, rows: Segments) -> Tensor:
    """Scaled dot-product attention, row by row.

    Args:
        query: [Nq, heads, head_dim], rows packed at `rows.q_spans`.
        key: [Nk, heads, head_dim], rows packed at `rows.k_spans`.
        value: as `key`.
        rows: where each row's queries and keys lie.

    Returns:
        [Nq, heads, head_dim] in the order of `query`.
    """
    alike = rows.q_uniform > 0 and rows.k_uniform > 0
    one_shape = alike and rows.q_uniform == rows.k_uniform
    if query.is_cuda and not one_shape and missing_varlen(query.device, query.dtype) is None:
        return _varlen(query, key, value, rows)
    if len(rows.q_spans) == 1:
        return _dense(query[None], key[None], value[None])[0]
    if alike:
        count = len(rows.q_spans)
        out = _dense(*(x.unflatten(0, (count, -1)) for x in (query, key, value)))
        return out.flatten(0, 1)
    queries, keys = ([end - begin for begin, end in own] for own in (rows.q_spans, rows.k_spans))
    q, k, v = query[None], key[None], value[None]
    each = zip(q.split(queries, 1), k.split(keys, 1), v.split(keys, 1), strict=True)
    return torch.cat([_dense(*row)[0] for row in each])


@cache
def missing_varlen(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why the variable-length kernel cannot be used there; None if it can. Logged once."""
    reason = None
    major, minor = torch.cuda.get_device_capability(device)
    if dtype not in _HALF:
        reason = f"it takes half precision, not {dtype}"
    elif major < 8:
        reason = f"it needs compute capability 8.0, not {major}.{minor}"
    elif importlib.util.find_spec("torch.nn.attention.varlen") is None:
        reason = f"torch {torch.__version__} has none; 2.10 has"
    if reason is not None:
        _log.warning("rows attend one by one, not in one variable-length call: %s", reason)
    else:
        _log.info("attention: %s", choose_flash(major))
    return reason


def _activate(name: str) -> None:
    """Raises AttributeError in a torch that knows no such packages."""
    from torch.nn import attention as kernels

    kernels.activate_flash_attention_impl(name)


def choose_flash(major: int, activate: Callable[[str], object] = _activate) -> str:
    """Have torch use the first FlashAttention made for a device that is installed; in words, which,
    and why none that comes before it.

    Args:
        major: of the device's compute capability.
        activate: has torch use one, by its name.
    """
    missed = ""
    for name, made_for in _FLASH.items():
        if major in made_for:
            try:
                activate(name)
            except (AttributeError, ImportError, KeyError, RuntimeError, ValueError) as error:
                missed += f"; no {name}: {error}"
            else:
                return f"{name}{missed}"
    return f"torch's own FlashAttention{missed}"


def _dense(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """[B, N, heads, head_dim] in and out."""
    return F.scaled_dot_product_attention(
        query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    ).transpose(1, 2)


def _varlen(query: Tensor, key: Tensor, value: Tensor, rows: Segments) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    out = varlen_attn(query, key, value, rows.q_ends, rows.k_ends, rows.q_longest, rows.k_longest)
    assert isinstance(out, Tensor)  # a tuple only with return_aux
    return out
