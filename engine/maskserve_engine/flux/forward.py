"""FluxTransformer2DModel over any mix of rows: dense, cached and priming."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from maskserve_engine.flux.blocks import (
    FillRest,
    double_block,
    last_layer,
    project_rest,
    single_block,
)
from maskserve_engine.flux.packing import Packing, Widening, widening


class Rest(Protocol):
    """A cached row's inactive tokens: what of them the plan's blocks may need."""

    @property
    def cis(self) -> Tensor:
        """[m, head_dim / 2] complex rotary factors."""
        ...

    def tokens(self) -> Tensor:
        """[m, in_channels] their model inputs: the template noised to this timestep."""
        ...

    def hidden(self, block: int, out: Tensor) -> None:
        """Write their cached hidden states at the block's input into `out` [m, width]."""
        ...

    def keys_values(self, block: int, keys: Tensor, values: Tensor) -> None:
        """Write their cached keys and values into [m, heads, head_dim] each."""
        ...


class Capture(Protocol):
    """Where a priming row's activations go. Tensors are views: copy what is kept."""

    def hidden(self, block: int, hidden: Tensor) -> None:
        """`hidden` [tokens, width]: image tokens at the block's input."""
        ...

    def keys_values(self, block: int, keys: Tensor, values: Tensor) -> None:
        """`keys` and `values` [tokens, heads, head_dim] of the image tokens."""
        ...


@dataclass(frozen=True, slots=True)
class RowInput:
    """One row's part of a model call: what is packed with the other rows'."""

    tokens: Tensor
    """[n, in_channels] computed image tokens."""
    text: Tensor
    """[T, width] prompt embedding after context_embedder."""
    pooled: Tensor
    """[pooled width]"""
    guidance: float | None
    """Embedded guidance; None for models without it."""
    cis: Tensor
    """[T + n, head_dim / 2] complex rotary factors of text and computed tokens."""
    rest_cis: Tensor | None = None
    """[m, head_dim / 2] of the tokens that are not computed; None where all are."""


@dataclass(frozen=True, slots=True)
class Moment:
    """What of a row differs from step to step, beside its tokens."""

    timestep: float
    """The sampler's timestep, 0 to 1000."""
    rest: Rest | None = None
    """A cached row's inactive tokens."""
    capture: Capture | None = None


class Packed:
    """The inputs of all rows, without padding (`packing`)."""

    def __init__(self, rows: Sequence[RowInput]) -> None:
        rest = [row.rest_cis for row in rows if row.rest_cis is not None]
        self.ways: Widening = widening(
            tuple(len(row.text) for row in rows),
            tuple(len(row.tokens) for row in rows),
            tuple(0 if row.rest_cis is None else len(row.rest_cis) for row in rows),
            rows[0].tokens.device,
        )
        self.tokens = torch.cat([row.tokens for row in rows])
        self.text = torch.cat([row.text for row in rows])
        self.pooled = torch.stack([row.pooled for row in rows])
        self.cis = torch.cat([row.cis for row in rows])
        self.rest_cis = torch.cat(rest) if rest else None
        self.guidance: Tensor | None = None
        if rows[0].guidance is not None:
            guidance = torch.tensor([row.guidance for row in rows], device=self.tokens.device)
            self.guidance = guidance.to(self.tokens.dtype) * 1000


def time_text_embedding(model: Any, packed: Packed, moments: Sequence[Moment]) -> Tensor:
    """[R, width], rounded as diffusers' pipeline and model round timestep and guidance."""
    dtype = packed.tokens.dtype  # model.dtype walks over every parameter to find out
    timestep = torch.tensor([moment.timestep for moment in moments], device=packed.tokens.device)
    # The pipeline divides by 1000 in the latents' dtype and the model multiplies again.
    timestep = timestep.to(dtype) / 1000 * 1000
    if packed.guidance is None:
        return model.time_text_embed(timestep, packed.pooled)
    return model.time_text_embed(timestep, packed.guidance, packed.pooled)


def forward(
    model: Any, packed: Packed, moments: Sequence[Moment], kinds: Sequence[str] = ()
) -> Tensor:
    """The model's output for the computed image tokens of every row.

    Args:
        model: FluxTransformer2DModel.
        packed: any mix of rows.
        moments: of the same rows; those with `rest` are cached rows.
        kinds: `dense`, `project` or `kv` per block, double blocks first, for all cached rows of
            the step; not read when there are none. `project` and `dense` take the inactive hidden
            states from the model's start or the dense block before them, else from `Rest.hidden`.

    Returns:
        [N, out_channels] in the order of `packed.tokens`.
    """
    emb = F.silu(time_text_embedding(model, packed, moments))
    state = _State(model, packed, moments, emb)
    for index, block in enumerate(model.transformer_blocks):
        state.enter(index, kinds)
        state.text, state.image = double_block(
            block,
            state.text,
            state.image,
            state.emb,
            state.packing,
            state.cis,
            state.fill(index, block, kinds),
            state.capture(index),
        )
    first = len(model.transformer_blocks)
    state.join_streams()
    for index, block in enumerate(model.single_transformer_blocks, start=first):
        state.enter(index, kinds)
        state.image = single_block(
            block,
            state.image,
            state.emb,
            state.packing,
            state.cis,
            state.fill(index, block, kinds),
            state.capture(index),
        )
    stream = packed.ways.narrow.image_stream
    return last_layer(model, state.computed_image(), emb, stream)


class _State:
    """Hidden states between blocks and whether inactive tokens are among them (`wide`)."""

    def __init__(self, model: Any, packed: Packed, moments: Sequence[Moment], emb: Tensor) -> None:
        self.model, self.emb = model, emb
        self.ways = packed.ways
        self.rests = [moment.rest for moment in moments]
        self.captures = [moment.capture for moment in moments]
        self.priming = any(capture is not None for capture in self.captures)
        self.cached = any(rest is not None for rest in self.rests)
        self.wide = not self.cached  # without cached rows both packings are the same
        self.carried: tuple[int, Tensor] | None = None
        self.joined = False  # double blocks: two streams; single blocks: one in row order
        self.text = packed.text
        self.image = model.x_embedder(packed.tokens)
        self.narrow_cis, self.rest_cis = packed.cis, packed.rest_cis
        self.wide_cis: Tensor | None = None

    @property
    def packing(self) -> Packing:
        return self.ways.wide if self.wide else self.ways.narrow

    @property
    def cis(self) -> Tensor:
        if not self.wide or not self.cached:
            return self.narrow_cis
        if self.wide_cis is None:
            assert self.rest_cis is not None
            both = self.narrow_cis.new_empty(
                len(self.narrow_cis) + len(self.rest_cis), self.narrow_cis.shape[1]
            )
            both[self.ways.core_in_rows] = self.narrow_cis
            both[self.ways.rest_in_rows] = self.rest_cis
            self.wide_cis = both
        return self.wide_cis

    def enter(self, index: int, kinds: Sequence[str]) -> None:
        """Bring the inactive tokens in or drop them, as the block's kind asks."""
        if not self.cached:
            return
        dense = kinds[index] == "dense"
        if dense and not self.wide:
            self.image = self.ways.widen(self.image, self._hidden(index), rows=self.joined)
        elif self.wide and not dense:
            # What the last dense block left is nearer to the edit than an entry, and loads nothing.
            self.carried = (index, self.ways.rest_of(self.image, rows=self.joined))
            self.image = self.ways.restrict(self.image, rows=self.joined)
        self.wide = dense

    def _hidden(self, index: int) -> Tensor:
        """[m, width] the inactive tokens at the block's input: at hand, or restored."""
        if index == 0:
            tokens = torch.cat([rest.tokens() for rest in self.rests if rest is not None])
            return self.model.x_embedder(tokens)
        if self.carried is not None and self.carried[0] == index:
            return self.carried[1]
        assert self.rest_cis is not None
        hidden = self.image.new_empty(len(self.rest_cis), self.image.shape[1])
        for rest, (begin, end) in zip(self.rests, self.ways.rest_stream.spans, strict=True):
            if rest is not None:
                rest.hidden(index, hidden[begin:end])
        return hidden

    def fill(self, index: int, block: Any, kinds: Sequence[str]) -> FillRest | None:
        """How the block's inactive keys come about; None when none are missing."""
        if not self.cached or kinds[index] == "dense":
            return None
        if kinds[index] == "project":
            return lambda keys, values, packing: self._fill_projected(
                index, block, keys, values, packing
            )
        return lambda keys, values, packing: self._fill_loaded(index, keys, values, packing)

    def _fill_loaded(self, index: int, keys: Tensor, values: Tensor, packing: Packing) -> None:
        for number, rest in enumerate(self.rests):
            if rest is not None:
                begin, end = packing.rest_keys(number)
                rest.keys_values(index, keys[begin:end], values[begin:end])

    def _fill_projected(
        self, index: int, block: Any, keys: Tensor, values: Tensor, packing: Packing
    ) -> None:
        assert self.rest_cis is not None
        k, v = project_rest(
            block, self._hidden(index), self.emb, self.ways.rest_stream, self.rest_cis
        )
        for number, (begin, end) in enumerate(self.ways.rest_stream.spans):
            to_begin, to_end = packing.rest_keys(number)
            keys[to_begin:to_end] = k[begin:end]
            values[to_begin:to_end] = v[begin:end]

    def capture(self, index: int) -> Any:
        """Hand the priming rows' hidden states over now, their keys and values when known."""
        if not self.priming:
            return None
        packing = self.packing
        own = list(zip(self.captures, packing.text, packing.row_stream.spans, strict=True))
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
        """The computed image tokens, image stream of the narrow packing."""
        if self.wide and self.cached:
            self.image = self.ways.restrict(self.image, rows=True)
        return self.ways.narrow.image_of(self.image)
