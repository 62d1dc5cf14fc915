"""FluxControlNetModels over the packed rows that have control, beside FLUX.

A net is a shorter FLUX whose blocks' outputs, each through a product of its own, are added to the
hidden states of the base. It runs on the same packed blocks as the base does (`batch.forward`).
Between a row's anchors the inactive tokens and the text enter as keys and values, as in the base:
those that the net's own anchors have left (`batch.own_anchors`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from maskserve_engine.base.job import ControlInput
from maskserve_engine.batch.forward import State
from maskserve_engine.batch.own_anchors import OwnAnchors, foretold
from maskserve_engine.batch.packing import Packed, RowInput
from maskserve_engine.batch.transfer import to_device
from maskserve_engine.control_link.opening import Opening
from maskserve_engine.families.control import Asked, Controlled, Nets, RowControl, Said
from maskserve_engine.families.mmdit.blocks import AHEAD, FluxStep, Vectors, embed, vectors
from maskserve_engine.families.mmdit.weights import FluxWeights
from maskserve_engine.layers.linear import Linear, linear
from maskserve_engine.spec.mmdit import CONTROL


@dataclass(frozen=True, slots=True, eq=False)
class FluxControlNet:
    """A FluxControlNetModel's weights, found once, for a base of so many blocks."""

    weights: FluxWeights
    hint_embedder: Linear
    """[N, width] of the control picture's tokens [N, in_channels]."""
    outs: tuple[Linear, ...]
    """From the width, behind each block."""
    modes: Tensor | None
    """[modes, width] of a union net: a text token that says what kind of picture it is given."""
    channels: int
    """Of the latents' tokens that it takes."""
    base: tuple[int, int]
    """The base's double and single blocks."""
    places: tuple[tuple[int, ...], ...]
    """Per block of the net: the base's blocks behind which its output is added."""
    shallower: dict[tuple[int, int], FluxControlNet] = field(default_factory=dict)
    """The net with its first so many blocks' outputs alone, by that (`as_shallow_as`)."""

    @classmethod
    def of(cls, model: Any, base: Any, channels: int) -> FluxControlNet:
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
        net_config, of_base = model.config, {**base.config, "in_channels": channels}
        for name in ("in_channels", *CONTROL.equal):
            if list(np.ravel(net_config[name])) != list(np.ravel(of_base[name])):
                raise ValueError(
                    f"its {name} is {net_config[name]}, that of the model {of_base[name]}"
                )
        of_blocks = len(base.transformer_blocks), len(base.single_transformer_blocks)
        weights = FluxWeights.of(model)
        with torch.no_grad():
            outs = [*model.controlnet_blocks, *model.controlnet_single_blocks]
            return cls(
                weights,
                linear(model.controlnet_x_embedder),
                tuple([linear(out_layer) for out_layer in outs]),
                model.controlnet_mode_embedder.weight if model.union else None,
                channels,
                of_blocks,
                _places(
                    weights, of_blocks, (len(weights.double_blocks), len(weights.single_blocks))
                ),
            )

    @property
    def depth(self) -> tuple[int, int]:
        """Its double and single blocks."""
        return len(self.weights.double_blocks), len(self.weights.single_blocks)

    def as_shallow_as(self, depth: tuple[int, int]) -> FluxControlNet:
        """The same net, of which the first so many double and single blocks' outputs are added,
        spread over the base as if it had no more.
        """
        if depth == self.depth:
            return self
        if depth not in self.shallower:
            places = _places(self.weights, self.base, depth)
            self.shallower[depth] = replace(self, places=places, shallower={})
        return self.shallower[depth]

    def samples(self, packed: Packed, at: Vectors) -> Iterator[list[Tensor]]:
        """What the net says behind each of its blocks.

        Args:
            packed: any rows: `text` after the net's own context_embedder, `tokens`
                [n, channels + width], the latents beside what `hint_embedder` made of the picture.
            at: of the step.

        Yields:
            behind each block, per row [n, width] of the tokens that were computed.
        """
        weights, stream = self.weights, packed.layout.narrow.image_stream
        latents, hints = packed.tokens.split((self.channels, weights.width), dim=1)
        image = weights.x_embedder(latents.contiguous(), stream.spans) + hints
        kinds = ("kv",) * len(self.outs)
        state = State(FluxStep(weights, at), packed, kinds, (packed.text, image))
        for number, out in enumerate(self.outs):
            state.run(number, number + 1)
            yield list(out(state.computed_image(), stream.spans).split(stream.lengths))


def _places(
    weights: FluxWeights, base: tuple[int, int], depth: tuple[int, int]
) -> tuple[tuple[int, ...], ...]:
    """`FluxControlNet.places` of a net that is taken to be so deep."""
    blocks, block_places = (weights.double_blocks, weights.single_blocks), list[tuple[int, ...]]()
    for stack_blocks, first, count, of in zip(blocks, (0, base[0]), depth, base, strict=True):
        placed = spread(count, first, of)
        block_places += [*placed, *[()] * (len(stack_blocks) - len(placed))]
    return tuple(block_places)


def common_depth(depths: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """How deep diffusers takes each net of an edit with several to be: as the shallowest one, as it
    adds the nets' outputs up before it spreads them. Of blocks that the first net has none of, none
    has an output.
    """
    doubles, singles = zip(*depths, strict=True)
    return _shallowest(doubles), _shallowest(singles)


def _shallowest(counts: Sequence[int]) -> int:
    return min(filter(None, counts)) if counts[0] else 0


def spread(count: int, first: int, of: int) -> list[tuple[int, ...]]:
    """The base's blocks that each of `count` outputs goes to, as diffusers has it: every so many in
    a row, of the `of` that begin with `first`.
    """
    if not count:
        return []
    stride = ceil(of / count)
    return [
        tuple(range(first + i * stride, first + min((i + 1) * stride, of))) for i in range(count)
    ]


class FluxNetInput(NamedTuple):
    """What a net is given of one edit, beside what its base is given."""

    control: ControlInput
    net: FluxControlNet
    hint: Tensor
    """[N, width] of the picture's tokens, in the order of the row's own: active ones first."""
    text: Tensor
    """[T, width] after the net's context_embedder; of a union net behind its mode's token."""
    guidance: float | None

    @classmethod
    def made(
        cls,
        control: ControlInput,
        net: FluxControlNet,
        picture: Tensor,
        embeds: Tensor,
        guidance_scale: float | None,
    ) -> FluxNetInput:
        """What a net makes of an edit, once.

        Args:
            control: the picture's part in it.
            net: the picture's.
            picture: [N, 4C] its latents, in the order of the row's tokens.
            embeds: [T, in] the prompt's states.
            guidance_scale: of the edit.
        """
        text = net.weights.context_embedder(embeds, ((0, len(embeds)),))
        if net.modes is not None:
            assert control.mode is not None, (
                "a union net's control comes with its mode (validation)"
            )
            text = torch.cat((net.modes[control.mode][None], text))
        guided = net.weights.time_text_embed.guidance_embedder is not None
        hint = net.hint_embedder(picture, ((0, len(picture)),))
        return cls(control, net, hint, text, guidance_scale if guided else None)

    def of(self, row: RowInput) -> RowInput:
        """Of a row, for these of its tokens."""
        hint = self.hint[: len(row.tokens)]
        tokens = torch.cat((row.tokens[:, : self.net.channels], hint), dim=1)
        cis = row.cis
        if len(self.text) > len(row.text):  # the mode stands where all text does
            cis = torch.cat((cis[:1], cis))
        return replace(
            row, tokens=tokens, text=self.text, guidance=self.guidance, cis=cis, residuals=None
        )


class FluxNets(Nets[FluxNetInput]):
    """Nets over rows of which the base is given a `RowInput`."""

    in_parts, stacked = True, False

    def __init__(self) -> None:
        self._vectors: dict[tuple[int, ...], tuple[int, tuple[Vectors, ...]]] = {}
        """By net and the rows' inputs: the first row's step when they were computed, and those of
        it and of the steps behind it."""

    def say(self, net: FluxControlNet, same: Sequence[Asked[FluxNetInput]]) -> Iterator[Said]:
        inputs = [_given(request) for request in same]
        packed = Packed(inputs)
        samples = net.samples(packed, self._vectors_of(net, same, packed))
        for places, by_row in zip(net.places, samples, strict=True):
            active = zip(same, by_row, strict=True)
            yield places, [[sample[: request.row.given.computed]] for request, sample in active]
        for request, row_input in zip(same, inputs, strict=True):
            if isinstance(row_input.capture, OwnAnchors):
                row_input.capture.passed(request.row.timesteps[0])
                request.keep([row_input.capture])

    def _vectors_of(
        self, net: FluxControlNet, same: Sequence[Asked[FluxNetInput]], packed: Packed
    ) -> Vectors:
        """Those of the step, computed for up to AHEAD steps at once: of a row by itself for the
        same ones wherever between them its batch began, as products of other shapes round
        differently.
        """
        first = same[0].row
        key, step = (id(net), *(id(request.own) for request in same)), first.step
        begin, step_vectors = self._vectors.get(key, (step, ()))
        if not begin <= step < begin + len(step_vectors):
            before = first.before if all(request.row is first for request in same) else ()
            ahead = min(AHEAD, *(len(before) + len(request.row.timesteps) for request in same))
            by_row = [[*before, *request.row.timesteps][:ahead] for request in same]
            [timesteps] = to_device([torch.tensor(by_row).T.contiguous()], packed.tokens.device)
            emb = embed(net.weights, timesteps, packed.pooled, packed.guidance)
            begin, step_vectors = step - len(before), vectors(net.weights, emb)
            self._vectors[key] = begin, step_vectors
        return step_vectors[step - begin]


class NetTokens(NamedTuple):
    """What nets are given of a row in a step."""

    row: RowInput
    """All its tokens: those first that the base computes."""
    computed: int
    """By the base, of the image tokens."""
    active: int
    """Of them those that steps between anchors compute; 0: there are none such."""


def _given(asked: Asked[FluxNetInput]) -> RowInput:
    """What the net is to compute: between anchors the active tokens, else all of them, with an
    `OwnAnchors` that sees the others where they are to be kept.
    """
    row, (net_tokens, computed, active) = asked.row, asked.row.given
    if asked.kept is not None:
        cis, cached_cis = net_tokens.cis.tensor_split((len(net_tokens.text) + computed,))
        computed_input = asked.own.of(
            replace(net_tokens, tokens=net_tokens.tokens[:computed], cis=cis)
        )
        [previous_cache] = asked.kept
        return foretold(computed_input, cached_cis, previous_cache, lambda: row.timesteps[0])
    row_input = asked.own.of(net_tokens)
    if not asked.keeps:
        return row_input
    last = asked.last
    [step_cache] = [OwnAnchors(row.control.own)] if last is None else last.tokens
    at, reads = row.timesteps[0], row.foreseen is not None
    step_cache.anchor(row.step, at, active, len(row_input.tokens), reads=reads)
    return replace(row_input, capture=step_cache)


def controlled(
    control: RowControl[FluxNetInput],
    given: NetTokens,
    times: Sequence[float],
    step: int,
    foreseen: int | None = None,
) -> Controlled[FluxNetInput]:
    """A row that is about to take a step; `times` are the timesteps of all its steps."""
    sparse, idle = given.computed < len(given.row.tokens), given.active > 0
    now, before = times[step : step + AHEAD], times[step - step % AHEAD : step]
    if foreseen is not None:
        now, before = times[foreseen : foreseen + 1], ()
    return Controlled(control, given, sparse, idle, now, step, len(times), foreseen, before)


@dataclass(frozen=True, slots=True, eq=False)
class FluxNetRow:
    """A row whose base is elsewhere, as a ControlNet service holds it."""

    control: RowControl[FluxNetInput]
    base: RowInput
    """Of the base's input what nets ask for; no tokens, and text only to be counted."""
    cis: Tensor
    """[T + N, head_dim / 2] of text and of all tokens, in the row's order."""
    timesteps: Sequence[float]
    active: int
    """As of `NetTokens`."""

    @classmethod
    def of(cls, opening: Opening, nets: Mapping[str, FluxControlNet]) -> FluxNetRow:
        """From `FluxAdapter.opening`, as `Opening.on` the nets' device."""
        facts, arrays = opening.facts, opening.arrays
        row_nets = [nets[opened.net] for opened in facts.controls]
        if facts.shallowest:
            depth = common_depth([net.depth for net in row_nets])
            row_nets = [net.as_shallow_as(depth) for net in row_nets]
        inputs = [
            FluxNetInput.made(
                opened.input, row_nets[i], arrays[f"picture.{i}"], arrays["embeds"], facts.guidance
            )
            for i, opened in enumerate(facts.controls)
        ]
        none = arrays["embeds"].new_empty(0, 0)
        text = arrays["embeds"].new_empty(facts.text, 0)
        cis = torch.view_as_complex(arrays["cis"])
        base = RowInput(none, text, arrays["pooled"], None, cis)
        control = RowControl(tuple(inputs), facts.own)
        return cls(control, base, cis, facts.timesteps, facts.active)

    def at(
        self, step: int, sample: Tensor, computed: int, foreseen: int | None
    ) -> Controlled[FluxNetInput]:
        """See `NetRow`; `sample` is [N, channels], the tokens that the base computes first."""
        row = replace(self.base, tokens=sample, cis=self.cis)
        net_tokens = NetTokens(row, computed, self.active)
        control = self.control if foreseen is None else self.control.ahead
        return controlled(control, net_tokens, self.timesteps, step, foreseen)
