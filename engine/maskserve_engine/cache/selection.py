"""Which tokens of an entry a row reads: its inactive ones."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class Selection:
    """Token ids per level of the model; blocks of one level read the same tokens.

    Args:
        levels: [n] int64 ids each, in the order in which the row has its inactive tokens.
        of_block: level of each block; empty where the model has one level.
    """

    def __init__(self, levels: Sequence[NDArray[np.int64]], of_block: Sequence[int] = ()) -> None:
        self.levels = tuple(np.ascontiguousarray(ids, dtype=np.int64) for ids in levels)
        self._of_block = tuple(of_block)
        digest = hashlib.blake2b(digest_size=16)
        for ids in self.levels:
            digest.update(len(ids).to_bytes(8, "little"))
            digest.update(ids.tobytes())
        self._sent: dict[tuple[int, torch.device], Tensor] = {}
        self.digest = digest.digest()
        """Equal for equal ids: rows of one mask share what is loaded for them."""

    def of(self, block: int) -> NDArray[np.int64]:
        """[n] ids that `block` reads."""
        return self.levels[self._of_block[block] if self._of_block else 0]

    def sent(self, levels: Sequence[Tensor]) -> None:
        """Keep the ids per level as they went to a device with their row: `on` need not wait."""
        for level, ids in enumerate(levels):
            self._sent[level, ids.device] = ids

    def on(self, block: int, device: torch.device) -> Tensor:
        """`of` as a tensor of the device, kept."""
        level = self._of_block[block] if self._of_block else 0
        if (level, device) not in self._sent:
            self._sent[level, device] = torch.from_numpy(self.levels[level]).to(device)
        return self._sent[level, device]
