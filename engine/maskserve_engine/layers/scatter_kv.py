"""Cached activations of inactive tokens, from where they lie to their slots among the others."""

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
"""Bytes that a thread reads or writes at once."""
_TILE, _LEAST, _WARPS = 1024, 128, 2
"""Numbers that a program of the kernel writes, those of a token that it takes at least, and its
threads by 32: of six pairs the soonest on an H200."""
_log = logging.getLogger(__name__)


class Change(NamedTuple):
    """What is added to a row's cached activations of a block."""

    parts: tuple[Coded, ...]
    """Of each of theirs."""
    weight: float
    """How many times it is added."""
    ids: Tensor | None = None
    """[m] tokens of it that the row reads; None: it is of just these."""


@dataclass(frozen=True, slots=True)
class KvSource:
    """Where one row's cached activations of a block lie."""

    parts: tuple[Coded, ...]
    """Keys and values, or hidden states alone; all of one format."""
    ids: Tensor | None = None
    """[m] tokens of them that the row reads; None: they are just these."""
    changes: tuple[Change, ...] = ()
    """None: the parts hold."""

    def taken(self) -> tuple[Coded, ...]:
        """The parts, of just the tokens that the row reads."""
        return self.parts if self.ids is None else tuple([c.take(self.ids) for c in self.parts])


@dataclass(frozen=True, slots=True)
class KvSlots:
    """Where all rows' inactive tokens go; made once per packing, on the device."""

    spans: tuple[Span, ...]
    """Per source, [begin, end) in the buffer; or, with `apart`, in `to`."""
    row_of: Tensor
    """[M] source of each token."""
    local: Tensor
    """[M] number of each token in its source."""
    to: Tensor
    """[M] its place in the buffer."""
    numbers: Tensor
    """[M] 0, 1, …"""
    apart: bool = False
    """Whether the places of a row do not follow one another."""


def slots_of(spans: Sequence[Span]) -> KvSlots:
    """Those of rows whose tokens lie in these spans of a buffer; on the host."""
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
        sources: per row; None where it has none.
        outs: a buffer for each of their parts, [tokens, …], a token's numbers one behind the other
            and the same way from token to token in each; written to.
        slots: of the rows' tokens in each buffer.
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
            fused(sources, outs, slots)
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
    """A part of a row, with its changes."""
    coded_part = _of(source.parts[number], source.ids)
    added = [
        (_of(kv_change.parts[number], kv_change.ids), kv_change.weight)
        for kv_change in source.changes
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


def _of(coded: Coded, ids: Tensor | None) -> Coded:
    return coded if ids is None else coded.take(ids)


@cache
def missing_kernel(device: torch.device, format: str) -> str | None:
    """Why rows are placed one by one; None if one kernel does it. Logged once."""
    reason = missing_triton()
    if reason is None and format == "float8" and torch.cuda.get_device_capability(device) < (8, 9):
        reason = "this device has no float8"
        _log.warning("cached activations are placed row by row: %s", reason)
    return reason


def fused(sources: Sequence[KvSource | None], outs: Sequence[Tensor], slots: KvSlots) -> None:
    """`scatter_kv` as one kernel for each format; where a row's parts are in one and their changes
    in another, with a kernel more for these.
    """
    runs = [[] if source is None else _runs(source) for source in sources]
    for number in range(max(map(len, runs), default=0)):
        turn = [run_terms[number] if number < len(run_terms) else () for run_terms in runs]
        for format in dict.fromkeys(terms[0].parts[0].format for terms in turn if terms):
            chosen = [
                terms if terms and terms[0].parts[0].format == format else () for terms in turn
            ]
            _launch(chosen, outs, slots, format, adds=number > 0)


Terms = tuple[Change, ...]
"""What a row's cached activations are the sum of, all of one format; the first one once."""
_NOTHING = Change((), 0.0)


def _runs(source: KvSource) -> list[Terms]:
    """A row's parts and their changes; those that follow one another in one format together."""
    terms = (Change(source.parts, 1.0, source.ids), *source.changes)
    return [tuple(run) for _, run in groupby(terms, key=lambda term: term.parts[0].format)]


def _launch(
    chosen: Sequence[Terms],
    outs: Sequence[Tensor],
    slots: KvSlots,
    format: str,
    *,
    adds: bool,
) -> None:
    """Write, or add, what was chosen of each row; rows of which there is nothing stay as they are.

    Args:
        chosen: per row; of one or two parts, all of `format`, or none.
        outs: as of `scatter_kv`.
        slots: likewise.
        format: of what was chosen.
        adds: each row's are added, times their weight.
    """
    nothing = slots.to[:0]
    most = max(map(len, chosen))
    # Of every row the first term, then the second, …
    read = [
        row_terms[number] if number < len(row_terms) else _NOTHING
        for number in range(most)
        for row_terms in chosen
    ]

    def each(take: Callable[[Coded], Tensor | None]) -> list[Tensor]:
        """Of all first parts, then of all second ones."""
        of_parts = [
            take(term.parts[number]) if term.parts else None
            for number in range(len(outs))
            for term in read
        ]
        return [nothing if tensor is None else tensor for tensor in of_parts]

    torch.ops.maskserve.scatter_kv(
        outs,
        slots.row_of,
        slots.local,
        slots.to,
        [slots.numbers if term.ids is None else term.ids for term in read],
        each(lambda coded: coded.data),
        each(lambda coded: coded.scale),
        each(lambda coded: coded.groups),
        [term.weight for term in read],
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
    # The kernel is made anew for each number of addresses: those up to a power of two are enough.
    row_count = source_count // terms
    rows = triton.next_power_of_2(row_count)

    def padded(numbers: list[Any]) -> tuple[Any, ...]:
        of_terms = [
            numbers[begin : begin + row_count] for begin in range(0, source_count, row_count)
        ]
        return tuple(n for of in of_terms for n in (*of, *of[-1:] * (rows - row_count)))

    def addresses(tensors: Sequence[Tensor]) -> tuple[int, ...]:
        # One of nothing is that of something: the kernel is made anew for each pattern of numbers
        # that fit into 32 bits and such that do not.
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
    """Numbers of a token that a program takes: a power of two, and if it is not small for that,
    such as leaves no thread without one.
    """
    import triton

    whole = width & -width
    return whole if whole >= _LEAST else int(triton.next_power_of_2(width))


@stand_in("scatter_kv")
def _(*_: object) -> None:
    return None
