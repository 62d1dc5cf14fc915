"""Refresh steps that compute a quarter of the tokens far from the mask, on models with references.

Four such tokens of a square become one, at their centre: of the picture the mean of the source with
the noise of one, of the reference the mean. Its keys and values stand for all four in the step
cache, the keys turned to each token's own position. No error sees what this loses: a row arrives at
a refresh step with the same keys and values as the lookahead.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn.functional import max_pool2d

from maskserve_engine.batch.packing import Capture, RowInput
from maskserve_engine.families.mmdit import batch
from maskserve_engine.families.mmdit.rows import FlowRow, Row, lookahead_inputs, pass_inputs
from maskserve_engine.planning.flops import RowTokens
from maskserve_studies.quality.choices import FLUX_TEXT
from maskserve_studies.quality.choices import flux as published_flux
from maskserve_studies.quality.refresh_steps import RefreshChoice, flux_step_flops

_GRID = 16
"""Tokens along a side of the demo model's pictures, of which a margin is a share."""


@dataclass(frozen=True)
class CoarseCapture:
    """Gives a step cache keys and values of all tokens, from those of fewer."""

    cache: Capture
    place: Tensor
    """[T + N] computed token that stands for each token."""
    turn: Tensor
    """[T + N, head_dim / 2] complex rotary factors from its position to the token's own."""

    @property
    def text(self) -> bool:
        return self.cache.text

    def hidden(self, block: int, hidden: Tensor) -> None:
        """Ignore hidden states."""

    def keys_values(self, block: int, keys: Tensor, values: Tensor) -> None:
        pairs = torch.view_as_complex(keys.float().reshape(*keys.shape[:-1], -1, 2))
        turned = torch.view_as_real(pairs[self.place] * self.turn[:, None]).flatten(-2)
        self.cache.keys_values(block, turned.to(keys.dtype), values[self.place])


def coarse(row: FlowRow, whole: RowInput, step: int, margin: int) -> RowInput:
    """Return the input `whole` of all tokens at a step with fewer of those that lie farther than
    `margin` tokens from the mask.
    """
    (down, across), n, text = row.image.grid, len(row.image.masked), len(whole.text)
    unmasked, ids = row.image.unmasked, row.image.masked.ids
    assert unmasked is not None
    assert ids is not None
    assert whole.capture is not None
    mask = torch.zeros(down * across)
    mask[ids] = 1.0
    near = max_pool2d(mask.view(1, 1, down, across), 2 * margin + 1, 1, margin).flatten() > 0
    squares = torch.arange(down * across).view(down // 2, 2, across // 2, 2)
    squares = squares.transpose(1, 2).reshape(-1, 4)
    squares = squares[~near[squares].any(dim=1)]
    blend: Any = unmasked.latents.blend  # type: ignore[union-attr]
    behind = len(blend.clean)
    place = torch.empty(down * across, dtype=torch.long)
    place[ids], place[unmasked.ids[:behind]] = torch.arange(n), n + torch.arange(behind)
    groups = torch.cat((place[squares], n + behind + squares))

    tokens, cis = whole.tokens.clone(), whole.cis.clone()
    ones, (first, last) = groups[:, 0], (cis[text + groups[:, i]] for i in (0, 3))
    tokens[ones] = tokens[groups].mean(dim=1)
    outside, sigma = place[squares] - n, row.schedule.sigmas[step].to(tokens.dtype)
    source = (1.0 - sigma) * blend.clean[outside].mean(dim=1)
    tokens[place[squares[:, 0]]] = source + sigma * blend.noise[outside[:, 0]]
    angles = torch.angle(last * first.conj()) / 2
    cis[text + ones] = first * torch.polar(torch.ones_like(angles), angles)

    stands = torch.arange(len(cis))
    stands[text + groups] = (text + ones)[:, None]
    computed_places = torch.zeros(len(cis), dtype=torch.bool)
    computed_places[stands] = True
    computed = (computed_places.cumsum(0) - 1)[stands]
    context = int(computed_places[text + n + behind :].sum())
    return replace(
        whole,
        tokens=tokens[computed_places[text:]],
        cis=cis[computed_places],
        context=context,
        still=context,
        capture=CoarseCapture(whole.capture, computed, whole.cis * cis[stands].conj()),
    )


@contextmanager
def coarse_refreshes(margin: int, *, first: bool) -> Iterator[None]:
    """Let rows look ahead with fewer tokens while the context lasts.

    Args:
        margin: tokens round the mask that are all computed.
        first: whether the first refresh step has fewer tokens, too.
    """

    def coarse_lookahead_inputs(row: Row) -> list[RowInput]:
        inputs = lookahead_inputs(row)
        if not inputs:
            return inputs
        assert isinstance(row, FlowRow)
        assert row.lookahead_step is not None
        return [coarse(row, whole, row.lookahead_step, margin) for whole in inputs]

    def coarse_pass_inputs(row: Row) -> list[RowInput]:
        inputs = pass_inputs(row)
        if not first or not isinstance(row, FlowRow) or row.step > 0:
            return inputs
        return [coarse(row, whole, 0, margin) for whole in inputs]

    with patch.multiple(
        batch, pass_inputs=coarse_pass_inputs, lookahead_inputs=coarse_lookahead_inputs
    ):
        yield


def coarse_flops(
    choice: RefreshChoice, steps: int, refresh_steps: float, margin: int, *, first: bool
) -> float:
    """Return FLOPs as a share of a dense edit's, as `Trial` counts them."""
    work, (whole, between) = published_flux(), flux_step_flops(choice)
    [tokens] = work.tokens
    grid = math.isqrt(tokens)
    near = (round(math.sqrt(0.11) * grid) + 2 * margin * grid // _GRID) ** 2
    computed = (near + (tokens - near) / 4,)
    coarse_step = work.step_flops([RowTokens(computed, FLUX_TEXT, text_read=0)], "kv")
    begin = coarse_step if first else whole
    return (begin + (refresh_steps - 1) * coarse_step + (steps - 1) * between) / (steps * whole)
