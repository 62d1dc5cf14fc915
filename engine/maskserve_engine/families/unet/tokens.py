"""The tokens that a cached UNet row computes, and the parts of an entry that it reads for the
others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from maskserve_common.imaging.masks import active_tokens_per_level, cover_a_side
from maskserve_engine.cache.loader import Selection
from maskserve_engine.families.unet.spec import level_sizes
from maskserve_engine.families.unet.tile import Ids, Tile, tile_of
from maskserve_engine.planning.flops import ModelWork, RowTokens

REFRESH_HALO = 1
"""Halo, in positions round the mask's box, of rows with refresh steps if `[cache] conv_halo` is 0.
Extrapolated surroundings are more accurate than convolutions over a mix of computed and
extrapolated tokens."""


@dataclass(frozen=True, slots=True)
class ActiveTokens:
    """Computed tokens of one mask, in host memory."""

    levels: Mapping[int, Ids]
    """Level → [n] ids, ascending."""
    tile: Tile | None
    """Tile on which convolutions run; None: the whole picture."""
    refresh_tile: Tile | None
    """Tile of a row with refresh steps, which always has one; None: nothing is masked."""
    cover_a_side: bool
    """Whether the tokens of level 0 cover a whole side of the picture."""

    @classmethod
    def of(
        cls,
        mask: NDArray[np.uint8],
        token_pixels: int,
        levels: int,
        *,
        ring: int,
        halo: int,
        buckets: bool = False,
    ) -> ActiveTokens:
        """Return the computed tokens of an edit mask.

        Args:
            mask: [H, W] at model resolution, above 0 = edit.
            token_pixels: model pixels along one side of a token at level 0.
            levels: levels of the UNet.
            ring: computed tokens of level 0 round the mask.
            halo: `[cache] conv_halo`.
            buckets: whether tiles have sides from buckets (`tile_of`).
        """
        ids = active_tokens_per_level(mask, token_pixels, range(levels), ring)
        height, width = (side // token_pixels for side in mask.shape)
        side = cover_a_side(ids[0], height, width)
        if not len(ids[0]):  # of a template that is only to be primed
            return cls(ids, None, None, side)
        sizes = level_sizes(height, width, levels)
        refresh_tile = tile_of(ids, sizes, halo or REFRESH_HALO, buckets=buckets)
        return cls(ids, refresh_tile if halo else None, refresh_tile, side)

    def row(self, text: int, *, refreshes: bool = False) -> RowTokens:
        """Return the token counts of a pass with `text` text tokens; `refreshes`: its row has
        refresh steps.
        """
        active = tuple(float(len(ids)) for ids in self.levels.values())
        tile = self.refresh_tile if refreshes else self.tile
        if tile is None:
            return RowTokens(active, float(text))
        convolved = tuple(float(level.box.area) for level in tile)
        return RowTokens(active, float(text), convolved)

    def selection(self, work: ModelWork, halves: int) -> Selection:
        """Return the cached tokens per block, and for feature maps the positions in the tile and
        round it.
        """

        def with_text(ids: Ids, level: int) -> Ids:
            return np.concatenate([ids + work.tokens[level] * half for half in range(halves)])

        depth = len(work.tokens)
        read = [
            with_text(np.setdiff1d(np.arange(n), self.levels[i]), i)
            for i, n in enumerate(work.tokens)
        ]
        of_block = [block.level for block in work.blocks]
        if self.tile is not None:
            for strided in (False, True):
                read += [
                    with_text(level.of_template(strided=strided), i)
                    for i, level in enumerate(self.tile)
                ]
            of_block += [
                depth * (2 if feature_map.strided else 1) + feature_map.level
                for feature_map in work.maps
            ]
            # And the means and variances of all maps.
            of_block.append(len(read))
            read.append(np.arange(len(work.maps) * halves))
        return Selection(read, of_block)
