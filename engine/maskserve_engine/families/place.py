"""Cached keys and values of inactive tokens, from where they lie to their places among the keys."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from maskserve_engine.cache.codec import GROUP, Coded
from maskserve_engine.families.attention import Span

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Source:
    """Where one row's cached keys and values lie."""

    keys: Coded
    values: Coded
    ids: Tensor | None = None
    """[m] tokens of them that the row reads; None: they are just these."""


@dataclass(frozen=True, slots=True)
class Places:
    """Where all rows' inactive tokens go; made once per packing, on the device."""

    spans: tuple[Span, ...]
    """Per row, [begin, end) among the keys."""
    row_of: Tensor
    """[M] row of each token."""
    local: Tensor
    """[M] number of each token in its row."""
    to: Tensor
    """[M] its place among the keys."""
    numbers: Tensor
    """0, 1, … as many as the longest row has."""


def place(sources: Sequence[Source | None], keys: Tensor, values: Tensor, places: Places) -> None:
    """Write every row's cached keys and values to their places.

    Args:
        sources: per row; None where it has none.
        keys: [all keys, heads, head_dim]; written to.
        values: as `keys`.
        places: of the rows' tokens.
    """
    given = [source for source in sources if source is not None]
    formats = {source.keys.format for source in given}
    if keys.is_cuda and len(formats) == 1 and missing_kernel(keys.device, *formats) is None:
        fused(sources, keys, values, places)
        return
    for source, (begin, end) in zip(sources, places.spans, strict=True):
        if source is not None:
            for coded, out in ((source.keys, keys), (source.values, values)):
                own = coded if source.ids is None else coded.take(source.ids)
                own.into(out[begin:end].flatten(1))


@cache
def missing_kernel(device: torch.device, format: str) -> str | None:
    """Why rows are placed one by one; None if one kernel does it. Logged once."""
    reason = None
    if importlib.util.find_spec("triton") is None:
        reason = "the package triton is not installed"
    elif format == "float8" and torch.cuda.get_device_capability(device) < (8, 9):
        reason = "this device has no float8"
    if reason is not None:
        _log.warning("cached keys and values are placed row by row: %s", reason)
    return reason


def fused(sources: Sequence[Source | None], keys: Tensor, values: Tensor, places: Places) -> None:
    """`place` as one kernel; all sources of one format."""
    given = [source for source in sources if source is not None]
    nothing = places.to[:0]

    def each(take: Callable[[Coded], Tensor | None]) -> list[Tensor]:
        """Of every row's keys, then of every row's values."""
        keys = [None if s is None else take(s.keys) for s in sources]
        values = [None if s is None else take(s.values) for s in sources]
        return [nothing if tensor is None else tensor for tensor in (*keys, *values)]

    torch.ops.maskserve.place(
        keys,
        values,
        places.row_of,
        places.local,
        places.to,
        [places.numbers if s is None or s.ids is None else s.ids for s in sources],
        each(lambda coded: coded.data),
        each(lambda coded: coded.scale),
        each(lambda coded: coded.groups),
        given[0].keys.format,
    )


@torch.library.custom_op("maskserve::place", mutates_args=("keys", "values"))
def _place(
    keys: Tensor,
    values: Tensor,
    row_of: Tensor,
    local: Tensor,
    to: Tensor,
    ids: Sequence[Tensor],
    data: Sequence[Tensor],
    scales: Sequence[Tensor],
    groups: Sequence[Tensor],
    format: str,
) -> None:
    import triton

    from maskserve_engine.families.place_kernel import place_kernel

    rows, width = len(ids), keys.shape[1] * keys.shape[2]

    def addresses(tensors: Sequence[Tensor]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        at = [tensor.data_ptr() or keys.data_ptr() for tensor in tensors]
        return tuple(at[:rows]), tuple(at[rows:])

    place_kernel[(len(to), 2)](
        keys,
        values,
        row_of,
        local,
        to,
        addresses(ids)[0],
        *addresses(data),
        *addresses(scales),
        *addresses(groups),
        width=width,
        block=triton.next_power_of_2(width),
        rows=rows,
        kind=format,
        group=GROUP,
    )


@_place.register_fake
def _(*_: object) -> None:
    return None
