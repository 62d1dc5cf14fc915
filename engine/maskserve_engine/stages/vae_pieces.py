"""A VAE on pieces of a picture, with the norms of the whole one.

An edit changes a part of its picture. The most expensive layers, those of high resolution, run on
pieces round that part; the middle of the VAE, at the latents' resolution, may have attention and
runs on everything. A convolution near a piece's rim lacks its surroundings, so a piece extends by a
*halo* beyond the pixels that are used.

A group norm takes mean and variance over the whole map. Inside the changed part they come from the
piece, outside from the template, whose maps were summed over a grid of cells when the VAE ran on
all of it. But a shifted mean changes the norm's output everywhere. *Probes*, small pieces without
changes, measure this: there the edit's moments are known beside the template's, and everything
outside is assumed to have moved alike (without probes the worst of 48 edits of the demo model loses
15 dB more).

    outside ≈ probe's mean + (template outside - template at probes) · deviation / template's

Boxes are (top, left, bottom, right) in latents, or in positions of a level: level l has 2^l
positions per latent along a side.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CELLS = 16
"""Cells along each side of the grid of a template's sums."""
_PROBES, _PROBE_CELLS = 1, 2
"""Number of probes, and cells along a probe's side."""
_MOVED = (0.25, 4.0)
"""Bounds on how much probes may widen a map's values."""
GPU_LEAST_SAVED = 2**19
"""Pixels that a GPU runs through the VAE while the host starts the operations of pieces, some 1,300
more than those of a whole picture: estimated from 85 ms for a picture of 1024x1024 on an H200."""
_MOST_PIECES = 8
"""Maximum number of pieces, since each has its own calls; beyond it the nearest are joined."""


class PixelBox(NamedTuple):
    top: int
    left: int
    bottom: int
    right: int

    @property
    def area(self) -> int:
        return max(0, self.bottom - self.top) * max(0, self.right - self.left)

    @property
    def slices(self) -> tuple[slice, slice]:
        return slice(self.top, self.bottom), slice(self.left, self.right)

    def grown(self, by: int, size: tuple[int, int]) -> PixelBox:
        """Grow by so many positions to each side, cut at a map of `size`."""
        top, left = max(0, self.top - by), max(0, self.left - by)
        return PixelBox(top, left, min(size[0], self.bottom + by), min(size[1], self.right + by))

    def scaled(self, factor: int) -> PixelBox:
        return PixelBox(*(side * factor for side in self))

    def shrunk(self, factor: int) -> PixelBox:
        """Return the box of `factor` times larger positions that covers this one."""
        ends = (-(-self.bottom // factor), -(-self.right // factor))
        return PixelBox(self.top // factor, self.left // factor, *ends)

    def within(self, outer: PixelBox) -> PixelBox:
        top, left = outer.top, outer.left
        return PixelBox(self.top - top, self.left - left, self.bottom - top, self.right - left)

    def joined(self, other: PixelBox) -> PixelBox:
        ends = (max(self.bottom, other.bottom), max(self.right, other.right))
        return PixelBox(min(self.top, other.top), min(self.left, other.left), *ends)

    def common(self, other: PixelBox) -> PixelBox:
        """Return the intersection; its area may be 0."""
        ends = (min(self.bottom, other.bottom), min(self.right, other.right))
        return PixelBox(max(self.top, other.top), max(self.left, other.left), *ends)

    def distance(self, other: PixelBox) -> int:
        """Return the distance of the centres along the longer axis, in half positions."""
        return max(
            abs(self.top + self.bottom - other.top - other.bottom),
            abs(self.left + self.right - other.left - other.right),
        )


@dataclass(frozen=True, slots=True)
class Pieces:
    edited_boxes: tuple[PixelBox, ...]
    """Disjoint boxes of latents that were edited."""
    size: tuple[int, int]
    """(height, width) of the latents."""
    halos: tuple[int, ...]
    """Computed positions round a box, by level."""
    spread: int
    """Latents around an edited box whose values the edit also changes."""
    probes: tuple[PixelBox, ...] = ()
    """Boxes of latents that the edit does not change, aligned to cells."""

    @property
    def boxes(self) -> tuple[PixelBox, ...]:
        return self.edited_boxes + self.probes

    def at(self, level: int) -> tuple[int, int]:
        return self.size[0] << level, self.size[1] << level

    def outer(self, box: PixelBox, level: int) -> PixelBox:
        return box.scaled(1 << level).grown(self.halos[level], self.at(level))

    def changed(self, box: PixelBox, level: int) -> PixelBox:
        """Return the area of a box that replaces the template's in norms."""
        spread = box.grown(self.spread, self.size).scaled(1 << level)
        return spread.common(self.outer(box, level))

    @property
    def share(self) -> float:
        """Share of the positions of all levels that is computed. Levels cost about the same: each
        has half the channels of the one below and four times the positions.
        """
        return sum(self.share_of(box) for box in self.boxes)

    def pay(self, most: float, pixels: int, device: str) -> bool:
        """Return whether pieces run sooner than the whole picture.

        Args:
            most: share of a picture from which pieces compute as long as the whole.
            pixels: pixels along one side of a latent.
            device: kind of device.
        """
        saved = (1.0 - self.share) * self.size[0] * self.size[1] * pixels**2
        return self.share < most and (device != "cuda" or saved >= GPU_LEAST_SAVED)

    def share_of(self, box: PixelBox) -> float:
        whole, levels = self.size[0] * self.size[1], range(len(self.halos))
        return sum(self.outer(box, k).area / (whole << 2 * k) for k in levels) / len(levels)


def plan_pieces(
    boxes: Sequence[PixelBox], size: tuple[int, int], *, halos: tuple[int, ...], spread: int
) -> Pieces:
    """Join boxes where that is cheaper than separate halos, or where both would count the same
    positions for a norm; then choose probes.
    """
    pieces = Pieces(tuple(boxes), size, halos, spread)
    while len(pieces.edited_boxes) > 1:
        saving, first, second = max(
            (_saving(pieces, first, second), first, second)
            for first, second in combinations(pieces.edited_boxes, 2)
        )
        if saving < 0 and len(pieces.edited_boxes) <= _MOST_PIECES:
            break
        remaining = tuple(box for box in pieces.edited_boxes if box not in (first, second))
        pieces = replace(pieces, edited_boxes=(*remaining, first.joined(second)))
    return replace(pieces, probes=_probes(pieces))


def _saving(pieces: Pieces, one: PixelBox, other: PixelBox) -> float:
    """Return the share of the picture that joining two boxes saves."""
    if pieces.changed(one, 0).common(pieces.changed(other, 0)).area:
        return 1.0
    separate_share = pieces.share_of(one) + pieces.share_of(other)
    return separate_share - pieces.share_of(one.joined(other))


def _probes(pieces: Pieces) -> tuple[PixelBox, ...]:
    """Choose probes as far as possible from edited boxes and from one another."""
    height, width = (_PROBE_CELLS * _cell(side) for side in pieces.size)
    tops, lefts = (
        range(0, side - probe + 1, probe)
        for side, probe in zip(pieces.size, (height, width), strict=True)
    )
    changed = [box.grown(2 * pieces.spread, pieces.size) for box in pieces.edited_boxes]
    places = [PixelBox(y, x, y + height, x + width) for y, x in product(tops, lefts)]
    places = [
        box for box in places if not any(box.common(changed_box).area for changed_box in changed)
    ]
    probes: list[PixelBox] = []
    while places and len(probes) < _PROBES:
        far = max(places, key=lambda box: min(box.distance(o) for o in (*changed, *probes)))
        places.remove(far)
        probes.append(far)
    return tuple(probes)


class _TemplateMoments(NamedTuple):
    """The template's [norms, 2, groups] means and variances for each norm of an edit."""

    outside: Tensor
    """Moments of everything that the edit does not change."""
    probes: Tensor


@dataclass(frozen=True, slots=True)
class CellSums:
    """Sums of a template's maps at each norm, over cells of its picture, in host memory."""

    sums: Tensor
    """[norms, 2, groups, CELLS, CELLS] float32: sums of values, and of their squares."""
    levels: tuple[int, ...]
    widths: tuple[int, ...]
    size: tuple[int, int]

    @property
    def nbytes(self) -> int:
        return int(self.sums.nbytes)

    def template_moments(self, pieces: Pieces) -> _TemplateMoments:
        levels = range(max(self.levels) + 1)
        changed = [[pieces.changed(box, k) for box in pieces.edited_boxes] for k in levels]
        probes = [[box.scaled(1 << k) for box in pieces.probes] for k in levels]
        outside_weights = [1.0 - self._covered(changed[k], k) for k in levels]
        areas = [self._positions(k) - sum(box.area for box in changed[k]) for k in levels]
        outside = self._moments(outside_weights, areas)
        probe_weights = [self._covered(probes[k], k) for k in levels]
        areas = [max(1, sum(box.area for box in probes[k])) for k in levels]
        return _TemplateMoments(outside, self._moments(probe_weights, areas))

    def _moments(self, cells: Sequence[Tensor], areas: Sequence[int]) -> Tensor:
        """Return [norms, 2, groups] mean and variance over parts of cells: by level, [CELLS, CELLS]
        shares and their number of positions.
        """
        parts = torch.stack([cells[level] for level in self.levels])
        counts = [
            max(1, areas[level]) * width
            for level, width in zip(self.levels, self.widths, strict=True)
        ]
        sums = torch.einsum("nsgyx,nyx->nsg", self.sums.double(), parts.double())
        mean, square = (sums / torch.tensor(counts)[:, None, None]).unbind(1)
        return torch.stack((mean, (square - mean.square()).clamp(min=0)), 1)

    def _positions(self, level: int) -> int:
        return (self.size[0] * self.size[1]) << 2 * level

    def _covered(self, boxes: Sequence[PixelBox], level: int) -> Tensor:
        """Return [CELLS, CELLS] share of each cell that disjoint boxes cover."""
        covered = torch.zeros(CELLS, CELLS)
        for top, left, bottom, right in boxes:
            down = _overlaps(top, bottom, _cell(self.size[0]) << level)
            across = _overlaps(left, right, _cell(self.size[1]) << level)
            covered += down[:, None] * across
        return covered


def _cell(side: int) -> int:
    return -(-side // CELLS)


def _overlaps(low: int, high: int, cell: int) -> Tensor:
    """Return [CELLS] share of each cell in [low, high)."""
    begin = torch.arange(CELLS) * cell
    return ((begin + cell).clamp(max=high) - begin.clamp(min=low)).clamp(min=0) / cell


Norm = Callable[[nn.GroupNorm, list[Tensor], int], list[Tensor]]
"""Normalises the maps [1, C, h, w] of all pieces, at a level."""


class NormRecorder:
    """Norms of whole pictures, [n, C, h, w]; records the sums of the first ones, the templates."""

    def __init__(self, size: tuple[int, int], count: int = 1) -> None:
        self._size = size
        self._sums: list[list[Tensor]] = [[] for _ in range(count)]
        self._levels: list[int] = []
        self._widths: list[int] = []

    def __call__(self, norm: nn.GroupNorm, maps: list[Tensor], level: int) -> list[Tensor]:
        [whole] = maps
        rows, columns = (_cell(side) << level for side in self._size)
        for x, of_template in zip(whole, self._sums, strict=False):
            values = x.float().unflatten(0, (norm.num_groups, -1))
            sums = torch.stack((values.sum(1), values.square().sum(1)))
            below, right = CELLS * rows - sums.shape[2], CELLS * columns - sums.shape[3]
            cells = F.pad(sums, (0, right, 0, below)).unflatten(3, (CELLS, columns))
            of_template.append(cells.unflatten(2, (CELLS, rows)).sum((3, 5)).cpu())
        self._levels.append(level)
        self._widths.append(norm.num_channels // norm.num_groups)
        return [norm(whole)]

    @property
    def sums(self) -> list[CellSums]:
        """The sums of each template."""
        levels, widths = tuple(self._levels), tuple(self._widths)
        return [CellSums(torch.stack(sums), levels, widths, self._size) for sums in self._sums]


class MixedNorm:
    """Norms of an edit's pieces, with the template's values wherever the edit changes nothing."""

    def __init__(self, template: CellSums, pieces: Pieces, device: torch.device) -> None:
        self._pieces = pieces
        moments = torch.stack(template.template_moments(pieces), 1).float().to(device)
        self._template_moments = iter(moments)

    def __call__(self, norm: nn.GroupNorm, maps: list[Tensor], level: int) -> list[Tensor]:
        pieces, groups = self._pieces, norm.num_groups
        (mean, variance), probes = next(self._template_moments)
        changed = [pieces.changed(box, level) for box in pieces.edited_boxes]
        inside = _moments(
            groups, maps, [pieces.outer(b, level) for b in pieces.edited_boxes], changed
        )
        if pieces.probes:
            probe_boxes = [box.scaled(1 << level) for box in pieces.probes]
            outers = [pieces.outer(box, level) for box in pieces.probes]
            probe_mean, spread = _moments(groups, maps[len(changed) :], outers, probe_boxes)
            wider = (spread / probes[1].clamp(min=1e-12)).sqrt().clamp(*_MOVED)
            mean, variance = probe_mean + (mean - probes[0]) * wider, variance * wider.square()
        height, width = pieces.at(level)
        share = sum(box.area for box in changed) / (height * width)
        whole = share * inside[0] + (1 - share) * mean
        square = share * (inside[1] + (inside[0] - whole).square())
        square = square + (1 - share) * (variance + (mean - whole).square())
        scale = norm.weight.view(groups, -1) * (square + norm.eps).rsqrt()[:, None]
        shift = norm.bias.view(groups, -1) - whole[:, None] * scale
        scale, shift = (vector.to(maps[0].dtype).view(1, -1, 1, 1) for vector in (scale, shift))
        return [torch.addcmul(shift, x, scale) for x in maps]


def _moments(
    groups: int, maps: Sequence[Tensor], outers: Sequence[PixelBox], boxes: Sequence[PixelBox]
) -> tuple[Tensor, Tensor]:
    """Return [groups] mean and variance over boxes of maps that cover `outers`."""
    parts = []
    for x, outer, box in zip(maps, outers, boxes, strict=False):
        rows, columns = box.within(outer).slices
        parts.append(x[0, :, rows, columns].float().reshape(groups, -1))
    values = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
    mean = values.mean(1)
    # torch.var_mean takes several times as long on a CPU.
    return mean, (values.square().mean(1) - mean.square()).clamp(min=0)


def resnet(block: Any, maps: list[Tensor], norm: Norm, level: int) -> list[Tensor]:
    """Run diffusers' ResnetBlock2D, without a time embedding, over the maps of all pieces."""
    inner = [block.conv1(F.silu(x)) for x in norm(block.norm1, maps, level)]
    inner = [block.conv2(F.silu(x)) for x in norm(block.norm2, inner, level)]
    if block.conv_shortcut is not None:
        maps = [block.conv_shortcut(x) for x in maps]
    return [x + y for x, y in zip(maps, inner, strict=True)]


def is_local(mid_block: Any) -> bool:
    """Return whether a VAE's middle has no attention, so that it can run on pieces, too."""
    return all(attention is None for attention in mid_block.attentions)


def plain_resnets(blocks: Iterable[Any], of: type[nn.Module]) -> bool:
    """Return whether `resnet` reproduces all ResNets of these blocks."""
    from diffusers.models.resnet import ResnetBlock2D

    return all(
        type(block) is of
        and all(
            type(block_resnet) is ResnetBlock2D
            and block_resnet.time_embedding_norm in ("default", "group")
            and block_resnet.time_emb_proj is None
            and block_resnet.output_scale_factor == 1.0
            and isinstance(block_resnet.nonlinearity, nn.SiLU)
            for block_resnet in cast("Iterable[Any]", block.resnets)
        )
        for block in blocks
    )
