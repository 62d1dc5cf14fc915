"""Copies cached activations to their tokens' slots."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from maskserve_engine.cache.entries import GROUP, Coded
from maskserve_engine.layers.attention import Span
from maskserve_engine.layers.kernels import missing_triton, operation, stand_in

_VECTOR = 16
_TILE, _LEAST, _WARPS = 1024, 128, 2
"""Numbers that a program writes, minimum number per token, and warps: the fastest of six
combinations on an H200."""
_log = logging.getLogger(__name__)


class Change(NamedTuple):
    """A term added to a row's cached activations of a block."""

    parts: tuple[Coded, ...]
    """One tensor for each part of the activations."""
    weight: float
    ids: Tensor | None = None
    """[m] tokens of it that the row reads; None: all, in order."""


@dataclass(frozen=True, slots=True)
class KvSource:
    """Location of one row's cached activations of a block."""

    parts: tuple[Coded, ...]
    """Keys and values, or hidden states only; all in one format."""
    ids: Tensor | None = None
    """[m] tokens that the row reads; None: all, in order."""
    changes: tuple[Change, ...] = ()

    def coded_parts(self) -> tuple[Coded, ...]:
        return self.parts if self.ids is None else tuple([c.take(self.ids) for c in self.parts])


@dataclass(frozen=True, slots=True)
class KvSlots:
    """Slots of all rows' cached tokens; made once per packing, on the device."""

    spans: tuple[Span, ...]
    """Per source, [begin, end) in the buffer; in `to` if `apart`."""
    row_of: Tensor
    """[M] source of each token."""
    local: Tensor
    """[M] index of each token in its source."""
    to: Tensor
    """[M] slot in the buffer."""
    numbers: Tensor
    """[M] 0, 1, …."""
    apart: bool = False


def slots_of(spans: Sequence[Span]) -> KvSlots:
    """Return the slots of rows that occupy these spans of a buffer, on the host."""
    lengths = [end - begin for begin, end in spans]
    positions = [np.arange(begin, end) for begin, end in spans]
    return KvSlots(
        spans=tuple(spans),
        row_of=torch.from_numpy(np.repeat(np.arange(len(spans)), lengths)),
        local=torch.from_numpy(np.concatenate([np.arange(length) for length in lengths])),
        to=torch.from_numpy(np.concatenate(positions)),
        numbers=torch.from_numpy(np.arange(sum(lengths))),
    )


def scatter_kv(sources: Sequence[KvSource | None], outs: Sequence[Tensor], slots: KvSlots) -> None:
    """Write every row's cached activations to their slots.

    Args:
        sources: source per row; None for a row without any.
        outs: a buffer [tokens, …] for each part, with contiguous tokens and equal strides;
            written to.
        slots: slots of the rows' tokens in each buffer.
    """
    device = outs[0].device
    if device.type == "cuda":
        present_sources = [source for source in sources if source is not None]
        parts = [part for source in present_sources for part in source.parts]
        parts += [
            part for source in present_sources for change in source.changes for part in change.parts
        ]
        formats = {part.format for part in parts}
        if not any(missing_kernel(device, format) for format in formats):
            scatter_by_kernels(sources, outs, slots)
            return
    for source, (begin, end) in zip(sources, slots.spans, strict=True):
        if source is None:
            continue
        for number, out in enumerate(outs):
            if slots.apart:
                decoded = out.new_empty(end - begin, *out.shape[1:])
                _decode(source, number, decoded.flatten(1))
                out.index_copy_(0, slots.to[begin:end], decoded)
            else:
                _decode(source, number, out[begin:end].flatten(1))


def _decode(source: KvSource, number: int, out: Tensor) -> None:
    coded_part = source.parts[number]
    if source.ids is not None:
        coded_part = coded_part.take(source.ids)
    added = [
        (term.parts[number] if term.ids is None else term.parts[number].take(term.ids), term.weight)
        for term in source.changes
    ]
    if added and coded_part.format == added[0][0].format == "model":
        first, weight = added.pop(0)
        torch.add(coded_part.data, first.data, alpha=weight, out=out)
    else:
        coded_part.into(out)
    for coded, weight in added:
        change = torch.empty_like(out)
        coded.into(change)
        out.add_(change, alpha=weight)


@cache
def missing_kernel(device: torch.device, format: str) -> str | None:
    """Return why one kernel cannot place all rows; None if it can. Logged once."""
    reason = missing_triton()
    if reason is None and format == "float8" and torch.cuda.get_device_capability(device) < (8, 9):
        reason = "this device has no float8"
        _log.warning("cached activations are placed row by row: %s", reason)
    return reason


def scatter_by_kernels(
    sources: Sequence[KvSource | None], outs: Sequence[Tensor], slots: KvSlots
) -> None:
    """Run `scatter_kv` as one kernel per format, and one more for terms whose format differs from
    their parts'.
    """
    runs = [[] if source is None else _runs(source) for source in sources]
    for number in range(max(map(len, runs), default=0)):
        row_terms = [row[number] if number < len(row) else () for row in runs]
        for format in dict.fromkeys(terms[0].parts[0].format for terms in row_terms if terms):
            terms_in_format = [
                terms if terms and terms[0].parts[0].format == format else () for terms in row_terms
            ]
            _launch(terms_in_format, outs, slots, format, adds=number > 0)


Terms = tuple[Change, ...]
"""Terms of one format that a row's activations are the sum of; the first term has weight 1."""
_NOTHING = Change((), 0.0)


def _runs(source: KvSource) -> list[Terms]:
    """Group a row's parts and terms into consecutive runs of one format."""
    terms = (Change(source.parts, 1.0, source.ids), *source.changes)
    return [tuple(run) for _, run in groupby(terms, key=lambda term: term.parts[0].format)]


def _launch(
    terms: Sequence[Terms],
    outs: Sequence[Tensor],
    slots: KvSlots,
    format: str,
    *,
    adds: bool,
) -> None:
    """Write, or with `adds` add, each row's weighted terms; rows without terms are not changed."""
    nothing = slots.to[:0]
    most = max(map(len, terms))
    # The first terms of all rows, then the second ones, …
    flat_terms = [
        row_terms[number] if number < len(row_terms) else _NOTHING
        for number in range(most)
        for row_terms in terms
    ]

    def each_part(take: Callable[[Coded], Tensor | None]) -> list[Tensor]:
        """Collect a tensor of all first parts, then of all second parts."""
        tensors = [
            take(term.parts[number]) if term.parts else None
            for number in range(len(outs))
            for term in flat_terms
        ]
        return [nothing if tensor is None else tensor for tensor in tensors]

    torch.ops.maskserve.scatter_kv(
        outs,
        slots.row_of,
        slots.local,
        slots.to,
        [slots.numbers if term.ids is None else term.ids for term in flat_terms],
        each_part(lambda coded: coded.data),
        each_part(lambda coded: coded.scale),
        each_part(lambda coded: coded.groups),
        [term.weight for term in flat_terms],
        most,
        format,
        adds,
    )


@operation("scatter_kv", mutates_args=("outs",))
def _scatter_kv(
    outs: Sequence[Tensor],
    row_of: Tensor,
    local: Tensor,
    to: Tensor,
    ids: Sequence[Tensor],
    data: Sequence[Tensor],
    scales: Sequence[Tensor],
    groups: Sequence[Tensor],
    weights: Sequence[float],
    terms: int,
    format: str,
    adds: bool,
) -> None:
    import triton

    from maskserve_engine.layers.scatter_kv_kernel import scatter_kv_kernel

    source_count, width = len(ids), outs[0][0].numel()
    # The kernel is compiled for each number of addresses, so it is rounded up to a power of two.
    row_count = source_count // terms
    rows = triton.next_power_of_2(row_count)

    def padded(numbers: list[Any]) -> tuple[Any, ...]:
        by_term = [
            numbers[begin : begin + row_count] for begin in range(0, source_count, row_count)
        ]
        return tuple(n for row in by_term for n in (*row, *row[-1:] * (rows - row_count)))

    def addresses(tensors: Sequence[Tensor]) -> tuple[int, ...]:
        # Empty tensors get an address, too: the kernel is compiled anew for each pattern of
        # arguments that fit into 32 bits and arguments that do not.
        return padded([tensor.data_ptr() or outs[0].data_ptr() for tensor in tensors])

    parts = [
        addresses(part)
        for tensors in (data, scales, groups)
        for part in (tensors[:source_count], tensors[-source_count:])
    ]
    step = outs[0].stride(0)
    steps = (step * outs[0].element_size(),)
    aligned = not any(at % _VECTOR for part in (addresses(outs), *parts, steps) for at in part)
    block = _block(width)
    tokens = max(1, _TILE // block)
    grid = (triton.cdiv(len(to), tokens), triton.cdiv(width, block), len(outs))
    scatter_kv_kernel[grid](
        outs[0],
        outs[-1],
        len(to),
        row_of,
        local,
        to,
        addresses(ids),
        *parts,
        padded(list(weights)),
        step=step,
        width=width,
        tokens=tokens,
        block=block,
        rows=rows,
        terms=terms,
        kind=format,
        group=GROUP,
        aligned=aligned,
        adds=adds,
        num_warps=_WARPS,
    )


def _block(width: int) -> int:
    """Return the numbers of a token that a program handles: a power of two, chosen so that no
    thread is idle, unless that would be too small.
    """
    import triton

    whole = width & -width
    return whole if whole >= _LEAST else int(triton.next_power_of_2(width))


@stand_in("scatter_kv")
def _(*_: object) -> None:
    return None
