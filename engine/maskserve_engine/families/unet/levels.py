"""Which tokens of a batch a stack computes, per level of the UNet.

A *pass* is one evaluation of the model: a row has one, or two under classifier-free guidance. All
passes of a batch have the same latent shape, so the positions of all passes at a level with N
tokens are

    | pass 0: 0 … N-1 | pass 1: N … 2N-1 | …

Computed tokens are packed in that order without padding. Keys are complete: every pass has N, first
the computed tokens', then the cached ones', since attention does not depend on their order. A pass
whose convolutions run on a tile has features in its box only.

Where steps are recorded (`batch.graphs`), a cached pass computes a bucket's number of tokens, so
that a few numbers determine the shapes of all tensors. The extra token is a cached one, and its
result is overwritten from the cache. Passes of several rows are padded together: one has all extra
tokens, and where each pass ends is copied in.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from maskserve_engine.batch.padding import padded
from maskserve_engine.batch.transfer import copy_tensors, mapped
from maskserve_engine.families.unet.tile import PARTS, Ids
from maskserve_engine.layers.attention import Segments, Span, bucket, spans
from maskserve_engine.layers.attention import segments as segments_of
from maskserve_engine.layers.scatter_kv import KvSlots, slots_of
from maskserve_engine.layers.shrink_expand import padded_tiles

_QUANTA = 16
"""Lengths, up to all tokens of a large picture, to which passes are padded together."""


@dataclass(frozen=True)
class Keys:
    """Positions of computed and cached tokens' keys among the keys of all passes."""

    core: Tensor
    """[n] positions of the computed tokens."""
    slots: KvSlots
    """Slots of the cached tokens: those of a pass are contiguous."""
    cached: KvSlots
    count: int


@dataclass(frozen=True)
class Partition:
    """Positions of computed and cached tokens among the tokens of all passes."""

    core: Tensor
    """[n] positions of the computed tokens."""
    slots: KvSlots
    """Slots of the cached tokens, pass by pass; empty where a pass computes all."""
    count: int

    @property
    def cached(self) -> Tensor:
        """[m] positions of the cached tokens."""
        return self.slots.to


@dataclass(frozen=True)
class Sparse:
    """Tokens of a level where some pass does not compute all."""

    keys: Keys
    """Keys of self-attention."""
    computed: Partition
    """Tokens whose features are computed: in a pass with a tile, those of its box."""
    cached_in_box: tuple[Tensor | None, ...]
    """Per pass, the indices of its cached tokens that lie in the box; None: all."""
    segments: Segments
    """Computed tokens attend to all tokens of their pass."""
    cross: Segments
    """Computed tokens attend to the text."""
    passes: tuple[Span, ...]
    """Span of each pass among the computed tokens."""
    tiles: Tensor | None
    """[T, 3] tiles of all passes for the kernels of LoRAs (`shrink_expand.tiles_of`), as many for
    any passes of as many tokens; None: passes are not padded together."""


@dataclass(frozen=True)
class Level:
    segments: Segments
    """All tokens attend to all tokens of their pass."""
    cross: Segments
    sparse: Sparse | None
    """None if every pass computes all tokens."""
    tiled: bool

    @property
    def passes(self) -> tuple[Span, ...]:
        """Span of each pass among all tokens."""
        return self.segments.q_spans

    @property
    def shapes(self) -> Hashable:
        """Key of all tensor shapes, for the same passes of the same picture's size."""
        return (self.sparse or self).segments.q_spans

    def copied(self, copy: Callable[[Tensor], Tensor]) -> Level:
        """Return the same level with a copy of what differs among levels of its shapes."""
        if self.sparse is None:
            return self
        keys, computed, ends, tiles = mapped(_moving(self.sparse), copy)
        sparse = self.sparse
        return replace(
            self,
            sparse=replace(
                sparse,
                keys=replace(sparse.keys, core=keys),
                computed=replace(sparse.computed, core=computed),
                segments=replace(sparse.segments, q_ends=ends[0], k_ends=ends[1]),
                cross=replace(sparse.cross, q_ends=ends[2], k_ends=ends[3]),
                tiles=tiles,
            ),
        )

    def take(self, other: Level) -> None:
        """Copy where another level's computed tokens lie, as many as here."""
        if self.sparse is not None:
            assert other.sparse is not None
            copy_tensors(_moving(self.sparse), _moving(other.sparse))


def _moving(sparse: Sparse) -> tuple[Tensor, Tensor, tuple[Tensor, ...], Tensor | None]:
    """Return the tensors that differ among levels of the same shapes."""
    segments, cross = sparse.segments, sparse.cross
    ends = segments.q_ends, segments.k_ends, cross.q_ends, cross.k_ends
    return sparse.keys.core, sparse.computed.core, ends, sparse.tiles


def make_level(
    tokens: int,
    active: Sequence[Ids | None],
    tiles: Sequence[Ids | None],
    text: Sequence[int],
    *,
    buckets: bool = False,
    together: bool = False,
) -> Level:
    """Return a level of a batch, in host memory.

    Args:
        tokens: tokens of one pass.
        active: per pass the ids of its computed tokens, ascending; None: all.
        tiles: per pass the ids in its tile's box, ascending, which include its computed tokens;
            None: no tile.
        text: text tokens per pass.
        buckets: whether passes compute a bucket's number of tokens.
        together: whether passes are padded together instead; none has a tile.
    """
    whole = [tokens] * len(active)
    sparse = None
    if any(ids is not None for ids in active):
        computed = [_marked(tokens, ids) for ids in active]
        counts = [int(computed_mask.sum()) for computed_mask in computed]
        box_counts = [tokens if ids is None else len(ids) for ids in tiles]
        parts = [8 if ids is None else PARTS for ids in tiles]
        lengths = list(map(bucket, counts, box_counts, parts)) if buckets else counts
        if together:
            lengths = _padded_together(counts, tokens)
        feature_tokens = _partition(computed, lengths)
        cached_in_box: tuple[Tensor | None, ...] = (None,) * len(active)
        if any(ids is not None for ids in tiles):
            inside = [_marked(tokens, ids) for ids in tiles]
            boxed = [
                computed_mask[box] for computed_mask, box in zip(computed, inside, strict=True)
            ]
            feature_tokens = _partition(boxed, lengths)
            cached_in_box = tuple(
                None if ids is None else torch.from_numpy(np.flatnonzero(box[~computed_mask]))
                for ids, computed_mask, box in zip(tiles, computed, inside, strict=True)
            )
        keys = _keys(counts, lengths, tokens)
        segments, cross = (
            segments_of(lengths, keys, varies=buckets) for keys in (whole, text)
        )  # a mask's form decides them, so the warm-up could not plan them
        passes, moving_tiles = segments.q_spans, None
        if together:
            moving_tiles = padded_tiles(passes, sum(lengths))
            segments, cross = (
                replace(
                    rows,
                    q_spans=((0, sum(lengths)),),
                    q_uniform=0,
                    k_uniform=0,
                    moving=True,
                )
                for rows in (segments, cross)
            )
        sparse = Sparse(keys, feature_tokens, cached_in_box, segments, cross, passes, moving_tiles)
    tiled = any(ids is not None for ids in tiles)
    return Level(segments_of(whole, whole), segments_of(whole, text), sparse, tiled)


def _marked(tokens: int, ids: Ids | None) -> NDArray[np.bool_]:
    """Return [tokens] whether each is in `ids`; None: all are."""
    marked = np.full(tokens, ids is None)
    marked[slice(0) if ids is None else ids] = True
    return marked


def _partition(computed: Sequence[NDArray[np.bool_]], lengths: Sequence[int]) -> Partition:
    """Return the partition of passes whose tokens are `computed` or not, padded to `lengths`
    computed ones.
    """
    core, cached_ids, begin = [], [], 0
    for computed_mask, most in zip(computed, lengths, strict=True):
        core.append(
            begin + _padded(np.flatnonzero(computed_mask), most, int(np.argmin(computed_mask)))
        )
        cached_ids.append(begin + np.flatnonzero(~computed_mask))
        begin += len(computed_mask)
    slots = slots_of(spans([len(computed_mask) for computed_mask in cached_ids]))
    slots = replace(slots, to=torch.from_numpy(np.concatenate(cached_ids)), apart=True)
    return Partition(torch.from_numpy(np.concatenate(core)), slots, begin)


def together_length(count: int, tokens: int) -> int:
    """Return the next of few numbers of computed tokens for passes of `tokens`, in all."""
    return padded(count, 8 * max(1, tokens // (8 * _QUANTA)))


def _padded_together(counts: Sequence[int], tokens: int) -> list[int]:
    """Return the passes' numbers of computed tokens, with all pads in one that has a cached
    token.
    """
    lengths, total = list(counts), sum(counts)
    with_cached = [i for i, count in enumerate(counts) if count < tokens]
    if with_cached:
        lengths[with_cached[-1]] += together_length(total, tokens) - total
    return lengths


def _padded(ids: Ids, most: int, other: int) -> Ids:
    """Pad `ids` to `most` with `other`, the id of a token that is not computed."""
    return np.pad(ids, (0, most - len(ids)), constant_values=other)


def _keys(counts: Sequence[int], lengths: Sequence[int], tokens: int) -> Keys:
    """Return the keys of passes of `tokens`, of which `counts` are computed, padded to
    `lengths`.
    """
    begins = [number * tokens for number in range(len(counts))]
    core = [
        at + _padded(np.arange(count), most, count)
        for at, count, most in zip(begins, counts, lengths, strict=True)
    ]
    cached_spans = [(at + count, at + tokens) for at, count in zip(begins, counts, strict=True)]
    cached_slots = slots_of(spans([tokens - count for count in counts]))
    total = tokens * len(counts)
    return Keys(torch.from_numpy(np.concatenate(core)), slots_of(cached_spans), cached_slots, total)
