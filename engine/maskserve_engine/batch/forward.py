"""The forward pass of a multimodal diffusion transformer over packed rows: any mix of dense, cached
and priming ones.

A model provides the parts of its blocks before and after attention (`Transformer`). Attention is
the same for all models, and so are the cached tokens of a cached row: they take part in attention
as keys and values only (FlashPS §3.1, Fig. 5 and 7).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Protocol, Self, TypeVar

import torch
from torch import Tensor

from maskserve_engine.batch.graphs import Launcher
from maskserve_engine.batch.packing import Capture, Modes, Packed, Packing, Stream
from maskserve_engine.batch.row_updates import MovingRows, RowUpdates
from maskserve_engine.layers.attention import Span, attention
from maskserve_engine.layers.qk_norm_rope import rotate
from maskserve_engine.layers.scatter_kv import KvSlots, scatter_kv

T = TypeVar("T")


class Transformer(Protocol):
    """A model at one step: its weights, and the modulation of each packed row by timestep and
    prompt.

    Blocks are numbered in the order they run. The first ones have two streams, text and image
    tokens. The others have a single stream in row order: it is passed as the image stream, and the
    text stream is not read.
    """

    @property
    def block_count(self) -> int: ...

    @property
    def two_streams(self) -> int: ...

    @property
    def alone(self) -> int:
        """Number of leading blocks that see only image tokens and the text tokens beside them
        (`RowInput.pads`). A model that has such blocks has one stream.
        """
        ...

    @property
    def mode_blocks(self) -> int:
        """Number of leading blocks in which tokens attend to those of their mode alone
        (`packing.Modes`). A model that has such blocks has one stream.
        """
        ...

    @property
    def placed_bytes(self) -> int:
        """Bytes that the keys and values of a batch may take, over all blocks, to stay placed
        (`PlacedKV`).
        """
        ...

    def take(self, rows: Sequence[int]) -> Self: ...

    @property
    def updates(self) -> RowUpdates | None:
        """The updates of the rows' LoRAs; None: no row has any."""
        ...

    def copied(self, copy: Callable[[Tensor], Tensor], moving: Sequence[MovingRows]) -> Self:
        """Return the model on copied tensors; arguments as in `RowUpdates.copied`."""
        ...

    def follow(self, other: Self) -> None:
        """Copy the per-step tensors of a model with as many rows into this one's."""
        ...

    def embed(self, tokens: Tensor, stream: Stream) -> Tensor:
        """Return [N, width] image tokens at the first block, from [N, in_channels]; `stream` is the
        layout of their rows.
        """
        ...

    @property
    def writes(self) -> Sequence[bool]:
        """Per block, whether `pre` can write its products into `room`."""
        ...

    def pre(
        self,
        number: int,
        text: Tensor,
        image: Tensor,
        packing: Packing,
        cis: Tensor,
        pre_inputs: Any,
        room: Tensor | None,
    ) -> tuple[Tensor, Tensor, Any]:
        """Compute the part of a block before attention.

        Args:
            number: the block's number.
            text: [N_text, width], text stream.
            image: [N_image, width], image stream; or [N, width] in row order.
            packing: layout of the rows.
            cis: [N, head_dim / 2] complex rotary factors in row order.
            pre_inputs: third result of `post` of the previous block; None: it returned nothing.
            room: [N or more, 3 · width] buffer for queries, keys and values of a lone row, if
                `writes`; None: allocate.

        Returns:
            Queries and keys, rotated, [N, 2, heads, head_dim]; values [N, heads, head_dim],
                which `post` may overwrite; and the inputs of `post`. All in row order.
        """
        ...

    def post(
        self,
        number: int,
        text: Tensor,
        image: Tensor,
        attended: Tensor,
        post_inputs: Any,
        packing: Packing,
        *,
        continues: bool,
        image_alone: bool,
    ) -> tuple[Tensor, Tensor, Any]:
        """Compute the part of a block after attention: both streams, and input for the next block's
        `pre`.

        Args:
            number: the block's number.
            text: the stream that `pre` was given.
            image: the stream that `pre` was given.
            attended: [N, width] output of attention, in row order.
            post_inputs: third result of `pre`.
            packing: layout of the rows.
            continues: whether the next block receives these streams unchanged.
            image_alone: whether to compute only the image tokens of a lone row.
        """
        ...

    def project(
        self, number: int, hidden: Tensor, stream: Stream, cis: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return keys and values of cached image tokens from their hidden states (FlashPS Fig. 5).

        Args:
            number: the block's number.
            hidden: [M, width] at the block's input, packed by row.
            stream: layout of the rows in `hidden`.
            cis: [M, head_dim / 2] complex rotary factors.

        Returns:
            Keys (after norm and rotary embedding) and values, [M, heads, head_dim].
        """
        ...

    def last(self, image: Tensor, stream: Stream) -> Tensor:
        """Apply the layers after the blocks to image tokens [N, width]; return [N,
        out_channels].
        """
        ...


CaptureKeys = Callable[[Tensor, Tensor], None]
"""Receives keys (after norm and rotary embedding) and values in row order."""


class FillCached(Protocol):
    """Adds keys and values of the cached tokens."""

    def __call__(self, k: Tensor, v: Tensor, packing: Packing) -> tuple[Tensor, Tensor]:
        """Return [keys, heads, head_dim] of all tokens, from [N, heads, head_dim] of the computed
        ones.
        """
        ...


def forward(
    model: Transformer,
    packed: Packed,
    kinds: Sequence[str] = (),
    launcher: Launcher | None = None,
) -> Tensor:
    """Return the model's output for the computed image tokens of every row.

    Args:
        model: the model at this step.
        packed: any mix of rows; those with `cached` are cached rows.
        kinds: `dense`, `project` or `kv` per block, for all cached rows of the step; not read
            when there are none. `project` and `dense` take the cached tokens' hidden states
            from the model's start or the dense block before them, else from an entry.
        launcher: launches or records the kernels; None: launch at once.

    Returns:
        [N, out_channels] in the order of `packed.tokens`.
    """
    state = State(model, packed, kinds, launcher=launcher)
    state.run(0, model.block_count)
    return model.last(state.computed_image(), state.stream)


class State:
    """The token streams of a step's rows as they pass through the blocks."""

    def __init__(
        self,
        model: Transformer,
        packed: Packed,
        kinds: Sequence[str],
        streams: tuple[Tensor, Tensor] | None = None,
        launcher: Launcher | None = None,
    ) -> None:
        self.model, self.kinds = model, kinds
        self.launcher = launcher or Launcher()
        self.cached_cis, self.cached = packed.cached_cis, packed.cached_cis is not None
        self.sees_fixed, self.pictures = packed.sees_fixed, packed.pictures
        self.wide = not self.cached  # without cached rows both packings are the same
        self.packed: Packed
        self._use_packing_of(packed.alone if model.alone else packed)
        self.whole = packed
        # cached tokens' hidden states after the last dense block, and the block that reads them
        self.dense_hidden: tuple[int, Tensor] | None = None
        self.joined = False  # one stream in row order, no longer two
        self.pre_inputs: Any = None  # third result of the last block's `post`
        self.room: Tensor | None = None  # buffer with the present block's keys and values
        self.by_mode = False  # whether tokens of the present block attend to their mode alone
        self.stream: Stream = self.layout.narrow.image_stream  # of the computed image tokens
        self.text: Tensor
        self.image: Tensor
        self.text, self.image = streams or (
            self.packed.text,
            model.embed(packed.tokens, self.stream),
        )

    def _use_packing_of(self, packed: Packed) -> None:
        self.packed, self.layout = packed, packed.layout
        widened = self.cached and self.wide
        self.packing: Packing = self.layout.wide if widened else self.layout.narrow
        self.cis = packed.wide_cis if widened else packed.cis
        self.entries = packed.entries

    def _join_text(self) -> None:
        """Pack image and text together, after the blocks that see only image tokens."""
        pads, image = self.packing.split(self.image)
        self._use_packing_of(self.whole)
        text, places = self.packed.text, self.whole.pads
        if places is not None:
            text = text.index_copy(0, places, pads)
        self.image = self.packing.rows_from(text, image)

    def run(self, begin: int, end: int) -> None:
        two_streams = self.model.two_streams
        residuals = self.packed.residuals
        kinds = self.kinds if self.cached else ("dense",) * end
        for number in range(begin, end):
            if number and number == self.model.alone:
                self._join_text()
            if number >= two_streams and not self.joined:
                self.join_streams()
            # Whether the next block receives this block's streams unchanged.
            continues = (
                number + 1 < end
                and not residuals
                and not (self.pictures is not None and number < two_streams)
                and number + 1 not in (two_streams, self.model.alone)
                and (kinds[number] == "dense") == (kinds[number + 1] == "dense")
            )
            self.text, self.image = self._block(number, continues=continues)
            if residuals:
                self._add_residuals(number)

    def _block(self, number: int, *, continues: bool) -> tuple[Tensor, Tensor]:
        """Run one block; intermediate tensors are freed as early as possible."""
        self.by_mode = number < self.model.mode_blocks
        fill: FillCached | None = partial(self._load, number) if self.sees_fixed else None
        if self.cached:  # add or drop cached tokens, as the block's kind requires
            kind = self.kinds[number]
            if (kind == "dense") != self.wide:
                self._widen_or_narrow(number, dense=kind == "dense")
            if kind != "dense":
                fill = partial(self._project if kind == "project" else self._load, number)
        if fill is not None and self.model.writes[number]:
            self.room = self.room_for()
        capture = self.capture(number) if self.packed.primes else None
        streams, pre_inputs = (self.text, self.image), self.pre_inputs
        self.pre_inputs = None
        pre = self.model.pre(number, *streams, self.packing, self.cis, pre_inputs, self.room)
        qk, v, post_inputs = pre
        del pre, pre_inputs
        reads = [] if self.pictures is None else list(self._read_pictures(number, qk))
        inputs = [self.attend(qk, v, self.packing, fill, capture), post_inputs]
        self.room = None
        # The values may be a view of their whole product, seven widths of each token.
        del qk, v, post_inputs
        # No layer reads the text after the last block. (With several rows it lies between images.)
        image_only = self.joined and self.packing.in_front and number + 1 == self.model.block_count
        *streams_after, self.pre_inputs = self.model.post(
            number,
            streams[0],
            streams[1],
            inputs.pop(0),  # popped, and no tuple of arguments, so that it frees them
            inputs.pop(),
            self.packing,
            continues=continues,
            image_alone=image_only,
        )
        self.joined = self.joined and not image_only
        for (begin, end), read in reads:
            streams_after[1][begin:end] += read
        return streams_after[0], streams_after[1]

    def _read_pictures(self, number: int, qk: Tensor) -> Iterator[tuple[Span, Tensor]]:
        """Yield the spans, in the image stream of a double block, of the rows with an IP-Adapter,
        and what their tokens read of its picture, [n, width]. The picture has no position: queries
        are turned back.

        Args:
            number: the block's number.
            qk: [N, 2, heads, head_dim] queries and keys, rotated, in row order.
        """
        if number >= self.model.two_streams:
            return
        assert self.pictures is not None, "asked for rows with pictures only"
        packing = self.packing

        def query_of(row: int) -> Tensor:
            begin, end = packing.row_stream.spans[row]
            begin += packing.text[row]
            query = rotate(qk[begin:end, :1].float(), self.cis[begin:end].conj(), qk.dtype)
            return query[:, 0]

        for row, read in self.pictures.read(number, query_of):
            yield packing.image_stream.spans[row], read.flatten(1)

    def attend(
        self,
        qk: Tensor,
        v: Tensor,
        packing: Packing,
        fill: FillCached | None,
        capture: CaptureKeys | None,
    ) -> Tensor:
        """Return [N, width] attention of the computed tokens over all keys of their rows, in row
        order.

        Args:
            qk: [N, 2, heads, head_dim] queries and keys, rotated.
            v: [N, heads, head_dim] values.
            packing: layout of the computed tokens.
            fill: adds keys that were not computed; None: there are none.
            capture: receives the computed keys and values.
        """
        q, k = qk.unbind(1)
        if capture is not None:
            capture(k, v)
        visible: Packing | Modes = packing
        if self.by_mode:
            assert packing.modes is not None, "a model with such blocks has a context"
            visible = packing.modes
        if fill is None:
            return attention(q, k, v, visible.computed).flatten(1)
        keys, values = fill(k, v, packing)
        return attention(q, keys, values, visible.all_keys).flatten(1)

    def _add_residuals(self, index: int) -> None:
        self.image = self.launcher.open(self.image)
        wide = self.cached and self.wide
        add = partial(_add_residuals, index, self.image, wide=wide, joined=self.joined)
        self.launcher.between(add, self.packed)

    def _widen_or_narrow(self, index: int, *, dense: bool) -> None:
        if dense:
            self.image = self.layout.widen(self.image, self._hidden(index), rows=self.joined)
            self.packing, self.cis = self.layout.wide, self.packed.wide_cis
        else:
            # The last dense block's hidden states are nearer to the edit than an entry, and need no
            # load.
            self.dense_hidden = (index, self.layout.cached_of(self.image, rows=self.joined))
            self.image = self.layout.restrict(self.image, rows=self.joined)
            self.packing, self.cis = self.layout.narrow, self.packed.cis
        self.wide = dense

    def _hidden(self, index: int) -> Tensor:
        """Return [m, width] hidden states of the cached tokens at the block's input."""
        assert self.cached_cis is not None
        count = len(self.cached_cis)
        if index == 0:
            tokens = self.launcher.empty(self.image, (count, self.packed.tokens.shape[1]))
            self.launcher.between(partial(_take_cached, tokens), self.packed)
            return self.model.embed(tokens, self.layout.cached_stream)
        if self.dense_hidden is not None and self.dense_hidden[0] == index:
            return self.dense_hidden[1]
        hidden = self.launcher.empty(self.image, (count, self.image.shape[1]))
        self._place(index, "h", (hidden,), self.layout.cached_slots)
        return hidden

    def _place(
        self,
        index: int,
        part: str,
        outs: Sequence[Tensor],
        slots: KvSlots,
        missing: Sequence[bool] | None = None,
    ) -> None:
        """Write a part (`h` or `kv`) of each entry that is `missing` to its slots; None: of all."""
        self.launcher.between(partial(_place, index, part, outs, slots, missing), self.packed)

    def room_for(self) -> Tensor | None:
        """Allocate [keys, 3 · width] for a lone row: the block's products write where attention
        reads. None: more than one row, or keys and values stay placed.
        """
        packing = self.packing
        if not packing.in_front:
            return None
        width, keys = self.image.shape[1], packing.all_keys.k_spans[-1][1]
        if 2 * keys * width * self.image.element_size() <= self._placed_bytes:
            return None
        return self.launcher.empty(self.image, (keys, 3 * width))

    @property
    def _placed_bytes(self) -> int:
        return self.model.placed_bytes // self.model.block_count

    def _all_keys(self, k: Tensor, v: Tensor, packing: Packing) -> tuple[Tensor, Tensor]:
        """Allocate keys and values of all tokens. In a `room` the computed ones are there
        already.
        """
        if self.room is None:
            count = packing.all_keys.k_spans[-1][1]
            keys, values = self.launcher.empty(k, (2, count, *k.shape[1:]))
            return keys, values
        _, keys, values = self.room.unflatten(1, (3, *k.shape[1:])).unbind(1)
        return keys, values

    def _load(self, index: int, k: Tensor, v: Tensor, packing: Packing) -> tuple[Tensor, Tensor]:
        if self.packed.padded:
            kv = self._all_keys(k, v, packing)
            packing.scatter_computed((k, v), kv)
            alone = self.packed is not self.whole
            self.launcher.between(partial(_exchange, index, kv, alone=alone), self.packed)
            return kv
        widened = self.cached and self.wide  # it reads other keys than narrow blocks do
        placed = self.packed.placed_kv
        cached_kv = None if widened else placed.of(index, self.entries)
        kv, missing = cached_kv or (self._all_keys(k, v, packing), None)
        if cached_kv is None and self.room is None and not widened:
            spans = packing.slots.spans
            missing = placed.keep(index, kv, self.entries, spans, self._placed_bytes)
        if missing is None or any(missing):
            if self.cached and not self.wide:
                self._place(index, "kv", kv, packing.slots, missing)
            if self.sees_fixed:
                self._place_fixed(index, kv, packing, missing)
        if self.room is None:
            packing.scatter_computed((k, v), kv)
        return kv

    def _place_fixed(
        self,
        index: int,
        keys_and_values: tuple[Tensor, Tensor],
        packing: Packing,
        missing: Sequence[bool] | None = None,
    ) -> None:
        slots = packing.fixed_slots
        self.launcher.between(
            partial(_place_fixed, index, keys_and_values, slots, missing), self.packed
        )

    def cached_keys(self, index: int) -> tuple[Tensor, Tensor]:
        """Return projected keys and values of the cached tokens, [M, heads, head_dim]."""
        assert self.cached_cis is not None
        hidden, stream = self._hidden(index), self.layout.cached_stream
        return self.model.project(index, hidden, stream, self.cached_cis)

    def _project(self, index: int, k: Tensor, v: Tensor, packing: Packing) -> tuple[Tensor, Tensor]:
        cached_kv, kv = self.cached_keys(index), self._all_keys(k, v, packing)
        if self.room is None:
            packing.scatter_computed((k, v), kv)
        packing.scatter_inactive(cached_kv, kv)
        if self.sees_fixed:
            self._place_fixed(index, kv, packing)
        return kv

    def capture(self, index: int) -> CaptureKeys:
        """Give captures their hidden states; return the function that gives them keys and
        values.
        """
        packing, captures = self.packing, self.packed.captures
        lines = packing.text, packing.row_stream.spans, packing.image_stream.spans
        for capture, text, (begin, end), (image_begin, image_end) in zip(
            captures, *lines, strict=True
        ):
            if capture is not None:
                if self.joined:
                    hidden = self.image[begin + text : end]
                else:
                    hidden = self.image[image_begin:image_end]
                capture.hidden(index, hidden)
        return self.keys_to_captures(index, packing)

    def keys_to_captures(self, index: int, packing: Packing) -> CaptureKeys:
        return partial(
            _to_captures, index, self.packed.captures, packing.text, packing.row_stream.spans
        )

    def join_streams(self) -> None:
        self.image = self.packing.rows_from(self.text, self.image)
        self.joined = True

    def computed_image(self) -> Tensor:
        """Return [N, width] of the computed image tokens."""
        image = self.image
        if self.wide and self.cached:
            image = self.layout.restrict(image, rows=self.joined)
        return self.layout.narrow.image_of(image) if self.joined else image


def _to_captures(
    index: int,
    captures: Sequence[Capture | None],
    text: Sequence[int],
    spans: Sequence[Span],
    keys: Tensor,
    values: Tensor,
) -> None:
    """Give captures the keys and values of their rows, whose computed tokens lie at `spans` of
    these, the text first.
    """
    for capture, words, (begin, end) in zip(captures, text, spans, strict=True):
        if capture is not None:
            at = slice(begin if capture.text else begin + words, end)
            capture.keys_values(index, keys[at], values[at])


def _add_residuals(index: int, image: Tensor, packed: Packed, *, wide: bool, joined: bool) -> None:
    """Add the residuals of ControlNets after a block to each row's first image tokens: the computed
    ones, in any packing; and those of the text (`Residuals.after`) where there is any.
    """
    packing = packed.layout.wide if wide else packed.layout.narrow
    for row, residuals in packed.residuals.items():
        added = None if residuals is None else residuals.after(index)
        if added is not None:
            of_text, words = max(0, len(added) - packed.layout.narrow.image[row]), 0
            if joined:
                words = min(of_text, packing.text[row])
                begin = packing.row_stream.spans[row][0] + packing.text[row] - words
            else:
                begin = packing.image_stream.spans[row][0]
            added = added[of_text - words :]
            image[begin : begin + len(added)].add_(added)


def _exchange(
    index: int, kv: tuple[Tensor, Tensor], packed: Packed, *, alone: bool = False
) -> None:
    """Let captures read a block's computed keys and values, and place the cached ones: of the rows
    that a padded step is run for, wherever they lie; `alone`: as image-only blocks see them.
    """
    if packed.padded:
        return  # no rows: its kernels are being chosen
    if alone:
        packed = packed.alone
    narrow = packed.layout.narrow
    if packed.primes:
        begins = [begin for begin, _ in narrow.all_keys.k_spans]
        computed = [end - begin for begin, end in narrow.row_stream.spans]
        spans = [(b, b + count) for b, count in zip(begins, computed, strict=True)]
        _to_captures(index, packed.captures, narrow.text, spans, *kv)
    _place(index, "kv", kv, narrow.slots, None, packed)


def _place(
    index: int,
    part: str,
    outs: Sequence[Tensor],
    slots: KvSlots,
    missing: Sequence[bool] | None,
    packed: Packed,
) -> None:
    row_parts = _chosen(packed.cached, missing)
    sources = [None if row_part is None else row_part.source(index, part) for row_part in row_parts]
    scatter_kv(sources, outs, slots)


def _place_fixed(
    index: int,
    outs: Sequence[Tensor],
    slots: KvSlots,
    missing: Sequence[bool] | None,
    packed: Packed,
) -> None:
    """Write keys and values of fixed tokens, turned to the row's own rotary position."""
    fixed_tokens = _chosen(packed.fixed, missing and missing[len(packed.cached) :])
    scatter_kv(
        [None if tokens is None else tokens.source(index) for tokens in fixed_tokens], outs, slots
    )
    for tokens, back, (begin, end) in zip(fixed_tokens, packed.backs, slots.spans, strict=True):
        if tokens is not None and back is not None:
            keys = outs[0][begin:end, None]
            keys.copy_(rotate(keys.float(), back.expand(end - begin, -1), keys.dtype))


def _chosen(tensors: Sequence[T | None], missing: Sequence[bool] | None) -> Sequence[T | None]:
    if missing is None:
        return tensors
    return [part if writes else None for part, writes in zip(tensors, missing, strict=False)]


def _take_cached(out: Tensor, packed: Packed) -> None:
    torch.cat(
        [cached_tokens.tokens() for cached_tokens in packed.cached if cached_tokens is not None],
        out=out,
    )
