"""How a row with refresh steps extrapolates the picture around its tile between them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from maskserve_engine.batch.step_cache import RefreshLine
from maskserve_engine.families.unet.moments import Moments
from maskserve_engine.families.unet.surroundings import Around, RingRead, RingRoom, Surroundings
from maskserve_engine.families.unet.tile import Tile
from maskserve_engine.layers.keep_ring import keep_ring
from maskserve_engine.layers.kernels import has_kernels
from maskserve_engine.planning.flops import FeatureMap


class Extrapolated:
    """A tensor set at each refresh step, linear over sigma to `power` through the last two."""

    def __init__(self, power: float) -> None:
        self._line = RefreshLine((), power)
        self._last: Tensor | None = None
        self._change: Tensor | None = None

    def set(self, new: Tensor, sigma: float) -> None:
        """Set the tensor of the refresh step at `sigma`, which is kept. A retried step is
        ignored.
        """
        if self._line.sigmas[-1:] == (sigma,):
            return
        self._change = None if self._last is None else new - self._last
        self._last, self._line = new, self._line.to(sigma)

    def at(self, sigma: float, out: Tensor | None = None) -> Tensor:
        assert self._last is not None, "the first step is a refresh step"
        if self._change is not None:
            return torch.add(self._last, self._change, alpha=self._line.weight(sigma), out=out)
        return self._last if out is None else out.copy_(self._last)


@dataclass(eq=False)
class _Moment:
    """Identifies the surroundings that a row's step reads: a new object at each step."""

    step: int


class StepCacheSurroundings(Surroundings):
    def __init__(
        self,
        tile: Tile,
        maps: Sequence[FeatureMap],
        passes: int,
        dtype: torch.dtype,
        power: float,
        now: Callable[[], tuple[int, float]],
    ) -> None:
        super().__init__(tile)
        self._maps, self._passes, self._dtype, self._now = maps, passes, dtype, now
        self._rings, self._moments = Extrapolated(power), Extrapolated(power)
        self._new: RingRoom | None = None
        """Surroundings at the refresh step in progress."""
        self._room: RingRoom | None = None
        self._moment: _Moment | None = None
        self._least: Tensor | None = None

    def see(self, number: int, map: int, x: Tensor, groups: int) -> None:
        """Keep the surroundings of a feature map, [C, h, w] of the whole picture, at a refresh
        step.
        """
        self._device = x.device
        self._new = self._new or self.room()
        feature_map = self._maps[map]
        around = self._new.around.get(RingRead(map, feature_map.level, feature_map.strided))
        if around is None:
            return
        place = self.tile[feature_map.level]
        frame = place.frame(strided=feature_map.strided)
        ring, outside = around.ring[number], around.outside
        moments = [] if outside is None else [outside.mean[number], outside.variance[number]]
        if has_kernels(x.device):
            region, box = frame.region, place.box
            keep_ring(
                x,
                frame.ring,
                ring,
                moments,
                [region.top, region.left, region.shape[1]],
                [box.top, box.bottom, box.left, box.right],
                groups,
            )
            return
        x = x[None]
        ring.copy_(frame.region.cut(x).flatten(2).index_select(2, frame.ring)[0])
        if moments:
            new = Moments.of(x, groups) - Moments.of(place.box.cut(x), groups)
            torch._foreach_copy_(moments, [new.mean[0], new.variance[0]])

    def complete_refresh(self, sigma: float) -> None:
        if self._new is None:  # another rank has computed its passes
            return
        self._rings.set(self._new.rings, sigma)
        self._moments.set(self._new.moments, sigma)
        self._new = self._moment = None

    @property
    def entry(self) -> object:
        return self._turned()

    def around(self, number: int, level: int, *, strided: bool) -> Around | None:
        self._turned()
        return self.read().get(RingRead(number, level, strided))

    def read(self) -> dict[RingRead, Around]:
        assert self._room is not None
        return dict(self._room.around)

    def room(self) -> RingRoom:
        return RingRoom(self.tile, self._maps, self._passes, self._dtype, self._device)

    def read_all(self, room: RingRoom) -> bool:
        _, sigma = self._now()
        self._rings.at(sigma, room.rings)
        self._moments.at(sigma, room.moments)
        if self._least is None:
            self._least = self._least_moments()
        room.moments.clamp_(min=self._least)
        return True

    def _least_moments(self) -> Tensor:
        """Lower bounds in the layout of `RingRoom.moments`: an extrapolated variance must not be
        negative.
        """
        room = self.room()
        room.moments.fill_(-torch.inf)
        for around in room.around.values():
            if around.outside is not None:
                around.outside.variance.zero_()
        return room.moments

    def _turned(self) -> _Moment:
        step, _ = self._now()
        if self._moment is None or self._moment.step != step:
            self._room = self._room or self.room()
            self.read_all(self._room)
            self._moment = _Moment(step)
        return self._moment
