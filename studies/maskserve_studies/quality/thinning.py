"""Other sets of tokens for a cached step to read: of the tokens outside the mask, those near it and
a quarter of the others; those of the reference alone; or all but those of the reference under the
mask, which the step computes.

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
"""Distance in tokens from a computed token within which all tokens are kept."""


def thinned(row: FlowRow, stands_for: int) -> FlowRow:
    """Return a cached row like `row` whose attention reads fewer tokens. Each far token counts as
    `stands_for` tokens. The new row has its own step and latents.
    """
    cached_tokens = row.inactive
    if cached_tokens is None:  # attention of a dense row reads all tokens
        return row
    across = row.grid[1]
    outside = cached_tokens.index.numpy()
    ys, xs = np.divmod(outside, across)
    active_ys, active_xs = np.divmod(cached_tokens.active.numpy(), across)
    distance = np.maximum(
        np.abs(ys[:, None] - active_ys[None]), np.abs(xs[:, None] - active_xs[None])
    ).min(axis=1)
    near = np.flatnonzero(distance <= NEAR)
    far = np.flatnonzero((distance > NEAR) & (ys % 2 == 0) & (xs % 2 == 0))
    return _of(row, torch.from_numpy(np.concatenate((near, np.repeat(far, stands_for)))))


def references_alone(row: FlowRow) -> FlowRow:
    """Return a cached row like `row` whose attention reads no token of the picture outside the
    mask.
    """
    cached_tokens = row.inactive
    if cached_tokens is None:
        return row
    return _of(row, torch.nonzero(cached_tokens.index >= row.grid[0] * row.grid[1])[:, 0])


def references_computed(row: FlowRow) -> FlowRow:
    """Return a cached row like `row` that also computes the reference's tokens under the mask. It
    cannot take steps that compute all tokens.
    """
    cached_tokens = row.inactive
    if cached_tokens is None:
        return row
    assert isinstance(cached_tokens.outside, FlowTemplate)
    assert cached_tokens.outside.context is not None
    under = torch.isin(cached_tokens.index, cached_tokens.active + row.grid[0] * row.grid[1])
    fewer = _of(row, torch.nonzero(~under)[:, 0])
    cis = torch.cat((row.cis, cached_tokens.cis[under]))
    return replace(fewer, context=cached_tokens.outside.context[cached_tokens.active], cis=cis)


def _of(row: FlowRow, chosen: torch.Tensor) -> FlowRow:
    """Return the row with only the chosen ones of its cached tokens."""
    cached_tokens = row.inactive
    assert cached_tokens is not None
    assert isinstance(cached_tokens.outside, FlowTemplate)
    picture = chosen[chosen < len(cached_tokens.outside.clean)]
    fewer = replace(
        cached_tokens,
        index=cached_tokens.index[chosen],
        outside=cached_tokens.outside.take(picture),
        cis=cached_tokens.cis[chosen],
        selection=Selection([cached_tokens.index[chosen].numpy()]),
    )
    return replace(row, inactive=fewer)
