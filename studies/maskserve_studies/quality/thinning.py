"""Cached steps that read fewer tokens: only tokens near the mask and a quarter of the others, only
the tokens of the reference, or all but the reference's tokens under the mask, which the step then
computes.

A far token can count as the four tokens that it replaces: its key and value then occur four times,
which adds log 4 to its logits.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from maskserve_engine.cache.loader import Selection
from maskserve_engine.families.mmdit.preparation import FlowTemplate
from maskserve_engine.families.mmdit.rows import FlowRow

NEAR = 2
"""Distance in tokens from a computed token within which all tokens are kept."""


def thinned(row: FlowRow, weight: int) -> FlowRow:
    """Return a cached row like `row` whose attention reads fewer tokens. Each far token counts as
    `weight` tokens. The new row has its own step and latents.
    """
    unmasked, computed_ids = row.image.unmasked, row.image.masked.ids
    if unmasked is None or computed_ids is None:  # attention of a dense row reads all tokens
        return row
    across = row.image.grid[1]
    unmasked_ids = unmasked.ids.numpy()
    ys, xs = np.divmod(unmasked_ids, across)
    active_ys, active_xs = np.divmod(computed_ids.numpy(), across)
    distance = np.maximum(
        np.abs(ys[:, None] - active_ys[None]), np.abs(xs[:, None] - active_xs[None])
    ).min(axis=1)
    near = np.flatnonzero(distance <= NEAR)
    far = np.flatnonzero((distance > NEAR) & (ys % 2 == 0) & (xs % 2 == 0))
    return _with_tokens(row, torch.from_numpy(np.concatenate((near, np.repeat(far, weight)))))


def references_alone(row: FlowRow) -> FlowRow:
    """Return a cached row like `row` whose attention reads no token of the picture outside the
    mask.
    """
    if row.image.unmasked is None:
        return row
    return _with_tokens(
        row, torch.nonzero(row.image.unmasked.ids >= row.image.grid[0] * row.image.grid[1])[:, 0]
    )


def references_computed(row: FlowRow) -> FlowRow:
    """Return a cached row like `row` that also computes the reference's tokens under the mask. It
    cannot take steps that compute all tokens.
    """
    unmasked, computed_ids = row.image.unmasked, row.image.masked.ids
    if unmasked is None or computed_ids is None:
        return row
    assert unmasked.latents.context is not None
    under = torch.isin(unmasked.ids, computed_ids + row.image.grid[0] * row.image.grid[1])
    reduced = _with_tokens(row, torch.nonzero(~under)[:, 0])
    reduced.image.masked.context = unmasked.latents.context[computed_ids]
    reduced.image.masked.cis = torch.cat((row.image.masked.cis, unmasked.cis[under]))
    return reduced


def _with_tokens(row: FlowRow, token_ids: torch.Tensor) -> FlowRow:
    """Return the row with only the chosen ones of its cached tokens."""
    unmasked = row.image.unmasked
    assert unmasked is not None
    assert isinstance(unmasked.latents, FlowTemplate)
    picture = token_ids[token_ids < len(unmasked.latents.clean)]
    reduced = replace(
        unmasked,
        ids=unmasked.ids[token_ids],
        latents=unmasked.latents.take(picture),
        cis=unmasked.cis[token_ids],
        selection=Selection([unmasked.ids[token_ids].numpy()]),
    )
    return replace(
        row, image=replace(row.image, unmasked=reduced, masked=replace(row.image.masked))
    )
