"""FluxTransformer2DModel over any mix of rows: dense, cached and priming."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from maskserve_engine.batch.inputs import Packed
from maskserve_engine.batch.packing import Packing, Stream
from maskserve_engine.families.flux.blocks import (
    CaptureKeys,
    FillRest,
    double_block,
    last_layer,
    project_kv,
    single_block,
)
from maskserve_engine.families.flux.vectors import Vectors
from maskserve_engine.families.flux.weights import Double, Single, Weights
from maskserve_engine.layers.scatter_kv import Source, scatter_kv


def forward(
    weights: Weights,
    packed: Packed,
    vectors: Vectors,
    kinds: Sequence[str] = (),
) -> Tensor:
    """The model's output for the computed image tokens of every row.

    Args:
        weights: of a FluxTransformer2DModel.
        packed: any mix of rows; those with `rest` are cached rows.
        vectors: of this step.
        kinds: `dense`, `project` or `kv` per block, double blocks first, for all cached rows of
            the step; not read when there are none. `project` and `dense` take the inactive hidden
            states from the model's start or the dense block before them, else from an entry.

    Returns:
        [N, out_channels] in the order of `packed.tokens`.
    """
    state = State(weights, packed, vectors, kinds)
    state.run(0, len(weights.blocks))
    return last_layer(weights, state.computed_image(), vectors.last, state.stream)


class State:
    """Hidden states between blocks and whether inactive tokens are among them (`wide`)."""

    def __init__(
        self,
        weights: Weights,
        packed: Packed,
        vectors: Vectors,
        kinds: Sequence[str],
        streams: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        self.weights, self.packed, self.vectors, self.kinds = weights, packed, vectors, kinds
        self.layout, self.rest_cis = packed.layout, packed.rest_cis
        self.cached = packed.rest_cis is not None
        self.wide = not self.cached  # without cached rows both packings are the same
        self.packing: Packing = self.layout.narrow
        self.cis = packed.cis
        self.carried: tuple[int, Tensor] | None = None
        self.joined = False  # double blocks: two streams; single blocks: one in row order
        packed.resident_kv.keep_for([rest.entry for rest in packed.rests if rest is not None])
        self.text, self.image = streams or (
            packed.text,
            weights.x_embedder(packed.tokens, self.stream.spans),
        )

    @property
    def stream(self) -> Stream:
        """Of the computed image tokens."""
        return self.layout.narrow.image_stream

    def run(self, begin: int, end: int) -> None:
        """Blocks `begin` to `end`, double blocks first."""
        segments = self.weights.segments
        for index, block in enumerate(self.weights.blocks[begin:end], start=begin):
            if isinstance(block, Single) and not self.joined:
                self.join_streams()
            fill, capture = self.enter(index, block)
            if isinstance(block, Single):
                vectors = self.vectors.of(index)
                self.image = single_block(
                    block, self.image, vectors, self.packing, self.cis, fill, capture, segments
                )
            else:
                both, streams = self.vectors.double[index], (self.text, self.image)
                self.text, self.image = double_block(
                    block, *streams, both, self.packing, self.cis, fill, capture, segments
                )
            if self.packed.residuals:
                self._add_residuals(index)

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
        part = State(self.weights, packed, self.vectors.take(rows), self.kinds, (text, image))
        part.joined = self.joined
        if part.cached and self.wide:
            part.wide, part.packing, part.cis = True, part.layout.wide, packed.wide_cis
        return part

    def enter(
        self, index: int, block: Double | Single
    ) -> tuple[FillRest | None, CaptureKeys | None]:
        """Bring the inactive tokens in or drop them, as the block's kind asks.

        Returns:
            how the block's missing keys come about and who sees its keys; mostly nothing, nobody.
        """
        fill = None
        if self.cached:
            self._widen_or_narrow(index)
            fill = self.fill(index, block)
        return fill, self.capture(index) if self.packed.primes else None

    def _widen_or_narrow(self, index: int) -> None:
        dense = self.kinds[index] == "dense"
        if dense == self.wide:
            return
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
        if index == 0:
            tokens = torch.cat([rest.tokens() for rest in self.packed.rests if rest is not None])
            return self.weights.x_embedder(tokens, self.layout.rest_stream.spans)
        if self.carried is not None and self.carried[0] == index:
            return self.carried[1]
        assert self.rest_cis is not None
        hidden = self.image.new_empty(len(self.rest_cis), self.image.shape[1])
        scatter_kv(self._sources(index, "h"), (hidden,), self.layout.rest_slots)
        return hidden

    def _sources(self, index: int, part: str) -> list[Source | None]:
        return [None if rest is None else rest.source(index, part) for rest in self.packed.rests]

    def fill(self, index: int, block: Double | Single) -> FillRest | None:
        """How the block's inactive keys come about; None when none are missing."""
        kind = self.kinds[index]
        if kind == "dense":
            return None
        return (
            partial(self._project, index, block)
            if kind == "project"
            else partial(self._load, index)
        )

    def _load(self, index: int, k: Tensor, v: Tensor, packing: Packing) -> tuple[Tensor, Tensor]:
        both = self.packed.resident_kv.get(index)
        if both is None:
            both = packing.all_keys_like(k), packing.all_keys_like(v)
            scatter_kv(self._sources(index, "kv"), both, packing.slots)
            room = self.weights.resident_bytes // len(self.weights.blocks)
            self.packed.resident_kv.keep(index, both, room)
        for computed, keys in zip((k, v), both, strict=True):
            packing.scatter_computed(computed, keys)
        return both

    def _project(
        self, index: int, block: Double | Single, k: Tensor, v: Tensor, packing: Packing
    ) -> tuple[Tensor, Tensor]:
        assert self.rest_cis is not None
        rest = project_kv(
            block,
            self._hidden(index),
            self.vectors.of(index),
            self.layout.rest_stream,
            self.rest_cis,
        )
        both = packing.all_keys_like(k), packing.all_keys_like(v)
        for computed, inactive, keys in zip((k, v), rest, both, strict=True):
            packing.scatter_computed(computed, keys)
            packing.scatter_inactive(inactive, keys)
        return both

    def capture(self, index: int) -> CaptureKeys:
        """Hand the priming rows' hidden states over now, their keys and values when known."""
        packing = self.packing
        own = list(zip(self.packed.captures, packing.text, packing.row_stream.spans, strict=True))
        for (capture, text, (begin, end)), (image_begin, image_end) in zip(
            own, packing.image_stream.spans, strict=True
        ):
            if capture is not None:
                if self.joined:
                    hidden = self.image[begin + text : end]
                else:
                    hidden = self.image[image_begin:image_end]
                capture.hidden(index, hidden)

        def keys_values(keys: Tensor, values: Tensor) -> None:
            for capture, text, (begin, end) in own:
                if capture is not None:
                    at = slice(begin + text, end)
                    capture.keys_values(index, keys[at], values[at])

        return keys_values

    def join_streams(self) -> None:
        """From double to single blocks: both streams into row order."""
        self.image = self.packing.rows_from(self.text, self.image)
        self.joined = True

    def computed_image(self) -> Tensor:
        """[N, width] the computed image tokens, as they are now."""
        image = self.image
        if self.wide and self.cached:
            image = self.layout.restrict(image, rows=self.joined)
        return self.layout.narrow.image_of(image) if self.joined else image
