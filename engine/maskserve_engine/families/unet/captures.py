"""What rows keep of dense steps: a template's entries, or anchors of their own."""

from __future__ import annotations

import torch
from torch import Tensor

from maskserve_engine.batch.own_anchors import OwnAnchors, OwnPlan
from maskserve_engine.cache.entries import Recorder
from maskserve_engine.cache.loader import Selection
from maskserve_engine.families.unet.foretold import OwnSurroundings
from maskserve_engine.families.unet.moments import Moments


class UnetRecorder(Recorder):
    """Of a priming row (`stack.StackCapture`)."""

    def map(self, number: int, x: Tensor, groups: int) -> None:
        """Keep the map, where maps are kept, and its groups' moments as they are once it is
        stored.
        """
        if not self.maps:
            return
        stored = self.keep_map(x.permute(0, 2, 3, 1).flatten(0, 2))
        back = stored.unflatten(0, (len(x), *x.shape[2:])).permute(0, 3, 1, 2)
        moments = Moments.of(back, groups)
        self.moments(torch.cat((moments.mean, moments.variance), dim=1))


class UnetAnchors(OwnAnchors):
    """Of one pass of a row with anchors of its own (`stack.StackCapture`).

    What a stack makes of its inactive tokens is kept as it leaves the last block. The stack adds it
    to the map that it was given, so what is foretold is how it changes that map.

    Args:
        plan: of the edit.
        number: of the pass.
        selection: of the row's inactive tokens.
        halves: of `selection`.
        surroundings: of the row's tile; None: it has none.
    """

    def __init__(
        self,
        plan: OwnPlan,
        number: int,
        selection: Selection,
        halves: int,
        surroundings: OwnSurroundings | None,
    ) -> None:
        super().__init__(plan)
        self.text = False  # it is in attention of its own, and its keys and values do not change
        self._number, self._selection, self._halves = number, selection, halves
        self._surroundings = surroundings

    def at(self, step: int, sigma: float, *, reads: bool = False) -> UnetAnchors:
        """Itself, about to see an anchor; arguments as of `anchor`."""
        self._step, self._at, self._reads = step, sigma, reads
        return self

    def end(self, block: int, output: Tensor) -> None:
        self._keep(block, "end", (output,))

    def map(self, number: int, x: Tensor, groups: int) -> None:
        if self._surroundings is not None:
            self._surroundings.see(self._number, number, x[0], groups)

    def _others(self, block: int, x: Tensor) -> Tensor:
        ids = self._selection.on(block, x.device)
        return x.index_select(0, ids[: len(ids) // self._halves])
