"""Counted FLOPs of the batch's steps."""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_
from typing import NamedTuple

from maskserve_core.planning.flops import ModelWork, Totals


class _Way(NamedTuple):
    """All that a step's work follows from."""

    counted: Sequence[Totals]
    reads: Sequence[bool]
    kinds: Sequence[str]

    def same(self, other: _Way) -> bool:
        return (
            self[1:] == other[1:]
            and len(self.counted) == len(other.counted)
            and all(map(is_, self.counted, other.counted))
        )


class CountedWork:
    """The FLOPs of a step, kept for as long as the same rows go on in the same way."""

    def __init__(self) -> None:
        self._way, self._flops = _Way((), (), ()), 0.0

    def flops(
        self,
        work: ModelWork,
        counted: Sequence[Totals],
        reads: Sequence[bool],
        kinds: Sequence[str],
    ) -> float:
        """Of one step.

        Args:
            work: of the model at the rows' size.
            counted: what each row costs.
            reads: whether each reads an entry.
            kinds: per block, of the rows that do.
        """
        way = _Way(counted, reads, kinds)
        if not way.same(self._way):
            cached, dense = (
                [own for own, reading in zip(counted, reads, strict=True) if reading is wanted]
                for wanted in (True, False)
            )
            self._way = way
            self._flops = work.batch_flops(
                Totals.sum_of(cached) if cached else None,
                kinds,
                Totals.sum_of(dense) if dense else None,
            )
        return self._flops
