"""FluxControlNetModels over the packed rows that have control, beside FLUX.

A net is a shorter FLUX whose blocks' outputs, each through a product of its own, are added to the
hidden states of the base. It runs on the same packed blocks as the base does (`batch.forward`).

Beside a cached row a net computes the row's active tokens, too, as its additions to the others are
read by nobody. The others enter as keys and values, as in the base. They cannot come from the
template's entries, which know nothing of the control picture: the net computes all tokens at one
step in so many and keeps them with the edit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import ceil
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from maskserve_core.models.flux import CONTROL
from maskserve_engine.batch.forward import State
from maskserve_engine.batch.inputs import Packed, RowInput
from maskserve_engine.cache.codec import Coded
from maskserve_engine.control import Control
from maskserve_engine.families.flux.blocks import FluxStep
from maskserve_engine.families.flux.vectors import embed, vectors
from maskserve_engine.families.flux.weights import Weights
from maskserve_engine.layers.linear import Linear, linear
from maskserve_engine.layers.scatter_kv import Source


@dataclass(frozen=True, slots=True, eq=False)
class ControlNet:
    """A FluxControlNetModel's weights, found once, for a base of so many blocks."""

    weights: Weights
    hint_embedder: Linear
    """[N, width] of the control picture's tokens [N, in_channels]."""
    outs: tuple[Linear, ...]
    """From the width, behind each block."""
    modes: Tensor | None
    """[modes, width] of a union net: a text token that says what kind of picture it is given."""
    channels: int
    """Of the latents' tokens that it takes."""
    places: tuple[tuple[int, ...], ...]
    """Per block of the net: the base's blocks behind which its output is added."""

    @classmethod
    def of(cls, model: Any, base: Any, channels: int) -> ControlNet:
        """A net beside its base.

        Args:
            model: FluxControlNetModel.
            base: FluxTransformer2DModel that it is for.
            channels: of the base's latents as tokens.

        Raises:
            ValueError: it does not fit the base; in one sentence.
        """
        if model.input_hint_block is not None:
            raise ValueError("it takes pixels (conditioning_embedding_channels), not VAE latents")
        own, of_base = model.config, {**base.config, "in_channels": channels}
        for name in ("in_channels", *CONTROL.equal):
            if list(np.ravel(own[name])) != list(np.ravel(of_base[name])):
                raise ValueError(f"its {name} is {own[name]}, that of the model {of_base[name]}")
        doubles, singles = len(base.transformer_blocks), len(base.single_transformer_blocks)
        weights = Weights.of(model)
        with torch.no_grad():
            outs = [*model.controlnet_blocks, *model.controlnet_single_blocks]
            return cls(
                weights,
                linear(model.controlnet_x_embedder),
                tuple([linear(each) for each in outs]),
                model.controlnet_mode_embedder.weight if model.union else None,
                channels,
                (
                    *_spread(len(weights.double_blocks), 0, doubles),
                    *_spread(len(weights.single_blocks), doubles, singles),
                ),
            )

    def samples(self, inputs: Sequence[RowInput], timesteps: Tensor) -> list[list[Tensor]]:
        """What the net says behind each of its blocks.

        Args:
            inputs: of any rows: `text` after the net's own context_embedder, `tokens`
                [n, channels + width], the latents beside what `hint_embedder` made of the picture.
            timesteps: [rows] the sampler's, float32.

        Returns:
            per block, per row [n, width] of the computed tokens.
        """
        packed, own = Packed(inputs), self.weights
        kinds = ("kv",) * len(own.blocks)
        spans = packed.layout.narrow.image_stream.spans
        emb = embed(own, timesteps[None], packed.pooled, packed.guidance)
        [at] = vectors(own, emb)
        latents, hints = packed.tokens.split((self.channels, own.width), dim=1)
        image = own.x_embedder(latents.contiguous(), spans) + hints
        state = State(FluxStep(own, at), packed, kinds, (packed.text, image))
        found = []
        for number, out in enumerate(self.outs):
            state.run(number, number + 1)
            found.append(list(out(state.computed_image(), spans).split(state.stream.lengths)))
        return found


def _spread(count: int, first: int, of: int) -> list[tuple[int, ...]]:
    """The base's blocks that each of `count` outputs goes to, as diffusers has it: every so many in
    a row, of the `of` that begin with `first`.
    """
    if not count:
        return []
    each = ceil(of / count)
    return [tuple(range(first + i * each, first + min((i + 1) * each, of))) for i in range(count)]


class NetInput(NamedTuple):
    """What a net is given of one edit, beside what its base is given."""

    control: Control
    net: ControlNet
    hint: Tensor
    """[N, width] of the picture's tokens, in the order of the row's own: active ones first."""
    text: Tensor
    """[T, width] after the net's context_embedder; of a union net behind its mode's token."""
    guidance: float | None

    def of(self, row: RowInput) -> RowInput:
        """Of a row, for the tokens that it computes."""
        hint = self.hint[: len(row.tokens)]
        tokens = torch.cat((row.tokens[:, : self.net.channels], hint), dim=1)
        cis = row.cis
        if len(self.text) > len(row.text):  # the mode stands where all text does
            cis = torch.cat((cis[:1], cis))
        return replace(
            row, tokens=tokens, text=self.text, guidance=self.guidance, cis=cis, residuals=None
        )


class KeptKV:
    """Keys and values of a row's inactive tokens in a net's blocks, as of a step that computed all
    tokens (`Capture`), for the steps that compute the active ones (`InactiveTokens`).

    Args:
        active: tokens, the first ones of the image.
        cis: [m, head_dim / 2] of the others.
    """

    def __init__(self, active: int, cis: Tensor) -> None:
        self.active, self.cis = active, cis
        self.age = 0
        """Steps since."""
        self._blocks: dict[int, Source] = {}

    def hidden(self, block: int, hidden: Tensor) -> None:
        """Nobody reads it."""

    def keys_values(self, block: int, keys: Tensor, values: Tensor) -> None:
        both = (Coded("model", x[self.active :].flatten(1).clone()) for x in (keys, values))
        self._blocks[block] = Source(tuple(both))

    def tokens(self) -> Tensor:
        raise AssertionError("no block of a net brings the inactive tokens in")

    @property
    def entry(self) -> object:
        return self

    def source(self, block: int, part: str) -> Source:
        assert part == "kv"
        return self._blocks[block]


@dataclass(slots=True, eq=False)
class RowControl:
    """The residuals of one row (`batch.residuals.Residuals`), computed before each of its steps."""

    inputs: tuple[NetInput, ...]
    refresh: int = 1
    """Steps from one that computes all tokens to the next."""
    added: dict[int, Tensor] = field(default_factory=dict)
    """By the base's block."""
    kept: dict[int, KeptKV] = field(default_factory=dict)
    """By the number of the input, of a cached row."""

    def after(self, number: int) -> Tensor | None:
        return self.added.get(number)


class Controlled(NamedTuple):
    """A row with control that is about to take a step."""

    control: RowControl
    row: RowInput
    """What the base is given of it."""
    timestep: float
    step: int
    steps: int


def run_nets(rows: Sequence[Controlled]) -> None:
    """Have what ControlNets add to the next step of these rows in their `RowControl`. Each net runs
    once, over all rows that have it.
    """
    asked: dict[int, list[tuple[Controlled, NetInput, RowInput, float]]] = {}
    for each in rows:
        each.control.added.clear()
        for number, own in enumerate(each.control.inputs):
            scale = own.control.scale_at(each.step, each.steps)
            if scale:
                given = own.of(_sparse(each, number))
                asked.setdefault(id(own.net), []).append((each, own, given, scale))
    for same in asked.values():
        net, device = same[0][1].net, same[0][0].row.tokens.device
        timesteps = torch.tensor([each.timestep for each, _, _, _ in same], device=device)
        found = net.samples([given for _, _, given, _ in same], timesteps)
        for places, by_row in zip(net.places, found, strict=True):
            for (each, _, _, scale), sample in zip(same, by_row, strict=True):
                scaled = sample[: len(each.row.tokens)] * scale
                for place in places:
                    before = each.control.added.get(place)
                    each.control.added[place] = scaled if before is None else before + scaled


def _sparse(row: Controlled, number: int) -> RowInput:
    """What an input's net is to compute of the row: of a cached one the active tokens, or, where
    those kept of the others are old, all of them, which are kept.
    """
    own, kept = row.row, row.control.kept
    if own.rest is None:  # the base computes all tokens itself
        kept.pop(number, None)
        return own
    held = kept.get(number)
    if held is not None and held.age + 1 < row.control.refresh:
        held.age += 1
        return replace(own, rest=held)
    kept[number] = fresh = KeptKV(len(own.tokens), own.rest.cis)
    tokens, cis = torch.cat((own.tokens, own.rest.tokens())), torch.cat((own.cis, own.rest.cis))
    return replace(own, tokens=tokens, cis=cis, rest=None, capture=fresh)
