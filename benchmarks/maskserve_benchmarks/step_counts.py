"""Counted figures of a step: the gain that its FLOPs allow, and the bytes that a tile loads."""

from __future__ import annotations

import math

import numpy as np

from maskserve_engine.planning.entry_bytes import EntryFormat
from maskserve_engine.planning.flops import DENSE, KINDS, Floats, ModelWork, RowTokens


def flop_limit(
    work: ModelWork,
    mask_ratio: float,
    text: float,
    *,
    kind: str = "kv",
    blocks_only: bool = False,
) -> float:
    """Return dense FLOPs over cached FLOPs of one row. At equal FLOP/s no cached step can be faster
    by more than this, so every benchmark prints it beside its measurement.

    Args:
        work: the model at the image's size.
        mask_ratio: computed tokens over all tokens, the same on every level.
        text: text tokens of the row.
        kind: how the cached row runs its blocks.
        blocks_only: leave out embedders, convolutions and the final layer.
    """
    row = work.row_at(mask_ratio, text)
    if blocks_only:
        flops = work.block_flops(work.totals([row])).sum(axis=0)
        return float(flops[DENSE] / flops[KINDS.index(kind)])
    return work.step_flops([row], "dense") / work.step_flops([row], kind)


def tile_bytes(work: ModelWork, row: RowTokens, fmt: EntryFormat) -> Floats:
    """Return the bytes of feature maps that a row with a tile loads before each block, `[blocks]`.
    Maps read behind the last block count at the last block. All are zero without a halo.

    Args:
        work: the model at the image's size.
        row: the row; its tile counts as a square at each level.
        fmt: storage format.
    """
    loads = np.zeros(len(work.blocks))
    if row.convolved is not None:
        for feature_map in work.maps:
            total, computed = work.tokens[feature_map.level], row.convolved[feature_map.level]
            if computed < total:  # with the position around it that a convolution reads
                read = min(float(total), (math.sqrt(computed) + 2) ** 2)
                loads[min(feature_map.block, len(loads) - 1)] += fmt.bytes_of(
                    read, feature_map.width
                )
    return loads
