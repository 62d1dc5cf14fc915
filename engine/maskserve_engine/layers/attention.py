"""Attention over packed rows: each row's queries see that row's keys and no others.

Rows are packed along the first axis without padding. Their lengths decide which kernel runs. Rows
of equal lengths take one `scaled_dot_product_attention` call; where torch does not choose cuDNN for
it, only if they compute all their tokens. On CUDA all others take one variable-length call, unless
each row keeps the device busy and cuDNN is faster (`cudnn_is_sooner`); then rows run one by one.
Elsewhere, or without that kernel, there is one call per row.

cuDNN needs about 40 ms on the host to plan each new pair of lengths. Rows compute a bucket's number
of tokens (`bucket`), so there are few. Where lengths vary with a prompt's words, rows take the
variable-length call.
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
"""Packaged FlashAttention versions by torch's name, and their compute capabilities; the preferred
ones, faster or better proven, come first."""
_TORCH_FLASH = "torch's own FlashAttention"
_CUDNN = (9, 10)
"""Compute capabilities for which torch's `scaled_dot_product_attention` prefers cuDNN."""
_FILLS = 64 * 128
"""Queries times heads, on average per row, from which cuDNN row by row is faster than
FlashAttention 2 for all rows: half of what an H200's multiprocessors take at once."""
_log = logging.getLogger(__name__)


def spans(lengths: Sequence[int]) -> tuple[Span, ...]:
    """Return [begin, end) of each row in a packed stream."""
    out, begin = [], 0
    for length in lengths:
        out.append((begin, begin + length))
        begin += length
    return tuple(out)


@cache
def bucket(count: int, most: int | None = None, parts: int = 8) -> int:
    """Return the padded token count that is computed for `count` tokens: at most an eighth more
    from 64 on, the next multiple of 8 below. There are eight buckets, or `parts`, between a power
    of two and the next. No bucket is larger than `most`.
    """
    step = max(8, (1 << max(0, count.bit_length() - 1)) // parts)
    rounded = -(-count // step) * step
    return rounded if most is None else min(most, rounded)


@dataclass(frozen=True)
class Segments:
    """Spans of queries and keys by row; made once while the same rows go on."""

    q_spans: tuple[Span, ...]
    k_spans: tuple[Span, ...]
    q_ends: Tensor
    """[R + 1] int32 on the device: 0, then the end of each row's queries."""
    k_ends: Tensor
    """[R + 1] int32, of the keys."""
    q_uniform: int
    """Common number of queries, or 0."""
    k_uniform: int
    """Common number of keys, or 0."""
    moving: bool = False
    """Whether rows end where `q_ends` and `k_ends` say at each run, for recorded steps that serve
    other rows; the spans then only bound them."""
    varies: bool = False
    """Whether these lengths seldom come again, so that no kernel is planned for them."""

    @property
    def q_longest(self) -> int:
        return max(end - begin for begin, end in self.q_spans)

    @property
    def k_longest(self) -> int:
        return max(end - begin for begin, end in self.k_spans)


def ends(of: Sequence[Span]) -> Tensor:
    """Return [R + 1] int32 on the host: 0, then the end of each span."""
    return torch.from_numpy(np.array([0, *(end for _, end in of)], np.int32))


def uniform(lengths: Sequence[int]) -> int:
    return lengths[0] if len(set(lengths)) == 1 else 0


def segments(queries: Sequence[int], keys: Sequence[int], *, varies: bool = False) -> Segments:
    q_spans, k_spans = spans(queries), spans(keys)
    return Segments(
        q_spans,
        k_spans,
        ends(q_spans),
        ends(k_spans),
        uniform(queries),
        uniform(keys),
        varies=varies,
    )


def attention(query: Tensor, key: Tensor, value: Tensor, rows: Segments) -> Tensor:
    """Compute scaled dot-product attention, row by row.

    Args:
        query: [Nq, heads, head_dim], packed at `rows.q_spans`.
        key: [Nk, heads, head_dim], packed at `rows.k_spans`.
        value: [Nk, heads, head_dim], packed as `key`.
        rows: spans of the rows.

    Returns:
        [Nq, heads, head_dim] in the order of `query`.
    """
    if rows.moving:
        return varlen(query, key, value, rows)
    alike = rows.q_uniform > 0 and rows.k_uniform > 0
    if query.is_cuda and _together(query, rows, alike=alike):
        return varlen(query, key, value, rows)
    if len(rows.q_spans) == 1:
        q, k, v = (x[None].transpose(1, 2) for x in (query, key, value))
        return F.scaled_dot_product_attention(q, k, v)[0].transpose(0, 1)
    if alike:
        rows_first = (len(rows.q_spans), -1)
        q, k, v = (x.unflatten(0, rows_first).transpose(1, 2) for x in (query, key, value))
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(0, 1)
    queries, keys = (
        [end - begin for begin, end in row_spans] for row_spans in (rows.q_spans, rows.k_spans)
    )
    of_rows = zip(query.split(queries), key.split(keys), value.split(keys), strict=True)
    attended = [
        F.scaled_dot_product_attention(*(x[None].transpose(1, 2) for x in row)) for row in of_rows
    ]
    return torch.cat([out.transpose(1, 2)[0] for out in attended])


def _together(query: Tensor, rows: Segments, *, alike: bool) -> bool:
    if missing_varlen(query.device, query.dtype) is not None:
        return False
    if rows.varies:
        return True
    if alike and rows.q_uniform == rows.k_uniform:
        return False
    if not cudnn_is_sooner(query.device):
        return True
    return not alike and len(query) * query.shape[1] < len(rows.q_spans) * _FILLS


@cache
def cudnn_is_sooner(device: torch.device) -> bool:
    """Return whether cuDNN computes a lone row faster than the available variable-length kernel. It
    does against FlashAttention 2, which does not use Hopper's features and takes twice as long
    (docs/gpu.md), and not against the others (`choose_flash`).
    """
    major, _ = torch.cuda.get_device_capability(device)
    uses_flash = choose_flash(major).startswith(_TORCH_FLASH)
    return uses_flash and major in _CUDNN and torch.backends.cudnn.is_available()


def plans_lengths(device: torch.device) -> bool:
    """Return whether a lone row's attention is planned for each new pair of lengths."""
    return device.type == "cuda" and cudnn_is_sooner(device)


@cache
def missing_varlen(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why the variable-length kernel cannot be used; None if it can. Logged once."""
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
    """Raises AttributeError in versions of torch without such packages."""
    from torch.nn import attention as kernels

    kernels.activate_flash_attention_impl(name)


def choose_flash(major: int, activate: Callable[[str], object] = _activate) -> str:
    """Make torch use the first installed FlashAttention made for a device; return its name, with
    the reasons against preferred ones.
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
    return f"{_TORCH_FLASH}{missed}"


def varlen(query: Tensor, key: Tensor, value: Tensor, rows: Segments) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    out = varlen_attn(query, key, value, rows.q_ends, rows.k_ends, rows.q_longest, rows.k_longest)
    assert isinstance(out, Tensor)  # a tuple only with return_aux
    return out
