"""Memory layout of the rows of one step, and their inputs to the model: tokens, residuals of
ControlNets, and keys and values that stay placed.

Two streams, no padding. In double blocks text and image tokens have their own weights:

    text stream   | text 0 | text 1 | …        image stream | image 0 | image 1 | …

Attention and single blocks see *row order*:

    | text 0 | image 0 | text 1 | image 1 | …

Keys also include a row's cached tokens (`cached`), and tokens that none of its steps computes
(`fixed`):

    | text 0 | image 0 | cached 0 | fixed 0 | text 1 | …

The context is the last part of a row's image tokens, computed or cached.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from maskserve_engine.batch.picture_tokens import PictureKeys, PictureTokens
from maskserve_engine.batch.transfer import moved, to_device
from maskserve_engine.cache.store import Handle
from maskserve_engine.layers.attention import Segments, Span, segments, spans, uniform
from maskserve_engine.layers.kernels import has_kernels
from maskserve_engine.layers.modulation import PerRow, Vector
from maskserve_engine.layers.scatter_kv import KvSlots, KvSource, slots_of


@dataclass(frozen=True)
class Stream:
    """Rows packed in one stream; it finds each token's per-row vectors."""

    spans: tuple[Span, ...]
    row_of: Tensor
    """[N] number of each token's row."""
    lengths: tuple[int, ...]
    uniform: int
    """Common length of all rows, or 0."""
    broadcasts: bool
    """Whether per-row vectors are broadcast over their tokens; if not, a kernel looks them up."""
    vector_of: Tensor | None = None
    """[N] like `row_of`, but R + r for the timeless tokens of row r, and in row order 2R + r for
    its text; None: there are no timeless tokens."""
    tiles: Tensor | None = None
    """[T, 3] tiles of all rows but the pads (`shrink_expand.padded_tiles`); in padded steps
    only."""

    def wide(self, x: Tensor) -> Tensor:
        """Return `x` [N, D], or as [R, n, D] if vectors are broadcast."""
        return x.unflatten(0, (len(self.spans), -1)) if self.broadcasts else x

    def spread(self, vectors: Tensor, parts: int) -> Sequence[Vector]:
        """Split per-row vectors [R, parts · D] into `parts` vectors that match `wide` tokens."""
        if self.vector_of is not None:
            return [PerRow(part, self.vector_of) for part in vectors.chunk(parts, dim=-1)]
        if len(vectors) > len(self.spans):  # other streams of the step have other tokens, too
            vectors = vectors[: len(self.spans)]
        if len(self.spans) == 1:
            return vectors.view(parts, -1).unbind()
        if self.broadcasts:
            return vectors[:, None].chunk(parts, dim=-1)
        return [PerRow(part, self.row_of) for part in vectors.chunk(parts, dim=-1)]


IMAGE, CONTEXT, TEXT = range(3)
"""Modes of tokens."""


@dataclass(frozen=True)
class Modes:
    """The tokens of a packing by mode, for blocks that have weights for each mode and in which
    tokens attend to those of their mode alone. Rows have no fixed tokens.
    """

    mode_of: Tensor
    """[N] mode of each token in row order."""
    vector_of: Tensor
    """See `Stream.vector_of`."""
    order: Tensor
    """[N] positions in row order of the tokens of each mode, mode by mode."""
    places: Tensor
    """[N] the inverse permutation."""
    lengths: tuple[int, ...]
    spans: tuple[tuple[Span, ...], ...]
    """Rows of each mode, packed alone."""
    computed: Segments
    """As those of `Packing`; three for each row."""
    all_keys: Segments

    @classmethod
    def of(
        cls,
        text: Sequence[int],
        image: Sequence[int],
        cached: Sequence[int],
        context: Sequence[int],
        *,
        varies: bool = False,
    ) -> Modes:
        """Return the modes of a packing with these lengths, on the host; `context` as there."""
        counts, computed, keys = [], [], []
        for t, i, m, c in zip(text, image, cached, context, strict=True):
            computed_context = 0 if m else c
            counts.append((i - computed_context, computed_context, t))
            computed += [t, i - computed_context, computed_context]
            keys += [t, i + m - c, c]
        mode_of = np.repeat((TEXT, IMAGE, CONTEXT) * len(counts), computed)
        row_of = np.repeat(np.arange(len(counts)), list(map(sum, counts)))
        order = np.argsort(mode_of, kind="stable")
        lengths = tuple(zip(*counts, strict=True))
        return cls(
            mode_of=torch.from_numpy(mode_of),
            vector_of=torch.from_numpy(mode_of * len(counts) + row_of),
            order=torch.from_numpy(order),
            places=torch.from_numpy(np.argsort(order)),
            lengths=tuple(map(sum, lengths)),
            spans=tuple(map(spans, lengths)),
            computed=segments(computed, computed, varies=varies),
            all_keys=segments(computed, keys, varies=varies),
        )

    def split(self, rows: Tensor) -> tuple[Tensor, ...]:
        """Return the tokens of each mode, from row order."""
        return rows.index_select(0, self.order).split(self.lengths)

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Return row order, from the tokens of each mode."""
        return torch.cat(tuple(parts)).index_select(0, self.places)


@dataclass(frozen=True)
class Packing:
    """Layout of rows with `text[r]` + `image[r]` computed tokens; `cached[r]` cached tokens and any
    fixed tokens follow as keys only.
    """

    text: tuple[int, ...]
    image: tuple[int, ...]
    cached: tuple[int, ...]
    text_stream: Stream
    image_stream: Stream
    row_stream: Stream
    to_rows: Tensor
    """[N] positions in (text stream, image stream) of each token in row order; not used for a lone
    row."""
    from_rows: Tensor
    stream_of: Tensor
    """[N] stream of each token in row order: 0 text, 1 image."""
    image_in_rows: Tensor | None
    """[N_image] positions of the image tokens in row order; None: they follow the text."""
    computed: Segments
    """Segments for attention among computed tokens only."""
    all_keys: Segments
    """Segments for attention of computed tokens to all keys of their row."""
    core_in_keys: Tensor | None
    """[N] positions of the computed tokens among all keys; None: they come first."""
    slots: KvSlots
    """Slots of the cached tokens among all keys."""
    fixed_slots: KvSlots
    context: tuple[int, ...]
    """Number of each row's context tokens that the model sees at time 0: the last cached ones; in a
    row without cached tokens the last computed ones."""
    modes: Modes | None
    """None: the model sees no context at time 0."""

    def rows_from(self, text: Tensor, image: Tensor) -> Tensor:
        if len(self.text) == 1:
            return torch.cat((text, image))
        if self.text_stream.uniform and self.image_stream.uniform:  # one copy instead of two
            rows = len(self.text)
            stacked = text.unflatten(0, (rows, -1)), image.unflatten(0, (rows, -1))
            return torch.cat(stacked, dim=1).flatten(0, 1)
        return torch.cat((text, image)).index_select(0, self.to_rows)

    def in_row_order(self, keys_and_values: Tensor) -> Tensor:
        return (
            keys_and_values
            if len(self.text) == 1
            else keys_and_values.index_select(0, self.to_rows)
        )

    def split(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return text and image stream from row order."""
        streams = rows if len(self.text) == 1 else rows.index_select(0, self.from_rows)
        n_text = sum(self.text)
        return streams[:n_text], streams[n_text:]

    def image_of(self, rows: Tensor) -> Tensor:
        if self.image_in_rows is None:
            return rows[sum(self.text) :]
        if self.row_stream.uniform and self.image_stream.uniform:
            wide = rows.unflatten(0, (len(self.text), -1))
            return wide[:, self.text[0] :].flatten(0, 1)
        return rows.index_select(0, self.image_in_rows)

    @cached_property
    def in_front(self) -> bool:
        """Whether the computed tokens come first among all keys."""
        return self.core_in_keys is None

    def scatter_computed(self, computed: Sequence[Tensor], keys: Sequence[Tensor]) -> None:
        """Write the computed tokens' keys and values [N, …] to their slots."""
        for source, all_keys in zip(computed, keys, strict=True):
            if self.core_in_keys is None:
                all_keys[: len(source)] = source
            else:
                all_keys.index_copy_(0, self.core_in_keys, source)

    def scatter_inactive(self, inactive: Sequence[Tensor], keys: Sequence[Tensor]) -> None:
        """Write the cached tokens' keys and values [M, …], packed by row, to their slots."""
        for source, all_keys in zip(inactive, keys, strict=True):
            if len(self.text) == 1:
                begin = self.computed.q_spans[0][1]
                all_keys[begin : begin + len(source)] = source
            else:
                all_keys.index_copy_(0, self.slots.to, source)


def _positions(spans: Sequence[Span]) -> NDArray[np.int64]:
    return np.concatenate([np.arange(begin, end) for begin, end in spans])


def _stream(
    lengths: Sequence[int],
    device: torch.device,
    timeless: Sequence[int] = (),
    vector_of: Tensor | None = None,
) -> Stream:
    """Return a stream of rows with these lengths; the last `timeless[r]` tokens of a row have
    vectors of time 0.
    """
    row_spans, common = spans(lengths), uniform(lengths)
    row_of = torch.from_numpy(np.repeat(np.arange(len(lengths)), lengths))
    if any(timeless):
        vector_of = row_of.clone()
        for (_, end), count in zip(row_spans, timeless, strict=True):
            vector_of[end - count : end] += len(lengths)
    narrow = len(lengths) == 1 or has_kernels(device) or vector_of is not None
    return Stream(row_spans, row_of, tuple(lengths), common, common > 0 and not narrow, vector_of)


Parts = tuple[tuple[int, ...], ...]
"""Per row, the lengths of its `RowInput.cached` or `RowInput.fixed`; (0,) for a row without
any."""


def pack(
    text: tuple[int, ...],
    image: tuple[int, ...],
    parts: Parts,
    fixed: Parts,
    device: torch.device,
    context: tuple[int, ...],
    sees_time_0: bool,
    varies: bool = False,
) -> Packing:
    cached, fixed_lengths = tuple(map(sum, parts)), tuple(map(sum, fixed))
    timeless = [0 if m else c for c, m in zip(context, cached, strict=True)]
    modes = Modes.of(text, image, cached, context, varies=varies) if sees_time_0 else None
    text_spans, image_spans = spans(text), spans(image)
    n_text = sum(text)
    order = np.concatenate(
        [
            np.concatenate((np.arange(tb, te), n_text + np.arange(ib, ie)))
            for (tb, te), (ib, ie) in zip(text_spans, image_spans, strict=True)
        ]
    )
    inverse = np.empty_like(order)
    inverse[order] = np.arange(len(order))
    is_single = len(text) == 1
    core = [t + i for t, i in zip(text, image, strict=True)]
    keys = [c + r + f for c, r, f in zip(core, cached, fixed_lengths, strict=True)]
    begins = [begin for begin, _ in spans(keys)]
    core_keys = [(b, b + c) for b, c in zip(begins, core, strict=True)]

    def slots(begins: list[int], parts: Parts) -> KvSlots:
        return slots_of(
            [
                (begin + first, begin + last)
                for begin, lengths in zip(begins, parts, strict=True)
                for first, last in spans(lengths)
            ]
        )

    cached_begins = [b + c for b, c in zip(begins, core, strict=True)]
    fixed_begins = [b + r for b, r in zip(cached_begins, cached, strict=True)]
    return Packing(
        text=text,
        image=image,
        cached=cached,
        text_stream=_stream(text, device),
        image_stream=_stream(image, device, timeless),
        row_stream=_stream(core, device, vector_of=None if modes is None else modes.vector_of),
        to_rows=torch.from_numpy(order),
        from_rows=torch.from_numpy(inverse),
        stream_of=torch.from_numpy((order >= n_text).astype(np.int64)),
        image_in_rows=None if is_single else torch.from_numpy(inverse[n_text:]),
        computed=segments(core, core, varies=varies),
        all_keys=segments(core, keys, varies=varies),
        core_in_keys=None if is_single else torch.from_numpy(_positions(core_keys)),
        slots=slots(cached_begins, parts),
        fixed_slots=slots(fixed_begins, fixed),
        context=context,
        modes=modes,
    )


@dataclass(frozen=True)
class Widened:
    """Packing of rows whose tokens are all computed, and positions of computed and cached tokens in
    it.
    """

    packing: Packing
    core_in_image: Tensor
    cached_in_image: Tensor
    core_in_rows: Tensor
    cached_in_rows: Tensor


@dataclass(frozen=True)
class SparseLayout:
    """Switches between computing the computed tokens of cached rows and computing all their tokens.

    In the wide packing a row's image tokens are its computed ones followed by its cached ones, so
    the order of keys is the same in both.
    """

    narrow: Packing
    cached_stream: Stream
    make_widened: Callable[[], Widened]

    @cached_property
    def widened(self) -> Widened:
        return self.make_widened()

    @property
    def wide(self) -> Packing:
        return self.widened.packing

    @cached_property
    def cached_slots(self) -> KvSlots:
        """Slots of the cached tokens in `cached_stream`."""
        among_keys = self.narrow.slots
        return replace(among_keys, spans=self.cached_stream.spans, to=among_keys.numbers)

    def widen(self, core: Tensor, cached: Tensor, *, rows: bool) -> Tensor:
        """Return the wide stream from the narrow one and the cached tokens' hidden states."""
        widened = self.widened
        at_core = widened.core_in_rows if rows else widened.core_in_image
        at_cached = widened.cached_in_rows if rows else widened.cached_in_image
        wide = core.new_empty(len(at_core) + len(at_cached), core.shape[1])
        wide.index_copy_(0, at_core, core)
        wide.index_copy_(0, at_cached, cached)
        return wide

    def restrict(self, wide: Tensor, *, rows: bool) -> Tensor:
        """Return the narrow stream: the wide one without the cached tokens."""
        widened = self.widened
        return wide.index_select(0, widened.core_in_rows if rows else widened.core_in_image)

    def cached_of(self, wide: Tensor, *, rows: bool) -> Tensor:
        """Return the cached tokens of the wide stream, packed by row."""
        widened = self.widened
        return wide.index_select(0, widened.cached_in_rows if rows else widened.cached_in_image)


@lru_cache(maxsize=16)
def sparse_layout(
    text: tuple[int, ...],
    image: tuple[int, ...],
    parts: Parts,
    fixed: Parts,
    device: torch.device,
    context: tuple[int, ...],
    timeless: bool,
    varies: bool = False,
) -> SparseLayout:
    """Return both packings of a step. Cached, since batches last many steps.

    Args:
        text: text tokens of each row.
        image: computed image tokens of each row.
        parts: lengths of its cached tokens.
        fixed: lengths of its fixed tokens.
        device: device of the tensors.
        context: as in `Packing`.
        timeless: whether the model sees contexts at time 0 (`Packing.modes`), though no row of the
            step may have one.
        varies: see `RowInput`.
    """
    none, cached = ((0,),) * len(parts), tuple(map(sum, parts))
    all_image = tuple(i + r for i, r in zip(image, cached, strict=True))

    def positions(core: Sequence[int]) -> tuple[Tensor, Tensor]:
        row_spans = spans([c + r for c, r in zip(core, cached, strict=True)])
        middles = [begin + c for (begin, _), c in zip(row_spans, core, strict=True)]
        at_core = [(begin, middle) for (begin, _), middle in zip(row_spans, middles, strict=True)]
        at_rest = [(middle, end) for middle, (_, end) in zip(middles, row_spans, strict=True)]
        return torch.from_numpy(_positions(at_core)), torch.from_numpy(_positions(at_rest))

    def widened() -> Widened:
        return Widened(
            pack(text, all_image, none, fixed, device, context, timeless, varies),
            *positions(image),
            *positions([t + i for t, i in zip(text, image, strict=True)]),
        )

    narrow, rest_stream = (
        pack(text, image, parts, fixed, device, context, timeless, varies),
        _stream(cached, device, [min(c, m) for c, m in zip(context, cached, strict=True)]),
    )
    if device.type == "cpu":  # few steps compute all tokens of a cached row
        return SparseLayout(narrow, rest_stream, widened)
    narrow, rest_stream, wide = moved((narrow, rest_stream, widened()), device)
    return SparseLayout(narrow, rest_stream, lambda: wide)  # no step waits for a transfer


class _Placed(NamedTuple):
    keys_and_values: tuple[Tensor, Tensor]
    entries: list[object]
    spans: Sequence[Span]


class PlacedKV:
    """Keys and values of one batch that stay placed. While its rows read the same entries, their
    cached tokens' keys and values do not change: only parts whose entry has changed are written
    again.
    """

    def __init__(self) -> None:
        self._blocks: dict[int, _Placed] = {}
        self._before: dict[int, _Placed] = {}
        """Blocks of the previous batch that this one has not taken over yet."""

    def follow(self, before: PlacedKV) -> None:
        """Take over the placed keys and values of the previous batch, which is not stepped
        again.
        """
        self._before = before._before | before._blocks

    def of(
        self, block: int, entries: list[object]
    ) -> tuple[tuple[Tensor, Tensor], list[bool]] | None:
        """Return keys and values [keys, heads, head_dim] of all rows, and per entry whether it has
        to be written; None: the block is not placed.
        """
        placed = self._blocks.get(block)
        if placed is None:
            return None
        self._blocks[block] = placed._replace(entries=entries)
        read = zip(entries, placed.entries, strict=True)
        return placed.keys_and_values, [
            entry is not previous_entry for entry, previous_entry in read
        ]

    def keep(
        self,
        block: int,
        keys_and_values: tuple[Tensor, Tensor],
        entries: list[object],
        spans: Sequence[Span],
        room: int,
    ) -> list[bool] | None:
        """Keep a block's unwritten keys and values, if they fit in `room` bytes; return which
        entries have to be read for it. None: all.
        """
        previous = self._before.pop(block, None)
        if sum(tensor.nbytes for tensor in keys_and_values) > room:
            return None
        self._blocks[block] = _Placed(keys_and_values, entries, spans)
        # On a GPU one kernel reads all entries faster than many copies start.
        if previous is None or keys_and_values[0].device.type != "cpu":
            return None
        # A handle belongs to one row's tokens; its keys and values depend on nothing else.
        spans_by_id = {
            id(entry): span
            for entry, span in zip(previous.entries, previous.spans, strict=False)
            if isinstance(entry, Handle)
        }
        missing = [True] * len(entries)
        for number, (begin, end) in enumerate(spans):
            first, last = spans_by_id.get(id(entries[number]), (0, 0))
            if last - first == end - begin > 0:
                for to, source in zip(keys_and_values, previous.keys_and_values, strict=True):
                    to[begin:end] = source[first:last]
                missing[number] = False
        return missing


class Residuals(Protocol):
    """Residuals of one row, requested at every step."""

    def after(self, number: int) -> Tensor | None:
        """Return the residual to add at a place of the model; None: nothing.

        FLUX: [n, width], added to the row's computed image tokens after block `number`, double
        blocks first. Z-Image: [T + n, width], added to the text before them as well; if T is more
        than the text has, the first ones are left out.

        UNets: [C, h, w], a map of the whole picture, added to skip connection `number` in the order
        these begin; the number after the last one stands for the middle block's output.
        """
        ...


class RowResiduals(Protocol):
    """Residuals of a row's passes. Passes that have none of their own add those of the last one
    that has.
    """

    @property
    def passes(self) -> Sequence[Residuals]: ...

    @property
    def for_lookahead(self) -> RowResiduals:
        """Residuals of the passes that look ahead."""
        ...


class TokenCache(Protocol):
    """Tokens that a step reads in place of computing them: what each block needs of them lies in
    one place.
    """

    def __len__(self) -> int: ...

    @property
    def entry(self) -> object:
        """Identifies the keys and values that this step reads; a different object as soon as these
        change.
        """
        ...

    def source(self, block: int, part: str = "kv") -> KvSource:
        """Return where the keys and values (`kv`), or the hidden states at the block's input (`h`),
        lie.
        """
        ...


class CachedTokens(TokenCache, Protocol):
    """Cached tokens of a row. A step may also compute their keys and values from hidden states
    (FlashPS Fig. 5), or from the model's inputs.
    """

    @property
    def cis(self) -> Tensor:
        """[m, head_dim / 2] complex rotary factors."""
        ...

    def tokens(self) -> Tensor:
        """Return [m, in_channels] model inputs."""
        ...


class Capture(Protocol):
    @property
    def text(self) -> bool:
        """Whether it also receives the text's keys and values, ahead of the image's."""
        ...

    def hidden(self, block: int, hidden: Tensor, /) -> None:
        """Receive [tokens, width] at the block's input; only valid during the call."""
        ...

    def keys_values(self, block: int, keys: Tensor, values: Tensor, /) -> None:
        """Receive [tokens, heads, head_dim] each; only valid during the call."""
        ...


@dataclass(frozen=True, slots=True)
class RowInput:
    tokens: Tensor
    """[n, in_channels] computed image tokens."""
    text: Tensor
    """[T, width] prompt embedding after context_embedder."""
    pooled: Tensor | None
    """[pooled width] of the prompt; None for models without it."""
    guidance: float | None
    """Embedded guidance; None for models without it."""
    cis: Tensor
    """[T + n, head_dim / 2] complex rotary factors of text and computed tokens."""
    cached: tuple[CachedTokens, ...] = ()
    """Cached tokens of the row, by the cache that they are read from; empty: all tokens are
    computed."""
    capture: Capture | None = None
    """Set for priming rows, and for rows whose ControlNet computes all tokens."""
    residuals: Residuals | None = None
    context: int = 0
    """Number of the last tokens, computed or cached, that are the context. 0 where shown tokens are
    cached behind it."""
    still: int = 0
    """Number of the last computed tokens that no step moves."""
    timeless: bool = False
    """Whether the model sees the context at time 0."""
    varies: bool = False
    """Whether the text's length is that of a prompt's words, so that steps of the same lengths come
    seldom."""
    fixed: tuple[TokenCache, ...] = ()
    """Tokens that do not depend on the row and that its tokens also see, in every block: exact
    prefixes."""
    back: Tensor | None = None
    """[head_dim / 2] complex rotary offset of the fixed tokens' keys, where this row places them at
    another position; None: no offset."""
    pads: int = 0
    """Number of the last text tokens that stand beside the image in image-only blocks
    (`forward.Transformer.alone`)."""
    picture: PictureKeys = ()
    """Keys and values of an IP-Adapter's picture, which the image tokens of double blocks read."""

    @property
    def alone(self) -> RowInput:
        """The row without the text tokens that image-only blocks do not see."""
        words = len(self.text) - self.pads
        return replace(self, text=self.text[words:], cis=self.cis[words:])


class Packed:
    padded = False
    """Whether these are the tensors of a padded step (`padding`)."""

    def __init__(self, rows: Sequence[RowInput]) -> None:
        self.rows = tuple(rows)
        self.cached = tuple(cached for row in rows for cached in row.cached or (None,))
        """Cached tokens of all rows, in order; None for a dense row."""
        self.fixed = tuple(fixed_tokens for row in rows for fixed_tokens in row.fixed or (None,))
        """Fixed tokens of all rows, in order; None for a row without any."""
        self.varies = any(row.varies for row in rows)
        self.sees_fixed = any(row.fixed for row in rows)
        self.backs = tuple(row.back for row in rows for _ in row.fixed or (None,))
        self.captures = tuple(row.capture for row in rows)
        self.residuals: dict[int, Residuals | None] = {
            i: row.residuals for i, row in enumerate(rows) if row.residuals
        }
        """Residuals of the rows that have any; None for those of a recorded step."""
        self.pictures = PictureTokens.of([row.picture for row in rows])
        self.primes = any(capture is not None for capture in self.captures)
        self.placed_kv = PlacedKV()
        cached_cis = [cached.cis for cached in self.cached if cached is not None]
        self._lengths: tuple[Parts, Parts] = (
            tuple(tuple(map(len, row.cached)) or (0,) for row in rows),
            tuple(tuple(map(len, row.fixed)) or (0,) for row in rows),
        )
        self.layout: SparseLayout = sparse_layout(
            tuple(len(row.text) for row in rows),
            tuple(len(row.tokens) for row in rows),
            *self._lengths,
            rows[0].tokens.device,
            tuple(row.context * row.timeless for row in rows),
            any(row.timeless for row in rows),
            self.varies,
        )
        self.tokens = torch.cat([row.tokens for row in rows])
        self.text = torch.cat([row.text for row in rows])
        pooled = [row.pooled for row in rows if row.pooled is not None]
        self.pooled = torch.stack(pooled) if pooled else None
        self.cis = torch.cat([row.cis for row in rows])
        """[N, head_dim / 2] in row order."""
        self.cached_cis = torch.cat(cached_cis) if cached_cis else None
        """[M, head_dim / 2]; None without cached rows."""
        self.guidance: Tensor | None = None
        if rows[0].guidance is not None:
            values = torch.tensor([row.guidance for row in rows])
            [guidance] = to_device([values], self.tokens.device)
            self.guidance = guidance.to(self.tokens.dtype) * 1000

    @property
    def entries(self) -> list[object]:
        """Entries that the rows read in this step: one for each of `cached`, then of `fixed`."""
        return [None if tokens is None else tokens.entry for tokens in (*self.cached, *self.fixed)]

    @cached_property
    def alone(self) -> Packed:
        """The same rows as image-only blocks see them."""
        packed = copy(self)
        vars(packed).pop("wide_cis", None)
        packed.rows, packed.placed_kv = tuple([row.alone for row in self.rows]), PlacedKV()
        packed.text = torch.cat([row.text for row in packed.rows])
        packed.cis = torch.cat([row.cis for row in packed.rows])
        narrow = self.layout.narrow
        texts = tuple([row.pads for row in self.rows])
        packed.layout = sparse_layout(
            texts,
            narrow.image,
            *self._lengths,
            self.tokens.device,
            narrow.context,
            narrow.modes is not None,
            self.varies,
        )
        return packed

    @cached_property
    def pads(self) -> Tensor | None:
        """Positions in the text stream of the tokens that `alone` keeps; None: there
        are none.
        """
        ends = [end for _, end in self.layout.narrow.text_stream.spans]
        row_positions = [
            torch.arange(end - row.pads, end) for end, row in zip(ends, self.rows, strict=True)
        ]
        places = torch.cat(row_positions)
        return to_device([places], self.tokens.device)[0] if len(places) else None

    @property
    def shapes(self) -> Hashable:
        narrow = self.layout.narrow
        return narrow.text, narrow.image, narrow.cached, narrow.slots.spans

    def copied(self, clone: Callable[[Tensor], Tensor]) -> Packed:
        """Return the same rows on copied tensors, without entries."""
        packed = copy(self)
        packed.cached, packed.placed_kv = (None,) * len(self.cached), PlacedKV()
        packed.residuals = dict.fromkeys(self.residuals)
        packed.tokens, packed.text, packed.cis = map(clone, (self.tokens, self.text, self.cis))
        packed.cached_cis = None if self.cached_cis is None else clone(self.cached_cis)
        vars(packed).pop("wide_cis", None)  # made of the tensors before the copy
        if "alone" in vars(packed):
            packed.alone = self.alone.copied(clone)
        return packed

    def take(self, other: Packed) -> None:
        """Copy text and rotary factors of other rows of the same shapes into these tensors."""
        self.text.copy_(other.text)
        self.cis.copy_(other.cis)
        if self.cached_cis is not None:
            assert other.cached_cis is not None
            self.cached_cis.copy_(other.cached_cis)
        if "alone" in vars(self):
            self.alone.take(other.alone)

    @cached_property
    def wide_cis(self) -> Tensor:
        """[N + M, head_dim / 2] in row order, with the cached tokens."""
        assert self.cached_cis is not None
        wide = self.cis.new_empty(len(self.cis) + len(self.cached_cis), self.cis.shape[1])
        wide[self.layout.widened.core_in_rows] = self.cis
        wide[self.layout.widened.cached_in_rows] = self.cached_cis
        return wide
