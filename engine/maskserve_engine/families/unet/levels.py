"""Which tokens of a batch a stack computes, per level of the UNet.

A *pass* is one evaluation of the model: a row has one, or two under classifier-free guidance. All
passes of a batch have the same latent shape, so at a level with N tokens the positions of all of
them are simply

    | pass 0: 0 … N-1 | pass 1: N … 2N-1 | …

Computed tokens are packed in that order without padding. Keys are complete: every pass has N, the
computed tokens' at their positions and the others' at theirs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from maskserve_engine.families.attention import Segments, Span, ends, spans, uniform


@dataclass(frozen=True)
class Sparse:
    """Positions at a level where some pass leaves tokens out."""

    core: Tensor
    """[n] of the computed tokens."""
    rest: Tensor
    """[m] of the others."""
    rest_spans: tuple[Span, ...]
    """Of each pass in `rest`; empty where it computes all."""
    own: Segments
    """Self-attention: computed tokens to all tokens."""
    cross: Segments
    """Cross-attention: computed tokens to the text."""

    def split(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Computed and other tokens of [P · N, width]."""
        return tokens.index_select(0, self.core), tokens.index_select(0, self.rest)

    def join(self, core: Tensor, rest: Tensor) -> Tensor:
        """[P · N, …] of what `split` gave."""
        both = core.new_empty(len(core) + len(rest), *core.shape[1:])
        both[self.core], both[self.rest] = core, rest
        return both


@dataclass(frozen=True)
class Level:
    """Tokens of all passes at one level."""

    own: Segments
    """Self-attention where all tokens are there."""
    cross: Segments
    sparse: Sparse | None
    """None when every pass computes all tokens."""


def make_level(
    tokens: int, active: Sequence[Tensor | None], text: Sequence[int], device: torch.device
) -> Level:
    """The level of a batch.

    Args:
        tokens: of one pass.
        active: per pass its computed tokens' ids, ascending; None: all.
        text: text tokens per pass.
        device: of the indices.
    """
    whole = [tokens] * len(active)
    sparse = None
    if any(ids is not None for ids in active):
        core, rest = [], []
        for (begin, _), ids in zip(spans(whole), active, strict=True):
            computed = torch.ones(tokens, dtype=torch.bool, device=device)
            if ids is not None:
                computed.zero_()[ids] = True
            core.append(begin + computed.nonzero()[:, 0])
            rest.append(begin + (~computed).nonzero()[:, 0])
        counts = [len(part) for part in core]
        sparse = Sparse(
            torch.cat(core),
            torch.cat(rest),
            spans([len(part) for part in rest]),
            _segments(counts, whole, device),
            _segments(counts, text, device),
        )
    return Level(_segments(whole, whole, device), _segments(whole, text, device), sparse)


def _segments(queries: Sequence[int], keys: Sequence[int], device: torch.device) -> Segments:
    q_spans, k_spans = spans(queries), spans(keys)
    return Segments(
        q_spans,
        k_spans,
        ends(q_spans).to(device),
        ends(k_spans).to(device),
        uniform(queries),
        uniform(keys),
    )
