"""Where the feature maps of some passes are computed: on the whole picture, or on a row's tile.

Whatever is not computed is the template's: a norm's means and variances are those of the mixed
map, and a convolution at the tile's edge reads the template's features beyond it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable
from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import Tensor

from maskserve_engine.batch.row_updates import ByPass
from maskserve_engine.families.unet.moments import Moments, normalise
from maskserve_engine.families.unet.surroundings import Around, HeldSurroundings, Surroundings


class Site(NamedTuple):
    """A place in the UNet where a feature map is read."""

    number: int
    """Of the map, in the order they are read."""
    level: int


class Canvas(ABC):
    """Some passes in a row.

    Args:
        passes: of the batch.
    """

    def __init__(self, passes: slice) -> None:
        self.passes = passes

    @property
    def shapes(self) -> Hashable:
        """All that the shapes of what is computed follow from."""
        return self.passes.start, self.passes.stop

    @abstractmethod
    def copied(self) -> Canvas:
        """The same in tensors of its own, which can take in what others of its shapes have."""

    @abstractmethod
    def take(self, other: Canvas) -> None:
        """Compute where another one does."""

    @abstractmethod
    def turn_to(self, other: Canvas) -> None:
        """Read round the tile what another one's next step reads.

        Raises:
            EntryLost: as `Handle.wait`.
        """

    @abstractmethod
    def enter(self, conv: Any, sample: Tensor) -> Tensor:
        """`conv_in` over the model's input, [p, C, h, w] of the whole picture."""

    @abstractmethod
    def norm(self, site: Site, norm: Any, x: Tensor) -> Tensor:
        """A GroupNorm over `x`."""

    @abstractmethod
    def norm_around(self, site: Site, norm: Any, x: Tensor) -> Tensor:
        """A GroupNorm over `x` and what a 3x3 convolution reads round it."""

    @abstractmethod
    def convolve(self, level: int, conv: Any, x: Tensor) -> Tensor:
        """A 3x3 convolution over what `norm_around` gave, activated."""

    @abstractmethod
    def shrink(self, site: Site, sampler: Any, conv: Any, x: Tensor) -> Tensor:
        """A Downsample2D, whose convolution may be another; the site is the level that it comes
        from.
        """

    @abstractmethod
    def widen(
        self, level: int, size: tuple[int, int], sampler: Any, conv: Any, x: Tensor
    ) -> Tensor:
        """An Upsample2D to the picture's `size` on `level`; its convolution may be another."""

    @abstractmethod
    def cut(self, level: int, x: Tensor) -> Tensor:
        """What is computed here of a map [..., h, w] of the whole picture."""

    @abstractmethod
    def leave(self, size: tuple[int, int], answer: Tensor) -> Tensor:
        """The model's answer for the whole picture; what was not computed is 0."""


class Whole(Canvas):
    """Passes that compute the whole picture, as the real modules do."""

    def copied(self) -> Whole:
        return self

    def take(self, other: Canvas) -> None: ...

    def turn_to(self, other: Canvas) -> None: ...

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
    """The passes of a row whose convolutions run on its tile.

    Args:
        passes: of the batch, all of one row.
        surroundings: of the row.
        first: number of the first of them among the row's own.
    """

    def __init__(
        self, passes: slice, surroundings: Surroundings | HeldSurroundings, first: int
    ) -> None:
        super().__init__(passes)
        self.tile, self._surroundings = surroundings.tile, surroundings
        self._own = slice(first, first + passes.stop - passes.start)

    @property
    def shapes(self) -> Hashable:
        return self.passes.start, self.passes.stop, self._own.start, self._surroundings.shapes

    def copied(self) -> Tiled:
        assert isinstance(self._surroundings, Surroundings)
        return Tiled(self.passes, HeldSurroundings(self._surroundings), self._own.start)

    def take(self, other: Canvas) -> None:
        assert isinstance(other, Tiled)
        assert isinstance(other._surroundings, Surroundings)
        assert isinstance(self._surroundings, HeldSurroundings)
        self._surroundings.take(other._surroundings)

    def turn_to(self, other: Canvas) -> None:
        assert isinstance(other, Tiled)
        assert isinstance(other._surroundings, Surroundings)
        assert isinstance(self._surroundings, HeldSurroundings)
        self._surroundings.turn_to(other._surroundings)

    def enter(self, conv: Any, sample: Tensor) -> Tensor:
        return _convolved(conv, self.tile[0].enter(sample))

    def norm(self, site: Site, norm: Any, x: Tensor) -> Tensor:
        return normalise(norm, x, self._moments(norm, x, self._around(site)))

    def norm_around(self, site: Site, norm: Any, x: Tensor) -> Tensor:
        around = self._around(site)
        moments = self._moments(norm, x, around)
        ring = None if around is None else around.ring
        return normalise(norm, self.tile[site.level].near.paste(x, ring), moments)

    def convolve(self, level: int, conv: Any, x: Tensor) -> Tensor:
        return _convolved(conv, self.tile[level].near.read(x))

    def shrink(self, site: Site, sampler: Any, conv: Any, x: Tensor) -> Tensor:
        around, frame = self._around(site, strided=True), self.tile[site.level].strided
        ring = None if around is None else around.ring
        return _convolved(conv, frame.read(frame.paste(x, ring)))

    def widen(
        self, level: int, size: tuple[int, int], sampler: Any, conv: Any, x: Tensor
    ) -> Tensor:
        return _convolved(conv, self.tile[level].upsampled(x))

    def cut(self, level: int, x: Tensor) -> Tensor:
        return self.tile[level].box.cut(x)

    def leave(self, size: tuple[int, int], answer: Tensor) -> Tensor:
        return self.tile[0].leave(answer)

    def _around(self, site: Site, *, strided: bool = False) -> Around | None:
        around = self._surroundings.around(site.number, site.level, strided=strided)
        return None if around is None else around.of_passes(self._own)

    def _moments(self, norm: Any, x: Tensor, around: Around | None) -> Moments:
        """Of the mixed map."""
        tile_moments = Moments.of(x, norm.num_groups)
        if around is None:
            return tile_moments
        assert around.outside is not None, "no norm reads what a strided convolution does"
        return around.outside + tile_moments


def _convolved(conv: Any, x: Tensor) -> Tensor:
    """What is read beyond the tile is in `x`."""
    if isinstance(conv, ByPass):
        return conv.valid(x)
    return F.conv2d(x, conv.weight, conv.bias, conv.stride)
