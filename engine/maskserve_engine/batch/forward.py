"""A multimodal diffusion transformer over any mix of packed rows: dense, cached and priming.

A model gives what is before and after attention in its blocks (`Transformer`). Attention is the
same for all, and so is what stands in for a cached row's inactive tokens there: they enter as keys
only (FlashPS §3.1, Fig. 5 and 7).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol, Self, TypeVar

import torch
from torch import Tensor

from maskserve_engine.batch.graphs import AtOnce
from maskserve_engine.batch.packing import Packed, Packing, Stream
from maskserve_engine.layers.attention import Span, attention
from maskserve_engine.layers.qk_norm_rope import rotate
from maskserve_engine.layers.scatter_kv import KvSlots, scatter_kv

T = TypeVar("T")


class Transformer(Protocol):
    """A model at one step: its weights, and what timestep and prompt do to each packed row.

    Blocks are numbered in the order they run. The first ones have two streams, text and image
    tokens; the others have one of both, in row order, which is in the place of the image stream
    while the text stream goes unread.
    """

    @property
    def block_count(self) -> int: ...

    @property
    def two_streams(self) -> int:
        """Blocks that have two streams."""
        ...

    @property
    def alone(self) -> int:
        """Of the first blocks, those that are the image's alone: of the text there is in them what
        stands beside it (`RowInput.pads`). A model that has some has one stream.
        """
        ...

    @property
    def placed_bytes(self) -> int:
        """That all blocks' keys and values of a batch may take to stay in place (`PlacedKV`)."""
        ...

    def take(self, rows: Sequence[int]) -> Self:
        """The same for some of the packed rows."""
        ...

    def copied(self) -> Self:
        """The same, with what a step has for itself in tensors of its own."""
        ...

    def follow(self, other: Self) -> None:
        """Have what another one of as many rows has for its step in the tensors of this one."""
        ...

    def embed(self, tokens: Tensor, rows: Sequence[Span]) -> Tensor:
        """[N, width] image tokens at the first block, from [N, in_channels]."""
        ...

    @property
    def writes(self) -> Sequence[bool]:
        """Per block, whether `pre` can write into a `room`."""
        ...

    def pre(
        self,
        number: int,
        text: Tensor,
        image: Tensor,
        packing: Packing,
        cis: Tensor,
        ahead: Any,
        room: Tensor | None,
    ) -> tuple[Tensor, Tensor, Any]:
        """What of a block is before attention.

        Args:
            number: of the block.
            text: [N_text, width], text stream.
            image: [N_image, width], image stream; or [N, width] in row order.
            packing: where the rows lie.
            cis: [N, head_dim / 2] complex rotary factors in row order.
            ahead: what `post` of the block before has left for this one; None: nothing.
            room: [N or more, 3 · width] where queries, keys and values of the only row are to lie,
                if it `writes`; None: anywhere.

        Returns:
            queries and keys, rotated, [N, 2, heads, head_dim]; values [N, heads, head_dim], which
            nobody reads once attention has; and whatever `post` needs of it. All in row order.
        """
        ...

    def post(
        self,
        number: int,
        text: Tensor,
        image: Tensor,
        attended: Tensor,
        kept: Any,
        packing: Packing,
        *,
        goes_on: bool,
        image_alone: bool,
    ) -> tuple[Tensor, Tensor, Any]:
        """What is after attention: the streams behind the block, and what `pre` of the next one is
        given beside them.

        Args:
            number: of the block.
            text: as `pre` had it.
            image: likewise.
            attended: [N, width] what attention has found, in row order.
            kept: what `pre` has left.
            packing: where the rows lie.
            goes_on: whether the next block is given just these streams.
            image_alone: whether of the only row, in row order, the image tokens alone are wanted.
        """
        ...

    def project(
        self, number: int, hidden: Tensor, stream: Stream, cis: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Keys and values of inactive image tokens from their hidden states (FlashPS Fig. 5).

        Args:
            number: of the block.
            hidden: [M, width] at the block's input, packed by row.
            stream: where the rows lie in `hidden`.
            cis: [M, head_dim / 2] complex rotary factors.

        Returns:
            keys (after norm and rotary embedding) and values, [M, heads, head_dim].
        """
        ...

    def last(self, image: Tensor, stream: Stream) -> Tensor:
        """[N, out_channels] what is behind the blocks, of image tokens [N, width]."""
        ...


CaptureKeys = Callable[[Tensor, Tensor], None]
"""Sees keys (after norm and rotary embedding) and values in row order."""


class FillRest(Protocol):
    """Adds keys and values of the inactive tokens."""

    def __call__(self, k: Tensor, v: Tensor, packing: Packing) -> tuple[Tensor, Tensor]:
        """[keys, heads, head_dim] of all rows' tokens, from those [N, heads, head_dim] of the
        computed ones.
        """
        ...


def forward(
    model: Transformer,
    packed: Packed,
    kinds: Sequence[str] = (),
    asking: AtOnce | None = None,
) -> Tensor:
    """The model's output for the computed image tokens of every row.

    Args:
        model: at this step.
        packed: any mix of rows; those with `rest` are cached rows.
        kinds: `dense`, `project` or `kv` per block, for all cached rows of the step; not read when
            there are none. `project` and `dense` take the inactive hidden states from the model's
            start or the dense block before them, else from an entry.
        asking: how kernels are asked for; None: at once.

    Returns:
        [N, out_channels] in the order of `packed.tokens`.
    """
    state = State(model, packed, kinds, asking=asking)
    state.run(0, model.block_count)
    return model.last(state.computed_image(), state.stream)


class State:
    """Hidden states between blocks and whether inactive tokens are among them (`wide`)."""

    def __init__(
        self,
        model: Transformer,
        packed: Packed,
        kinds: Sequence[str],
        streams: tuple[Tensor, Tensor] | None = None,
        asking: AtOnce | None = None,
    ) -> None:
        self.model, self.kinds = model, kinds
        self.asking = asking or AtOnce()
        self.rest_cis, self.cached = packed.rest_cis, packed.rest_cis is not None
        self.sees_fixed = packed.sees_fixed
        self.wide = not self.cached  # without cached rows both packings are the same
        self.packed: Packed
        self._lie_as(packed.alone if model.alone else packed)
        self.whole = packed
        self.carried: tuple[int, Tensor] | None = None
        self.joined = False  # one stream in row order, no longer two
        self.ahead: Any = None  # what the last block has left for the next one
        self.room: Tensor | None = None  # where the present block's keys and values lie already
        self.stream: Stream = self.layout.narrow.image_stream  # of the computed image tokens
        self.text: Tensor
        self.image: Tensor
        self.text, self.image = streams or (
            self.packed.text,
            model.embed(packed.tokens, self.stream.spans),
        )

    def _lie_as(self, packed: Packed) -> None:
        """Have the rows lie as they are packed there."""
        self.packed, self.layout = packed, packed.layout
        widened = self.cached and self.wide
        self.packing: Packing = self.layout.wide if widened else self.layout.narrow
        self.cis = packed.wide_cis if widened else packed.cis
        self.entries = packed.entries

    def _meet_text(self) -> None:
        """Behind the image's own blocks: from here on all see the text."""
        pads, image = self.packing.split(self.image)
        self._lie_as(self.whole)
        text, places = self.packed.text, self.whole.pads
        if places is not None:
            text = text.index_copy(0, places, pads)
        self.image = self.packing.rows_from(text, image)

    def run(self, begin: int, end: int) -> None:
        """Blocks `begin` to `end`."""
        two_streams, residuals = self.model.two_streams, self.packed.residuals
        kinds = self.kinds if self.cached else ("dense",) * end
        for number in range(begin, end):
            if number and number == self.model.alone:
                self._meet_text()
            if number >= two_streams and not self.joined:
                self.join_streams()
            # Whether the next block is given what this one leaves, as it is.
            goes_on = (
                number + 1 < end
                and not residuals
                and number + 1 not in (two_streams, self.model.alone)
                and (kinds[number] == "dense") == (kinds[number + 1] == "dense")
            )
            self.text, self.image = self._block(number, goes_on=goes_on)
            if residuals:
                self._add_residuals(number)

    def _block(self, number: int, *, goes_on: bool) -> tuple[Tensor, Tensor]:
        """The streams behind a block; what it had between is let go."""
        fill: FillRest | None = partial(self._load, number) if self.sees_fixed else None
        if self.cached:  # inactive tokens come in or are dropped, as the block's kind asks
            kind = self.kinds[number]
            if (kind == "dense") != self.wide:
                self._widen_or_narrow(number, dense=kind == "dense")
            if kind != "dense":
                fill = partial(self._project if kind == "project" else self._load, number)
        if fill is not None and self.model.writes[number]:
            self.room = self.room_for()
        capture = self.capture(number) if self.packed.primes else None
        streams, ahead = (self.text, self.image), self.ahead
        self.ahead = None
        pre = self.model.pre(number, *streams, self.packing, self.cis, ahead, self.room)
        qk, v, post_inputs = pre
        del pre, ahead
        attended = self.attend(qk, v, self.packing, fill, capture)
        self.room = None
        del qk, v  # the values may hold all that their product made, seven widths of each token
        # Nobody reads the text behind the last block. (That of several rows lies between.)
        image_only = self.joined and self.packing.in_front and number + 1 == self.model.block_count
        *behind, self.ahead = self.model.post(
            number,
            *streams,
            attended,
            post_inputs,
            self.packing,
            goes_on=goes_on,
            image_alone=image_only,
        )
        self.joined = self.joined and not image_only
        return behind[0], behind[1]

    def attend(
        self,
        qk: Tensor,
        v: Tensor,
        packing: Packing,
        fill: FillRest | None,
        capture: CaptureKeys | None,
    ) -> Tensor:
        """[N, width] attention of a packing's computed tokens, in row order, over all of each row's
        keys.

        Args:
            qk: [N, 2, heads, head_dim] queries and keys, rotated.
            v: [N, heads, head_dim] values.
            packing: of the tokens.
            fill: how keys that were not computed come about; None: there are none.
            capture: who sees the keys.
        """
        q, k = qk.unbind(1)
        if capture is not None:
            capture(k, v)
        if fill is None:
            return attention(q, k, v, packing.computed).flatten(1)
        keys, values = fill(k, v, packing)
        return attention(q, keys, values, packing.all_keys).flatten(1)

    def _add_residuals(self, index: int) -> None:
        """To each row's computed image tokens: in any packing, the first ones of its image."""
        for row, residuals in self.packed.residuals.items():
            added = residuals.after(index)
            if added is not None:
                if self.joined:
                    begin = self.packing.row_stream.spans[row][0] + self.packing.text[row]
                else:
                    begin = self.packing.image_stream.spans[row][0]
                self.image[begin : begin + len(added)] += added

    def part(self, rows: Sequence[int]) -> State:
        """Some rows alone, from here on."""

        def of(stream: Stream, x: Tensor) -> Tensor:
            return torch.cat([x[slice(*stream.spans[row])] for row in rows])

        packing = self.packing
        text = self.text if self.joined else of(packing.text_stream, self.text)
        image = of(packing.row_stream if self.joined else packing.image_stream, self.image)
        packed = Packed([self.packed.rows[row] for row in rows])
        part = State(self.model.take(rows), packed, self.kinds, (text, image))
        part.joined = self.joined
        if part.cached and self.wide:
            part.wide, part.packing, part.cis = True, part.layout.wide, packed.wide_cis
        return part

    def _widen_or_narrow(self, index: int, *, dense: bool) -> None:
        if dense:
            self.image = self.layout.widen(self.image, self._hidden(index), rows=self.joined)
            self.packing, self.cis = self.layout.wide, self.packed.wide_cis
        else:
            # What the last dense block left is nearer to the edit than an entry, and loads nothing.
            self.carried = (index, self.layout.rest_of(self.image, rows=self.joined))
            self.image = self.layout.restrict(self.image, rows=self.joined)
            self.packing, self.cis = self.layout.narrow, self.packed.cis
        self.wide = dense

    def _hidden(self, index: int) -> Tensor:
        """[m, width] the inactive tokens at the block's input: at hand, or restored."""
        assert self.rest_cis is not None
        count = len(self.rest_cis)
        if index == 0:
            tokens = self.asking.empty(self.image, (count, self.packed.tokens.shape[1]))
            self.asking.between(partial(_take_rest, tokens), self.packed)
            return self.model.embed(tokens, self.layout.rest_stream.spans)
        if self.carried is not None and self.carried[0] == index:
            return self.carried[1]
        hidden = self.asking.empty(self.image, (count, self.image.shape[1]))
        self._place(index, "h", (hidden,), self.layout.rest_slots)
        return hidden

    def _place(
        self,
        index: int,
        part: str,
        outs: Sequence[Tensor],
        slots: KvSlots,
        anew: Sequence[bool] | None = None,
    ) -> None:
        """Have what entries say of a block in its place.

        Args:
            index: of the block.
            part: of its entry.
            outs: as of `scatter_kv`.
            slots: likewise.
            anew: of `Packed.entries`, those whose place has something else; None: all.
        """
        self.asking.between(partial(_place, index, part, outs, slots, anew), self.packed)

    def room_for(self) -> Tensor | None:
        """[keys, 3 · width] of a lone row, for a block that lacks keys and `writes`: its products
        write where attention reads, and nothing is moved. None: keys and values are put together
        elsewhere.
        """
        packing = self.packing
        if not packing.in_front:
            return None
        width, keys = self.image.shape[1], packing.all_keys.k_spans[-1][1]
        if 2 * keys * width * self.image.element_size() <= self._placed_bytes:
            return None
        return self.asking.empty(self.image, (keys, 3 * width))

    @property
    def _placed_bytes(self) -> int:
        """That a block's keys and values may take to stay in place."""
        return self.model.placed_bytes // self.model.block_count

    def _all_keys(self, k: Tensor, v: Tensor, packing: Packing) -> tuple[Tensor, Tensor]:
        """Keys and values of all tokens, not written yet; those of the room have the computed
        ones.
        """
        if self.room is None:
            count = packing.all_keys.k_spans[-1][1]
            keys, values = self.asking.empty(k, (2, count, *k.shape[1:]))
            return keys, values
        _, keys, values = self.room.unflatten(1, (3, *k.shape[1:])).unbind(1)
        return keys, values

    def _load(self, index: int, k: Tensor, v: Tensor, packing: Packing) -> tuple[Tensor, Tensor]:
        widened = self.cached and self.wide  # where other tokens are not computed than else
        placed = self.packed.placed_kv
        cached_kv = None if widened else placed.of(index, self.entries)
        kv, anew = cached_kv or (self._all_keys(k, v, packing), None)
        if cached_kv is None and self.room is None and not widened:
            spans = packing.slots.spans
            anew = placed.keep(index, kv, self.entries, spans, self._placed_bytes)
        if anew is None or any(anew):
            if self.cached and not self.wide:
                self._place(index, "kv", kv, packing.slots, anew)
            self._place_fixed(index, kv, packing, anew)
        if self.room is None:
            packing.scatter_computed((k, v), kv)
        return kv

    def _place_fixed(
        self,
        index: int,
        both: tuple[Tensor, Tensor],
        packing: Packing,
        anew: Sequence[bool] | None = None,
    ) -> None:
        """Have a block's keys and values of fixed tokens in their place; `anew` as of `_place`."""
        if self.sees_fixed:
            slots = packing.fixed_slots
            self.asking.between(partial(_place_fixed, index, both, slots, anew), self.packed)

    def rest_keys(self, index: int) -> tuple[Tensor, Tensor]:
        """Keys and values of the inactive tokens, projected, [M, heads, head_dim]."""
        assert self.rest_cis is not None
        hidden, stream = self._hidden(index), self.layout.rest_stream
        return self.model.project(index, hidden, stream, self.rest_cis)

    def _project(self, index: int, k: Tensor, v: Tensor, packing: Packing) -> tuple[Tensor, Tensor]:
        cached_kv, kv = self.rest_keys(index), self._all_keys(k, v, packing)
        if self.room is None:
            packing.scatter_computed((k, v), kv)
        packing.scatter_inactive(cached_kv, kv)
        self._place_fixed(index, kv, packing)
        return kv

    def capture(self, index: int) -> CaptureKeys:
        """Hand the priming rows' hidden states over now, their keys and values when known."""
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
        """Hands the priming rows their keys and values."""
        row_captures = list(
            zip(self.packed.captures, packing.text, packing.row_stream.spans, strict=True)
        )

        def keys_values(keys: Tensor, values: Tensor) -> None:
            for capture, text, (begin, end) in row_captures:
                if capture is not None:
                    at = slice(begin if capture.text else begin + text, end)
                    capture.keys_values(index, keys[at], values[at])

        return keys_values

    def join_streams(self) -> None:
        """Both streams into row order."""
        self.image = self.packing.rows_from(self.text, self.image)
        self.joined = True

    def computed_image(self) -> Tensor:
        """[N, width] the computed image tokens, as they are now."""
        image = self.image
        if self.wide and self.cached:
            image = self.layout.restrict(image, rows=self.joined)
        return self.layout.narrow.image_of(image) if self.joined else image


def _place(
    index: int,
    part: str,
    outs: Sequence[Tensor],
    slots: KvSlots,
    anew: Sequence[bool] | None,
    packed: Packed,
) -> None:
    """Write what the rows' entries say of a block to its place."""
    row_parts = _chosen(packed.parts, anew)
    sources = [None if row_part is None else row_part.source(index, part) for row_part in row_parts]
    scatter_kv(sources, outs, slots)


def _place_fixed(
    index: int,
    outs: Sequence[Tensor],
    slots: KvSlots,
    anew: Sequence[bool] | None,
    packed: Packed,
) -> None:
    """The same of fixed tokens, which have keys and values alone."""
    fixed_tokens = _chosen(packed.fixed, anew and anew[len(packed.parts) :])
    scatter_kv(
        [None if tokens is None else tokens.source(index) for tokens in fixed_tokens], outs, slots
    )
    for tokens, back, (begin, end) in zip(fixed_tokens, packed.backs, slots.spans, strict=True):
        if tokens is not None and back is not None:
            keys = outs[0][begin:end, None]
            keys.copy_(rotate(keys.float(), back.expand(end - begin, -1), keys.dtype))


def _chosen(given: Sequence[T | None], anew: Sequence[bool] | None) -> Sequence[T | None]:
    """Those that are written; None in the place of the others."""
    if anew is None:
        return given
    return [part if writes else None for part, writes in zip(given, anew, strict=False)]


def _take_rest(out: Tensor, packed: Packed) -> None:
    """Write the inactive tokens' model inputs at this step."""
    torch.cat(
        [cached_tokens.tokens() for cached_tokens in packed.rests if cached_tokens is not None],
        out=out,
    )
