"""Which tokens of an entry a UNet row reads."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from maskserve_core.planning.flops import ModelWork
from maskserve_engine.cache.selection import Selection
from maskserve_engine.families.unet.tile import Ids, Tile


def selection_of(
    active: Mapping[int, Ids], tile: Tile | None, work: ModelWork, halves: int
) -> Selection:
    """Of blocks the inactive tokens; of feature maps what lies in the tile and round it.

    Args:
        active: level → ids of computed tokens.
        tile: of the row; None: its convolutions run on the whole picture.
        work: of the model at the row's size.
        halves: of the entries (`Adapter.entry_halves`), one behind the other.
    """

    def both(ids: Ids, level: int) -> Ids:
        return np.concatenate([ids + work.tokens[level] * half for half in range(halves)])

    depth = len(work.tokens)
    read = [both(np.setdiff1d(np.arange(n), active[i]), i) for i, n in enumerate(work.tokens)]
    of_block = [block.level for block in work.blocks]
    if tile is not None:
        for strided in (False, True):
            read += [both(level.ids(strided=strided), i) for i, level in enumerate(tile)]
        of_block += [depth * (2 if each.strided else 1) + each.level for each in work.maps]
        # And the means and variances of all maps.
        of_block.append(len(read))
        read.append(np.arange(len(work.maps) * halves))
    return Selection(read, of_block)
