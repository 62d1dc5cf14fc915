"""Encodes what a refresh step computed: some of its tokens, their change since the refresh step
before, and what the line through the last two misses (`batch.step_cache`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from maskserve_engine.cache.entries import Coded, encode
from maskserve_engine.layers.kernels import has_kernels, operation, stand_in

_TOKENS, _BLOCK = 64, 32
"""Tokens and channels that a program reads at once. A program reads all tokens, twice."""


class KeptTokens(NamedTuple):
    """Tensors of a part of a block, each [m, width]; one for each of its tensors."""

    parts: tuple[Coded, ...]
    slopes: tuple[Coded, ...] = ()
    """Change since the refresh step before; empty at the first."""
    bends: tuple[Coded, ...] = ()
    """Error of the line through the last two refresh steps, over 1 + `reach`."""


def keep_tokens(
    tensors: Sequence[Tensor],
    ids: Tensor,
    format: str,
    last: KeptTokens | None = None,
    reach: float | None = None,
) -> KeptTokens:
    """Encode tokens; on a GPU, in int8, by one kernel.

    Args:
        tensors: one or two [tokens, width] of equal strides.
        ids: [m] tokens that are kept.
        format: storage format.
        last: those of the refresh step before; None: this is the first.
        reach: distance of this step from the last, in intervals between the last two; None: the
            bend is not kept.
    """
    terms = 1 if last is None else 2 if reach is None else 3
    if format == "int8" and has_kernels(ids.device):
        return _by_kernel(tensors, ids, terms, last, reach)
    new = [tensor.index_select(0, ids) for tensor in tensors]
    parts = tuple([encode(tensor, format) for tensor in new])
    if last is None:
        return KeptTokens(parts)
    changes = [
        tensor - _decoded(coded, tensor) for coded, tensor in zip(last.parts, new, strict=True)
    ]
    slopes = tuple([encode(change, format) for change in changes])
    if reach is None:
        return KeptTokens(parts, slopes)
    bends = []
    for coded, change in zip(last.slopes, changes, strict=True):
        missed = torch.sub(change, _decoded(coded, change), alpha=reach)
        bends.append(encode(missed.div_(1.0 + reach), format))
    return KeptTokens(parts, slopes, tuple(bends))


def _decoded(coded: Coded, like: Tensor) -> Tensor:
    out = torch.empty_like(like)
    coded.into(out)
    return out


def _by_kernel(
    tensors: Sequence[Tensor],
    ids: Tensor,
    terms: int,
    last: KeptTokens | None,
    reach: float | None,
) -> KeptTokens:
    parts, width = len(tensors), tensors[0].shape[1]
    data = torch.empty(terms, parts, len(ids), width, dtype=torch.int8, device=ids.device)
    scales = torch.empty(terms, parts, width, device=ids.device)
    before = [] if last is None else [*last.parts, *(last.slopes if terms > 2 else ())]
    torch.ops.maskserve.keep_tokens(
        data,
        scales,
        tensors,
        ids,
        [coded.data for coded in before],
        [coded.scale for coded in before],
        0.0 if reach is None else reach,
    )
    return KeptTokens(
        *(
            tuple([Coded("int8", data[term, part], scales[term, part]) for part in range(parts)])
            for term in range(terms)
        )
    )


@operation("keep_tokens", mutates_args=("data", "scales"))
def _keep_tokens(
    data: Tensor,
    scales: Tensor,
    tensors: Sequence[Tensor],
    ids: Tensor,
    before: Sequence[Tensor],
    before_scales: Sequence[Tensor],
    reach: float,
) -> None:
    import triton

    from maskserve_engine.layers.keep_tokens_kernel import keep_tokens_kernel

    terms, parts, count, width = data.shape
    # The last refresh step's tokens, then its slopes; the kernel reads none that are missing.
    stored = [*before, *[data] * (2 * parts - len(before))]
    stored_scales = [*before_scales, *[scales] * (2 * parts - len(before))]
    keep_tokens_kernel[(triton.cdiv(width, _BLOCK), parts)](
        tensors[0],
        tensors[-1],
        ids,
        stored[0],
        stored[parts - 1],
        stored_scales[0],
        stored_scales[parts - 1],
        stored[parts],
        stored[-1],
        stored_scales[parts],
        stored_scales[-1],
        data,
        scales,
        count,
        tensors[0].stride(0),
        reach,
        width=width,
        tokens=_TOKENS,
        block=_BLOCK,
        terms=terms,
    )


@stand_in("keep_tokens")
def _(*_: object) -> None:
    return None
