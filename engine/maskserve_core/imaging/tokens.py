"""Active tokens: which of a picture's tokens an edit computes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from maskserve_core.imaging.morphology import Bools, Bytes2D, grow

TokenIds: TypeAlias = npt.NDArray[np.int64]


def active_tokens(edit: Bytes2D, token_pixels: int, ring: int = 0) -> TokenIds:
    """Ids of the tokens that are computed: those that overlap the edit mask and those within
    `ring` tokens of one of them (a square), ascending.

    Tokens are numbered row by row, as the model lays out its patches.

    Args:
        edit: [h, w], sides multiples of `token_pixels`; above 0 means edited.
        token_pixels: model pixels along one side of a token.
        ring: tokens round the mask that are computed too; what is pasted back is the mask's alone.
    """
    return np.flatnonzero(_token_grid(edit, token_pixels, ring))


def _token_grid(edit: Bytes2D, side: int, ring: int) -> Bools:
    """Whether each token is computed, bool [rows, columns]."""
    height, width = edit.shape
    if height % side or width % side:
        raise ValueError(f"{edit.shape} is not a multiple of {side}")
    rows = edit.reshape(height // side, side, width).max(axis=1)
    grid: Bools = rows.reshape(-1, width // side, side).max(axis=2) > 0
    for axis in (0, 1):
        grid = grow(grid, ring, ring, axis)
    return grid


def cover_a_side(active: TokenIds, rows: int, columns: int) -> bool:
    """Whether tokens of a grid of `rows` x `columns` cover a whole side of it, corner to corner.

    Args:
        active: ids, each once.
        rows: of the grid.
        columns: of the grid.
    """
    ys, xs = np.divmod(active, columns)
    across = (np.count_nonzero(ys == y) == columns for y in (0, rows - 1))
    down = (np.count_nonzero(xs == x) == rows for x in (0, columns - 1))
    return any(across) or any(down)


def active_tokens_per_level(
    edit: Bytes2D, token_pixels: int, levels: Sequence[int], ring: int = 0
) -> dict[int, TokenIds]:
    """Active tokens of a UNet whose stacks attend at several scales.

    Args:
        edit: [h, w] edit mask at the model's size.
        token_pixels: model pixels along one side of a token at level 0.
        levels: how often each wanted level has been halved. A side that does not halve evenly
            rounds up, as a convolution of stride 2 with padding 1 does.
        ring: as of `active_tokens`, in tokens of level 0.

    Returns:
        level → ids, row-major over the level's own grid.
    """
    grid = _token_grid(edit, token_pixels, ring)
    found: dict[int, TokenIds] = {}
    for level in range(max(levels) + 1):
        if level in levels:
            found[level] = np.flatnonzero(grid)
        grid = np.pad(grid, ((0, grid.shape[0] % 2), (0, grid.shape[1] % 2)))
        grid = grid.reshape(grid.shape[0] // 2, 2, grid.shape[1]).max(axis=1)
        grid = grid.reshape(grid.shape[0], -1, 2).max(axis=2)
    return found
