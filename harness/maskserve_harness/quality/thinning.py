"""Other tokens to read than a worker's: of those outside, some near the mask and a quarter of the
others, none but the reference's, or all but the reference's under the mask, which are computed.

A far token that is kept may stand for the four it replaces: log 4 on its logits, which is what its
key and value standing there four times come to.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from maskserve_engine.cache.loader import Selection
from maskserve_engine.families.mmdit.preparation import FlowTemplate
from maskserve_engine.families.mmdit.rows import FlowRow

NEAR = 2
"""Tokens from a computed one within which everything is kept."""


def thinned(row: FlowRow, stands_for: int) -> FlowRow:
    """A cached row like `row` that attends to fewer tokens, each far one in place of `stands_for`;
    steps and latents are its own.
    """
    held = row.inactive
    if held is None:  # a dense row attends to all there are
        return row
    across = row.grid[1]
    outside = held.index.numpy()
    ys, xs = np.divmod(outside, across)
    active_ys, active_xs = np.divmod(held.active.numpy(), across)
    apart = np.maximum(
        np.abs(ys[:, None] - active_ys[None]), np.abs(xs[:, None] - active_xs[None])
    ).min(axis=1)
    near = np.flatnonzero(apart <= NEAR)
    far = np.flatnonzero((apart > NEAR) & (ys % 2 == 0) & (xs % 2 == 0))
    return _of(row, torch.from_numpy(np.concatenate((near, np.repeat(far, stands_for)))))


def references_alone(row: FlowRow) -> FlowRow:
    """A cached row like `row` that attends to no token of the picture outside the mask."""
    held = row.inactive
    if held is None:
        return row
    return _of(row, torch.nonzero(held.index >= row.grid[0] * row.grid[1])[:, 0])


def references_computed(row: FlowRow) -> FlowRow:
    """A cached row like `row` that computes the reference's tokens under the mask, too; not for
    steps that compute all tokens.
    """
    held = row.inactive
    if held is None:
        return row
    assert isinstance(held.outside, FlowTemplate)
    assert held.outside.context is not None
    under = torch.isin(held.index, held.active + row.grid[0] * row.grid[1])
    fewer = _of(row, torch.nonzero(~under)[:, 0])
    cis = torch.cat((row.cis, held.cis[under]))
    return replace(fewer, context=held.outside.context[held.active], cis=cis)


def _of(row: FlowRow, chosen: torch.Tensor) -> FlowRow:
    """With some of its inactive tokens."""
    held = row.inactive
    assert held is not None
    assert isinstance(held.outside, FlowTemplate)
    picture = chosen[chosen < len(held.outside.clean)]
    fewer = replace(
        held,
        index=held.index[chosen],
        outside=held.outside.take(picture),
        cis=held.cis[chosen],
        selection=Selection([held.index[chosen].numpy()]),
    )
    return replace(row, inactive=fewer)
