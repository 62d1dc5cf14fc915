"""What a row with anchors of its own takes the picture round its tile for, between them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from maskserve_engine.batch.own_anchors import AnchorLine
from maskserve_engine.families.unet.moments import Moments
from maskserve_engine.families.unet.surroundings import Around, RingRead, RingRoom, Surroundings
from maskserve_engine.families.unet.tile import Tile
from maskserve_engine.planning.flops import FeatureMap


class Foretold:
    """A tensor that each anchor leaves: it lies on the line through the last two.

    Args:
        power: of sigma, that the line is over.
    """

    def __init__(self, power: float) -> None:
        self._line = AnchorLine((), power)
        self._last: Tensor | None = None
        self._change: Tensor | None = None

    def passed(self, new: Tensor, sigma: float) -> None:
        """An anchor at `sigma` has left it, for the first time or, of a step that is tried again,
        once more; kept.
        """
        if self._line.sigmas[-1:] == (sigma,):
            return
        self._change = None if self._last is None else new - self._last
        self._last, self._line = new, self._line.to(sigma)

    def at(self, sigma: float, out: Tensor | None = None) -> Tensor:
        """At `sigma`."""
        assert self._last is not None, "the first step is an anchor"
        if self._change is not None:
            return torch.add(self._last, self._change, alpha=self._line.weight(sigma), out=out)
        return self._last if out is None else out.copy_(self._last)


@dataclass(eq=False)
class _Moment:
    """Stands for what a row's step reads: another one at each step."""

    step: int


class OwnSurroundings(Surroundings):
    """Of a row with anchors of its own.

    Args:
        tile: of the row.
        kept: feature maps of the model, in the order they are read.
        passes: of the row.
        dtype: of the model.
        power: as of `Foretold`.
        now: the row's next step, and its sigma.
    """

    def __init__(
        self,
        tile: Tile,
        kept: Sequence[FeatureMap],
        passes: int,
        dtype: torch.dtype,
        power: float,
        now: Callable[[], tuple[int, float]],
    ) -> None:
        super().__init__(tile)
        self._kept, self._passes, self._dtype, self._now = kept, passes, dtype, now
        self._rings, self._moments = Foretold(power), Foretold(power)
        self._new: RingRoom | None = None
        """What the anchor that is being taken leaves."""
        self._here: RingRoom | None = None
        """As of `_moment`."""
        self._moment: _Moment | None = None
        self._least: Tensor | None = None

    def see(self, number: int, map: int, x: Tensor, groups: int) -> None:
        """Keep what is read round the tile of a feature map, at an anchor.

        Args:
            number: of the pass.
            map: number of the feature map.
            x: [C, h, w] of the whole picture.
            groups: of the norm that reads it.
        """
        self._device = x.device
        self._new = self._new or self.room()
        feature_map = self._kept[map]
        around = self._new.around.get(RingRead(map, feature_map.level, feature_map.strided))
        if around is None:
            return
        place, x = self.tile[feature_map.level], x[None]
        frame = place.frame(strided=feature_map.strided)
        around.ring[number] = frame.region.cut(x).flatten(2).index_select(2, frame.ring)[0]
        if around.outside is not None:
            outside = Moments.of(x, groups) - Moments.of(place.box.cut(x), groups)
            around.outside.mean[number] = outside.mean[0]
            around.outside.variance[number] = outside.variance[0]

    def passed(self, sigma: float) -> None:
        """The anchor at `sigma` is whole."""
        if self._new is None:  # another rank has computed its passes
            return
        self._rings.passed(self._new.rings, sigma)
        self._moments.passed(self._new.moments, sigma)
        self._new = self._moment = None

    @property
    def entry(self) -> object:
        return self._turned()

    def around(self, number: int, level: int, *, strided: bool) -> Around | None:
        self._turned()
        return self.read().get(RingRead(number, level, strided))

    def read(self) -> dict[RingRead, Around]:
        assert self._here is not None
        return dict(self._here.around)

    def room(self) -> RingRoom:
        return RingRoom(self.tile, self._kept, self._passes, self._dtype, self._device)

    def read_all(self, room: RingRoom) -> bool:
        _, sigma = self._now()
        self._rings.at(sigma, room.rings)
        self._moments.at(sigma, room.moments)
        if self._least is None:
            self._least = self._least_moments()
        room.moments.clamp_(min=self._least)
        return True

    def _least_moments(self) -> Tensor:
        """As `RingRoom.moments`: variances are no less than 0, also behind the end of a line."""
        room = self.room()
        room.moments.fill_(-torch.inf)
        for around in room.around.values():
            if around.outside is not None:
                around.outside.variance.zero_()
        return room.moments

    def _turned(self) -> _Moment:
        """Have all that the row's next step reads."""
        step, _ = self._now()
        if self._moment is None or self._moment.step != step:
            self._here = self._here or self.room()
            self.read_all(self._here)
            self._moment = _Moment(step)
        return self._moment
