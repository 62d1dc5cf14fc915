"""The residual correction of a template's entries, for a row whose first steps are dense.

A row reads entry + sigma / s0 · (dense - first): `dense` are keys and values of its last dense
first step, whose sigma is s0, and `first` is the entry that it reads first. The noisier the step,
the larger the correction.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from maskserve_engine.batch.cache_parts import CacheParts
from maskserve_engine.cache.entries import Coded, encode
from maskserve_engine.cache.loader import Part
from maskserve_engine.layers.scatter_kv import Change, KvSource

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Correction:
    """A block's correction."""

    parts: tuple[Coded, ...]
    """[m, width] keys and values of the cached tokens in the row's last dense first step."""
    difference: bool = False
    """Whether they are the difference between these and the template's entry."""

    def tensors(self) -> tuple[Coded, ...]:
        return self.parts

    def with_tensors(self, tensors: tuple[Coded, ...]) -> _Correction:
        return replace(self, parts=tensors)


class ResidualCorrection:
    """The corrections of one pass, by block.

    Args:
        format: format in which they are kept.
    """

    def __init__(self, format: str) -> None:
        self._format = format
        self.parts = CacheParts[_Correction]()
        self.out_of_memory = False
        """Whether it was dropped for lack of memory."""
        self._step = self._cached_count = 0
        self._sigma = 0.0
        """Sigma of the last dense step."""
        self._dtype = torch.float32
        self._lost: int | None = None
        """Dense first step that found no memory."""

    def __len__(self) -> int:
        return len(self.parts)

    def begin(self, step: int, cached_count: int, sigma: float) -> None:
        """Prepare to keep a step at `sigma`, whose last `cached_count` tokens other steps do not
        compute. 0: this step does not compute them either, and nothing of it is kept.
        """
        self._step, self._cached_count = step, cached_count
        if cached_count:
            self._sigma = sigma

    def keep(self, block: int, kv: Sequence[Tensor]) -> None:
        """Keep [m, width] keys and values of the cached tokens, the last of `kv`, in a dense first
        step.
        """
        count = self._cached_count
        if not count:
            return

        def encoded() -> _Correction:
            return _Correction(tuple([encode(tensor[-count:], self._format) for tensor in kv]))

        self._dtype = kv[0].dtype
        if self._lost == self._step:
            return
        if not self.parts.put((block, "kv"), encoded):
            self._lost = self._step
            self._lose()

    def added_to(self, block: int, entry: KvSource, sigma: float) -> KvSource:
        """Return a template's entry with the correction at `sigma`."""
        name = (block, "kv")
        if name not in self.parts:
            return entry
        correction = self.parts.get(name)
        if not correction.difference:
            if not self.parts.put(name, lambda: self._lack(name, entry)):
                self._lose()
                return entry
            correction = self.parts.get(name)
        return replace(entry, changes=(Change(correction.parts, sigma / self._sigma),))

    def clear(self) -> None:
        self.parts.clear()

    def _lack(self, name: Part, entry: KvSource) -> _Correction:
        dense = self.parts.get(name).parts
        return _Correction(tuple(map(self._less, dense, entry.coded_parts())), difference=True)

    def _less(self, dense: Coded, entry: Coded) -> Coded:
        decoded = torch.empty(
            2, len(dense.data), dense.channels, dtype=self._dtype, device=dense.data.device
        )
        dense.into(decoded[0])
        entry.into(decoded[1])
        return encode(decoded[0] - decoded[1], self._format)

    def _lose(self) -> None:
        """Drop the correction for lack of memory: steps read entries as they are."""
        _log.warning("no memory for an edit's residual correction")
        self.out_of_memory = True
        self.clear()
