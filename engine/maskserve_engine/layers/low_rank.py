"""Low-rank updates of single rows: LoRAs that share a batch, and a step, with other rows (Katz §3).

    y = W x + Σ scale · B (A x)        on the tokens of the row that has the LoRA

Weights are never written, so any mix of LoRAs runs in one batch and nothing has to be undone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from maskserve_engine.layers.attention import Span
from maskserve_engine.layers.kernels import has_kernels
from maskserve_engine.layers.linear import Linear
from maskserve_engine.layers.shrink_expand import Part, Slices, slices_of


class Factors(NamedTuple):
    """A LoRA's factors for one layer of the model; `up` includes alpha / rank."""

    down: Tensor
    """A, [rank, in]; for a convolution [rank, in, kh, kw]."""
    up: Tensor
    """B, [out, rank]; for a convolution [out, rank, 1, 1]."""

    @property
    def numbers(self) -> int:
        return self.down.numel() + self.up.numel()


@dataclass(frozen=True, slots=True, eq=False)
class Update:
    """One LoRA's part of a product; each of several joined layers may have its own."""

    down: Tensor
    """[ranks, in] A of all parts, concatenated."""
    parts: tuple[Part, ...]

    def columns(self, begin: int, end: int) -> Update:
        chosen = []
        for up, first, rank in self.parts:
            low, high = max(begin, first), min(end, first + len(up))
            if low < high:
                chosen.append(Part(up[low - first : high - first], low - begin, rank))
        if not chosen:
            return Update(self.down[:0], ())
        least = min(part.rank_begin for part in chosen)
        most = max(part.rank_begin + part.up.shape[1] for part in chosen)
        moved = [part._replace(rank_begin=part.rank_begin - least) for part in chosen]
        return Update(self.down[least:most], tuple(moved))

    def add_to(self, out: Tensor, x: Tensor, scale: float) -> None:
        """Add the update for `x` [..., n, in] to `out` [..., n, out]."""
        if not self.parts:
            return
        low = F.linear(x, self.down)
        for up, begin, rank in self.parts:
            low_part = low[..., rank : rank + up.shape[1]]
            target = out[..., begin : begin + len(up)]
            if target.dim() == 2:
                target.addmm_(low_part, up.T, alpha=scale)
            else:
                target.add_(F.linear(low_part, up), alpha=scale)


@dataclass(frozen=True, slots=True, eq=False)
class ConvUpdate:
    """One LoRA's part of a convolution."""

    down: Tensor
    """[rank, in, kh, kw], channels last."""
    up: Tensor
    """[out, rank, 1, 1]."""

    def flat(self) -> tuple[Tensor, tuple[Part, ...]]:
        """Return it in the form of `Update`: A [rank, kh · kw · in] and one part."""
        down = self.down.permute(0, 2, 3, 1)
        return down.view(len(down), -1), (Part(self.up.flatten(1), 0, 0),)


ConvUpdates: TypeAlias = tuple[tuple[ConvUpdate, float], ...]


@dataclass(frozen=True, slots=True)
class LowRankConv:
    """A convolution with separate updates for each pass [p, C, h, w]."""

    base: nn.Conv2d
    updates: tuple[ConvUpdates, ...]

    def __call__(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x)
        return self._add_updates(out, x, self.base.padding)

    def valid(self, x: Tensor) -> Tensor:
        """Convolve without padding: `x` includes the border."""
        base = self.base
        return self._add_updates(F.conv2d(x, base.weight, base.bias, base.stride), x, 0)

    def take(self, passes: slice) -> LowRankConv | None:
        """Return the convolution for some of the passes; None: they have no updates."""
        pass_updates = self.updates[passes]
        return LowRankConv(self.base, pass_updates) if any(pass_updates) else None

    def _add_updates(self, out: Tensor, x: Tensor, padding: Any) -> Tensor:
        for number, updates in enumerate(self.updates):
            pass_slice = slice(number, number + 1)
            for update, scale in updates:
                low = F.conv2d(x[pass_slice], update.down, None, self.base.stride, padding)
                out[pass_slice].add_(F.conv2d(low, update.up), alpha=scale)
        return out


@dataclass(frozen=True, slots=True, eq=False)
class LowRankSet:
    """A LoRA on the model's device: updates by place in a family's weights."""

    updates: Mapping[str, Update]
    convolutions: Mapping[str, ConvUpdate]
    nbytes: int
    slices: Mapping[str, Slices] = field(default_factory=dict)
    """Slices of the updates for kernels; empty without kernels."""


Adapters: TypeAlias = tuple[tuple[LowRankSet, float], ...]
"""LoRAs of a row, each with its nonzero scale."""

Updates: TypeAlias = tuple[tuple[Update, float], ...]


@dataclass(frozen=True, slots=True)
class LowRank:
    """A product with separate updates for each packed row; `base` is never written."""

    base: Linear
    updates: tuple[Updates, ...]
    """Updates by row; a row without any gets the outputs of `base` bit for bit."""

    @property
    def out_features(self) -> int:
        return self.base.out_features

    def __call__(self, x: Tensor, rows: Sequence[Span] = ()) -> Tensor:
        out = self.base(x, rows)
        row_updates = zip(self.updates, rows, strict=True)
        # Rows side by side with the same adapters share their products.
        for updates, adjacent_rows in groupby(row_updates, key=lambda row_update: row_update[0]):
            spans = [span for _, span in adjacent_rows]
            begin, end = spans[0][0], spans[-1][1]
            if begin < end:
                for update, scale in updates:
                    update.add_to(out[..., begin:end, :], x[..., begin:end, :], scale)
        return out

    def columns(self, begin: int, end: int) -> LowRank:
        column_updates = [
            tuple([(u.columns(begin, end), s) for u, s in row_updates])
            for row_updates in self.updates
        ]
        return LowRank(self.base.columns(begin, end), tuple(column_updates))

    def take(self, rows: Sequence[int]) -> LowRank:
        return LowRank(self.base, tuple([self.updates[row] for row in rows]))


def low_rank(place: str, base: Linear, rows: Sequence[Adapters]) -> Linear:
    """Return the product at a place, with the updates of each row's LoRAs."""
    updates = updates_at(place, rows)
    return LowRank(base, updates) if any(updates) else base


def low_rank_conv(place: str, base: nn.Conv2d, passes: Sequence[Adapters]) -> LowRankConv | None:
    """Return the convolution at a place with the updates of each pass; None: there are none."""
    updates = tuple(
        [
            tuple(
                [
                    (adapter.convolutions[place], s)
                    for adapter, s in adapters
                    if place in adapter.convolutions
                ]
            )
            for adapters in passes
        ]
    )
    return LowRankConv(base, updates) if any(updates) else None


def updates_at(place: str, rows: Sequence[Adapters]) -> tuple[Updates, ...]:
    return tuple(
        [
            tuple(
                [
                    (adapter.updates[place], scale)
                    for adapter, scale in row
                    if place in adapter.updates
                ]
            )
            for row in rows
        ]
    )


class Place(NamedTuple):
    """Place of a model's layer in a family's weights."""

    name: str
    """Name of the product (`map_linears`), or of the layer itself."""
    begin: int
    """Output of the product at which the layer begins."""
    shape: tuple[int, ...]
    """Shape of the layer's weight: [out, in], or [out, in, kh, kw]."""
    convolves: bool = False
    """Whether the layer runs over a feature map instead of tokens."""
    swapped: bool = False
    """Whether the two halves of its outputs are swapped in the product."""


def low_rank_set(
    factors: Mapping[str, Factors],
    places: Mapping[str, Place],
    device: torch.device,
    dtype: torch.dtype,
) -> LowRankSet:
    """Move a LoRA to the device, in the layout of a family's weights.

    Raises:
        ValueError: a layer does not exist or has another shape.
    """
    factors_by_place: dict[str, list[tuple[int, Factors]]] = {}
    convolutions: dict[str, ConvUpdate] = {}
    for name, layer_factors in factors.items():
        place = places.get(name)
        if place is None:
            raise ValueError(
                f"changes {name[:80]!r}, which is not a layer that an adapter may change"
            )
        _check_shape(name, layer_factors, place.shape)
        down, up = (tensor.to(device, dtype) for tensor in layer_factors)
        if place.convolves:
            maps = (*down.shape, 1, 1)[:4], (*up.shape, 1, 1)[:4]
            channels_last = down.view(maps[0]).contiguous(memory_format=torch.channels_last)
            convolutions[place.name] = ConvUpdate(channels_last, up.view(maps[1]))
        else:  # a product of tokens, or a 1x1 convolution
            up = up.flatten(1)
            up = torch.cat(up.chunk(2)[::-1]) if place.swapped else up
            flat = Factors(down.flatten(1), up)
            factors_by_place.setdefault(place.name, []).append((place.begin, flat))
    updates = {name: _join(parts) for name, parts in factors_by_place.items()}
    tensors = [u.down for u in updates.values()] + [
        part.up for update in updates.values() for part in update.parts
    ]
    tensors += [tensor for conv in convolutions.values() for tensor in (conv.down, conv.up)]
    kernel_updates = {
        place: (layer_update.down, layer_update.parts) for place, layer_update in updates.items()
    }
    kernel_updates |= {place: conv.flat() for place, conv in convolutions.items()}
    slices = slices_of(kernel_updates) if has_kernels(device) else {}
    return LowRankSet(updates, convolutions, sum(t.nbytes for t in tensors), slices)


def _check_shape(name: str, factors: Factors, shape: tuple[int, ...]) -> None:
    out, *inner = shape
    rank = factors.down.shape[0]
    kernel = (1, 1) if len(inner) > 1 else ()
    expected_shapes = (rank, *inner), (out, rank, *kernel)
    if (tuple(factors.down.shape), tuple(factors.up.shape)) == expected_shapes:
        return
    flat = tuple(factors.down.flatten(1).shape), tuple(factors.up.flatten(1).shape)
    if all(size == 1 for size in inner[1:]) and flat == ((rank, inner[0]), (out, rank)):
        return  # either form of a 1x1 convolution
    factor_shapes = " and ".join("x".join(map(str, factor.shape)) for factor in factors)
    raise ValueError(
        f"has factors of {factor_shapes} for {name[:80]!r}, whose weight is "
        f"{'x'.join(map(str, shape))}"
    )


def _join(parts: Sequence[tuple[int, Factors]]) -> Update:
    downs, update_parts, rank = [], [], 0
    for begin, (down, up) in parts:
        downs.append(down)
        update_parts.append(Part(up, begin, rank))
        rank += len(down)
    return Update(downs[0] if len(downs) == 1 else torch.cat(downs), tuple(update_parts))


def is_layer(module: object) -> bool:
    """Return whether a LoRA may change a module: its weight has two or four dimensions."""
    weight = getattr(module, "weight", None)
    return isinstance(weight, Tensor) and weight.dim() in (2, 4)


def layer_shape(module: object) -> tuple[int, ...]:
    """Return the shape of a layer's weight, even if a library has quantised it."""
    out, inner = getattr(module, "out_features", None), getattr(module, "in_features", None)
    if isinstance(out, int) and isinstance(inner, int):
        return (out, inner)
    weight = module.weight  # type: ignore[attr-defined]
    assert isinstance(weight, Tensor)
    return tuple(weight.shape)
