"""Captures of dense steps: a template's entries, and a row's step caches."""

from __future__ import annotations

import torch
from torch import Tensor

from maskserve_engine.batch.step_cache import RefreshSchedule, StepCache
from maskserve_engine.cache.entries import Recorder
from maskserve_engine.cache.loader import Selection
from maskserve_engine.families.unet.extrapolation import StepCacheSurroundings
from maskserve_engine.families.unet.moments import Moments
from maskserve_engine.families.unet.stack import Shown

SHOWN_TO_STEP_CACHES: frozenset[Shown] = frozenset({"keys_values", "end"})
_SHOWN_WITH_TILES: frozenset[Shown] = frozenset({"keys_values", "end", "map"})


class UnetRecorder(Recorder):
    """Records a template's entries (`stack.StackCapture`)."""

    parts: frozenset[Shown] = frozenset({"hidden", "keys_values", "end", "map"})

    def map(self, number: int, x: Tensor, groups: int) -> None:
        """Keep the map, if maps are kept, and the moments of its groups after storage."""
        if not self.maps:
            return
        stored = self.keep_map(x.permute(0, 2, 3, 1).flatten(0, 2))
        back = stored.unflatten(0, (len(x), *x.shape[2:])).permute(0, 3, 1, 2)
        moments = Moments.of(back, groups)
        self.moments(torch.cat((moments.mean, moments.variance), dim=1))


class UnetStepCache(StepCache):
    """Step cache of one pass (`stack.StackCapture`).

    Cached tokens are kept as they leave a stack's last block. The stack adds them to its input map,
    so the cache extrapolates the change of that map.
    """

    def __init__(
        self,
        schedule: RefreshSchedule,
        number: int,
        selection: Selection,
        halves: int,
        surroundings: StepCacheSurroundings | None,
    ) -> None:
        super().__init__(schedule)
        self.text = False  # text has its own attention, and its keys and values do not change
        self._number, self._selection, self._halves = number, selection, halves
        self._surroundings = surroundings
        self.parts = SHOWN_TO_STEP_CACHES if surroundings is None else _SHOWN_WITH_TILES

    def at(self, step: int, sigma: float, *, reads: bool = False) -> UnetStepCache:
        """Prepare to capture a refresh step, and return itself; arguments as in
        `StepCache.begin_refresh`.
        """
        self._step, self._at, self._reads = step, sigma, reads
        return self

    def end(self, block: int, output: Tensor) -> None:
        self._keep(block, "end", (output,))

    def map(self, number: int, x: Tensor, groups: int) -> None:
        if self._surroundings is not None:
            self._surroundings.see(self._number, number, x[0], groups)

    def _cached_ids(self, block: int, x: Tensor) -> Tensor:
        ids = self._selection.on(block, x.device)
        return ids[: len(ids) // self._halves]
