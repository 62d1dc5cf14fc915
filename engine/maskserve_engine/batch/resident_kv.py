"""Keys and values of cached rows that stay in their places from step to step, where they fit."""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_

from torch import Tensor


class ResidentKV:
    """Of one batch. As long as its rows read the same entries, their inactive tokens' keys and
    values are the same at every step: only those of the computed tokens are written anew.
    """

    def __init__(self) -> None:
        self._entries: tuple[object, ...] = ()
        self._blocks: dict[int, tuple[Tensor, Tensor]] = {}

    def keep_for(self, entries: Sequence[object]) -> None:
        """Forget all, unless the rows read these still.

        Args:
            entries: what each cached row reads at this step; held until the next one.
        """
        if len(entries) != len(self._entries) or not all(map(is_, entries, self._entries)):
            self._blocks.clear()
        self._entries = tuple(entries)

    def get(self, block: int) -> tuple[Tensor, Tensor] | None:
        """[keys, heads, head_dim] keys and values of all rows; None: not kept."""
        return self._blocks.get(block)

    def keep(self, block: int, both: tuple[Tensor, Tensor], room: int) -> None:
        """Keep a block's keys and values, unless they take more than `room` bytes."""
        if sum(each.nbytes for each in both) <= room:
            self._blocks[block] = both
