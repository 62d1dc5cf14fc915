"""Attention over packed rows: each row's queries see that row's keys and no others.

Rows are packed along the first axis without padding. Which kernel runs follows from their lengths:

- all rows alike: one `scaled_dot_product_attention` call. Where torch's own choice for that is not
  cuDNN, only of rows that compute all of their tokens;
- on CUDA, anything else: one variable-length call, unless rows that keep the device busy by
  themselves are sooner done by cuDNN (`cudnn_is_sooner`), one after the other;
- elsewhere, or where that kernel is missing: one call per row.

cuDNN makes a plan for each new pair of lengths, in some 40 ms of the host. Rows compute as many
tokens as a bucket has (base/buckets.py), so there are few.
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
_OWN = "torch's own FlashAttention"
_CUDNN = (9, 10)
"""Compute capabilities for which torch's `scaled_dot_product_attention` prefers cuDNN."""
_FILLS = 64 * 128
"""Queries times heads that rows must have on average to be sooner done by cuDNN one by one than all
together by FlashAttention 2: half of what an H200's multiprocessors take at once."""
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
    if query.is_cuda and _together(query, rows, alike=alike):
        return varlen(query, key, value, rows)
    if len(rows.q_spans) == 1:
        return _dense(query[None], key[None], value[None])[0]
    if alike:
        count = len(rows.q_spans)
        out = _dense(*(x.unflatten(0, (count, -1)) for x in (query, key, value)))
        return out.flatten(0, 1)
    queries, keys = (
        [end - begin for begin, end in row_spans] for row_spans in (rows.q_spans, rows.k_spans)
    )
    q, k, v = query[None], key[None], value[None]
    row_tensors = zip(q.split(queries, 1), k.split(keys, 1), v.split(keys, 1), strict=True)
    return torch.cat([_dense(*row)[0] for row in row_tensors])


def _together(query: Tensor, rows: Segments, *, alike: bool) -> bool:
    """Whether one variable-length call takes all rows, on CUDA."""
    if missing_varlen(query.device, query.dtype) is not None:
        return False
    if alike and rows.q_uniform == rows.k_uniform:
        return False
    if not cudnn_is_sooner(query.device):
        return True
    return not alike and len(query) * query.shape[1] < len(rows.q_spans) * _FILLS


@cache
def cudnn_is_sooner(device: torch.device) -> bool:
    """Whether a row by itself is sooner done by cuDNN, which torch's `scaled_dot_product_attention`
    takes there, than by the variable-length kernel that there is: FlashAttention 2, which knows
    nothing of what Hopper has, takes twice as long (docs/gpu.md). Others (`choose_flash`) do not.
    """
    major, _ = torch.cuda.get_device_capability(device)
    uses_flash = choose_flash(major).startswith(_OWN)
    return uses_flash and major in _CUDNN and torch.backends.cudnn.is_available()


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
    return f"{_OWN}{missed}"


def _dense(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """[B, N, heads, head_dim] in and out."""
    return F.scaled_dot_product_attention(
        query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    ).transpose(1, 2)


def varlen(query: Tensor, key: Tensor, value: Tensor, rows: Segments) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    out = varlen_attn(query, key, value, rows.q_ends, rows.k_ends, rows.q_longest, rows.k_longest)
    assert isinstance(out, Tensor)  # a tuple only with return_aux
    return out
