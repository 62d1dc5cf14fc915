"""Where the feature maps of some passes are computed: on the whole picture, or on a row's tile.

Everything outside the tile is the template's: a norm's means and variances are those of the mixed
map, and a convolution at the tile's edge reads the template's features beyond it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable
from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import Tensor

from maskserve_engine.batch.graphs import Inputs
from maskserve_engine.batch.row_updates import ByPass
from maskserve_engine.families.unet.moments import Moments, normalise
from maskserve_engine.families.unet.surroundings import Around, CopiedSurroundings, Surroundings


class Site(NamedTuple):
    """A place in the UNet where a feature map is read."""

    number: int
    """Number of the map, in the order they are read."""
    level: int


class Canvas(ABC):
    """A contiguous slice of the batch's passes."""

    def __init__(self, passes: slice) -> None:
        self.passes = passes

    @property
    def shapes(self) -> Hashable:
        return self.passes.start, self.passes.stop

    @abstractmethod
    def copied(self, inputs: Inputs) -> Canvas:
        """Return the same canvas on copied tensors, without entries."""

    @abstractmethod
    def take(self, other: Canvas) -> None:
        """Copy the tile position of another canvas of the same shapes."""

    @abstractmethod
    def turn_to(self, other: Canvas, *, anew: bool) -> None:
        """Read the surroundings of another canvas's next step; `anew`: whatever was read before.

        Raises:
            EntryLost: an entry's load failed.
        """

    @abstractmethod
    def enter(self, conv: Any, sample: Tensor) -> Tensor:
        """Apply `conv_in` to the model's input, [p, C, h, w] of the whole picture."""

    @abstractmethod
    def norm(self, site: Site, norm: Any, x: Tensor) -> Tensor:
        """Apply a GroupNorm to `x`."""

    @abstractmethod
    def norm_around(self, site: Site, norm: Any, x: Tensor) -> Tensor:
        """Apply a GroupNorm to `x` and to the border that a 3x3 convolution reads."""

    @abstractmethod
    def convolve(self, level: int, conv: Any, x: Tensor) -> Tensor:
        """Apply a 3x3 convolution to the activated result of `norm_around`."""

    @abstractmethod
    def shrink(self, site: Site, sampler: Any, conv: Any, x: Tensor) -> Tensor:
        """Apply a Downsample2D, perhaps with another convolution; `site` is on the finer level."""

    @abstractmethod
    def widen(
        self, level: int, size: tuple[int, int], sampler: Any, conv: Any, x: Tensor
    ) -> Tensor:
        """Apply an Upsample2D to `size` on `level`, perhaps with another convolution."""

    @abstractmethod
    def cut(self, level: int, x: Tensor) -> Tensor:
        """Return the computed part of a map [..., h, w] of the whole picture."""

    @abstractmethod
    def leave(self, size: tuple[int, int], answer: Tensor) -> Tensor:
        """Return the model's answer for the whole picture; 0 where nothing was computed."""


class Whole(Canvas):
    """Passes that compute the whole picture with the model's own modules."""

    def copied(self, inputs: Inputs) -> Whole:
        return self

    def take(self, other: Canvas) -> None: ...

    def turn_to(self, other: Canvas, *, anew: bool) -> None: ...

    def enter(self, conv: Any, sample: Tensor) -> Tensor:
        return conv(sample)

    def norm(self, site: Site, norm: Any, x: Tensor) -> Tensor:
        return norm(x)

    def norm_around(self, site: Site, norm: Any, x: Tensor) -> Tensor:
        return norm(x)

    def convolve(self, level: int, conv: Any, x: Tensor) -> Tensor:
        return conv(x)

    def shrink(self, site: Site, sampler: Any, conv: Any, x: Tensor) -> Tensor:
        return sampler(x) if conv is sampler.conv else conv(x)

    def widen(
        self, level: int, size: tuple[int, int], sampler: Any, conv: Any, x: Tensor
    ) -> Tensor:
        if conv is sampler.conv:
            return sampler(x, size)
        return conv(F.interpolate(x, size, mode="nearest"))

    def cut(self, level: int, x: Tensor) -> Tensor:
        return x

    def leave(self, size: tuple[int, int], answer: Tensor) -> Tensor:
        return answer


class Tiled(Canvas):
    """Passes of a row whose convolutions run on its tile."""

    def __init__(
        self, passes: slice, surroundings: Surroundings | CopiedSurroundings, first: int
    ) -> None:
        super().__init__(passes)
        self.tile, self._surroundings = surroundings.tile, surroundings
        self._passes = slice(first, first + passes.stop - passes.start)

    @property
    def shapes(self) -> Hashable:
        return self.passes.start, self.passes.stop, self._passes.start, self._surroundings.shapes

    def copied(self, inputs: Inputs) -> Tiled:
        assert isinstance(self._surroundings, Surroundings)
        surroundings = CopiedSurroundings(self._surroundings, inputs)
        return Tiled(self.passes, surroundings, self._passes.start)

    def take(self, other: Canvas) -> None:
        assert isinstance(other, Tiled)
        assert isinstance(other._surroundings, Surroundings)
        assert isinstance(self._surroundings, CopiedSurroundings)
        self._surroundings.take(other._surroundings)

    def turn_to(self, other: Canvas, *, anew: bool) -> None:
        assert isinstance(other, Tiled)
        assert isinstance(other._surroundings, Surroundings)
        assert isinstance(self._surroundings, CopiedSurroundings)
        self._surroundings.turn_to(other._surroundings, anew=anew)

    def enter(self, conv: Any, sample: Tensor) -> Tensor:
        return _convolve(conv, self.tile[0].enter(sample))

    def norm(self, site: Site, norm: Any, x: Tensor) -> Tensor:
        return normalise(norm, x, self._moments(norm, x, self._around(site)))

    def norm_around(self, site: Site, norm: Any, x: Tensor) -> Tensor:
        around = self._around(site)
        moments = self._moments(norm, x, around)
        ring = None if around is None else around.ring
        return normalise(norm, self.tile[site.level].near.paste(x, ring), moments)

    def convolve(self, level: int, conv: Any, x: Tensor) -> Tensor:
        return _convolve(conv, self.tile[level].near.read(x))

    def shrink(self, site: Site, sampler: Any, conv: Any, x: Tensor) -> Tensor:
        around, frame = self._around(site, strided=True), self.tile[site.level].strided
        ring = None if around is None else around.ring
        return _convolve(conv, frame.read(frame.paste(x, ring)))

    def widen(
        self, level: int, size: tuple[int, int], sampler: Any, conv: Any, x: Tensor
    ) -> Tensor:
        return _convolve(conv, self.tile[level].upsampled(x))

    def cut(self, level: int, x: Tensor) -> Tensor:
        return self.tile[level].box.cut(x)

    def leave(self, size: tuple[int, int], answer: Tensor) -> Tensor:
        return self.tile[0].leave(answer)

    def _around(self, site: Site, *, strided: bool = False) -> Around | None:
        around = self._surroundings.around(site.number, site.level, strided=strided)
        return None if around is None else around.of_passes(self._passes)

    def _moments(self, norm: Any, x: Tensor, around: Around | None) -> Moments:
        tile_moments = Moments.of(x, norm.num_groups)
        if around is None:
            return tile_moments
        assert around.outside is not None, "no norm reads what a strided convolution does"
        return around.outside + tile_moments


def _convolve(conv: Any, x: Tensor) -> Tensor:
    """Convolve `x`, which includes the border."""
    if isinstance(conv, ByPass):
        return conv.valid(x)
    return F.conv2d(x, conv.weight, conv.bias, conv.stride)
