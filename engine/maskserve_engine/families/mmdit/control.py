"""ControlNets of flow-matching transformers beside the base, over the packed rows with control.

A net is a shorter model of its base's kind. Here are those of FLUX.1, Qwen-Image and Stable
Diffusion 3.5, in `z_image.control` Z-Image's. Its block outputs, each through a linear layer, are
added to the base's hidden states. It runs on the same packed blocks as the base (`batch.forward`).
Between refresh steps the cached tokens and the text enter as keys and values from the net's own
step cache (`batch.step_cache`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from math import ceil
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from maskserve_engine.base.job import ControlInput
from maskserve_engine.batch.forward import State
from maskserve_engine.batch.packing import Packed, RowInput
from maskserve_engine.batch.step_cache import StepCache, input_between_refreshes
from maskserve_engine.batch.transfer import to_device
from maskserve_engine.control_link.opening import Opening
from maskserve_engine.families.control import (
    Controlled,
    NetOutput,
    NetRequest,
    Nets,
    PassResiduals,
    RowControl,
)
from maskserve_engine.families.mmdit.blocks import (
    LEAST_PRECOMPUTED_STEPS,
    FluxStep,
    Vectors,
    embed,
    vectors,
)
from maskserve_engine.families.mmdit.preparation import PATCH
from maskserve_engine.families.mmdit.weights import FluxWeights
from maskserve_engine.layers.attention import Span
from maskserve_engine.layers.linear import Linear, linear
from maskserve_engine.spec.control_nets import further_input
from maskserve_engine.spec.model_spec import ControlNetSpec

_STACKS = "transformer_blocks", "single_transformer_blocks"

Spread = Callable[[int, int, int], list[tuple[int, ...]]]
"""Returns the base's blocks that receive each of so many outputs, from the number of outputs, the
first block and the number of blocks that may receive them."""


class HintEmbedder(Protocol):
    def __call__(self, picture: Tensor, rows: Sequence[Span], /) -> Tensor:
        """Return [N, width] of a control picture's tokens [N, in]; the same at every step."""
        ...


def spread_in_runs(count: int, first: int, of: int) -> list[tuple[int, ...]]:
    """Return the base's blocks that receive each of `count` outputs, as in diffusers' FLUX.1 and
    Qwen-Image: runs of equal length over the `of` blocks from `first` on.
    """
    if not count:
        return []
    stride = ceil(of / count)
    return [
        tuple(range(first + i * stride, first + min((i + 1) * stride, of))) for i in range(count)
    ]


class FlowNet(Protocol):
    """A net, as its rows run it."""

    @property
    def channels(self) -> int:
        """Channels of a token of latents."""
        ...

    @property
    def blocks(self) -> int: ...

    @property
    def places(self) -> Sequence[Sequence[int]]:
        """For each output, the base's blocks after which it is added."""
        ...

    @property
    def guided(self) -> bool:
        """Whether it takes the guidance scale."""
        ...

    @property
    def hint_embedder(self) -> HintEmbedder: ...

    def prompt(self, embeds: Tensor, pooled: Tensor | None, mode: int | None) -> NetPrompt:
        """Return a prompt as the net takes it, from its states [T, in] and its pooled vector."""
        ...

    def vectors(self, timesteps: Tensor, packed: Packed) -> Sequence[Any]:
        """Return the vectors of each step, from timesteps [S, R]."""
        ...

    def samples(self, packed: Packed, at: Any, scales: Sequence[float]) -> Iterator[list[Tensor]]:
        """Yield each output, for each row, [n, width] of the computed tokens or, where the base
        adds it to the text as well, [T + n, width].

        Args:
            packed: rows with `text` of the net's prompts, and `tokens` [n, channels + width]:
                latents beside the embedded picture.
            at: vectors of the step.
            scales: scales of the rows' controls, for nets that need them inside.
        """
        ...


@dataclass(frozen=True, slots=True, eq=False)
class FluxControlNet:
    """The weights of diffusers' FluxControlNetModel or another net with such blocks, for a base
    with so many blocks.
    """

    weights: FluxWeights
    hint_embedder: HintEmbedder
    outs: tuple[Linear, ...]
    """The output layer after each block."""
    modes: Tensor | None
    """[modes, width] of a union net: a text token that names the kind of control picture."""
    text_norm: Any
    """Module through which the prompt's states go first; None: there is none."""
    channels: int
    base: tuple[int, int]
    """Numbers of the base's double and single blocks."""
    places: tuple[tuple[int, ...], ...]
    """For each block of the net, the base's blocks after which its output is added."""
    spread: Spread = spread_in_runs
    """Finds the places."""
    at_step: Callable[[FluxWeights, Vectors], FluxStep] = FluxStep
    """Makes its blocks at one step."""
    pooled: bool = True
    """Whether it sees the pooled prompt; otherwise zeros."""
    shallower: dict[tuple[int, int], FluxControlNet] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        model: Any,
        weights: FluxWeights,
        base: Any,
        channels: int,
        control_spec: ControlNetSpec,
        hint_embedder: HintEmbedder | None = None,
        spread: Spread = spread_in_runs,
        **more: Any,
    ) -> FluxControlNet:
        """Build a net for its base.

        Args:
            model: diffusers' net.
            weights: its weights.
            base: diffusers' model that it stands beside.
            channels: channels of a token of latents.
            control_spec: nets that the base takes.
            hint_embedder: embeds the control picture; None: the net's `controlnet_x_embedder`.
            spread: finds the places of its outputs.
            more: further fields.

        Raises:
            ValueError: the net does not fit the base.
        """
        numbers = channels if control_spec.patched else channels // PATCH**2
        check_net(model.config, {**base.config, "in_channels": numbers}, control_spec)
        doubles, singles = (len(getattr(base, stack, ())) for stack in _STACKS)
        depth = len(weights.double_blocks), len(weights.single_blocks)
        with torch.no_grad():
            outs = [*model.controlnet_blocks, *getattr(model, "controlnet_single_blocks", ())]
            return cls(
                weights,
                hint_embedder or linear(model.controlnet_x_embedder),
                tuple([linear(out_layer) for out_layer in outs]),
                model.controlnet_mode_embedder.weight if getattr(model, "union", False) else None,
                getattr(model, "txt_norm", None),
                channels,
                (doubles, singles),
                _places(spread, (doubles, singles), depth, depth),
                spread,
                **more,
            )

    @property
    def depth(self) -> tuple[int, int]:
        """Numbers of its double and single blocks."""
        return len(self.weights.double_blocks), len(self.weights.single_blocks)

    def as_shallow_as(self, depth: tuple[int, int]) -> FluxControlNet:
        """Return the net with only the outputs of its first `depth` double and single blocks,
        spread over the base as if it had no more.
        """
        if depth == self.depth:
            return self
        if depth not in self.shallower:
            places = _places(self.spread, self.base, depth, self.depth)
            self.shallower[depth] = replace(self, places=places, shallower={})
        return self.shallower[depth]

    @property
    def blocks(self) -> int:
        return len(self.outs)

    @property
    def guided(self) -> bool:
        return self.weights.time_text_embed.guidance_embedder is not None

    def prompt(self, embeds: Tensor, pooled: Tensor | None, mode: int | None) -> NetPrompt:
        embedder = self.weights.context_embedder
        if pooled is not None and not self.pooled:
            pooled = torch.zeros_like(pooled)
        if embedder is None:
            return NetPrompt(embeds.new_empty(0, self.weights.width), pooled)
        states = embeds if self.text_norm is None else self.text_norm(embeds)
        text = embedder(states, ((0, len(states)),))
        if self.modes is not None:
            assert mode is not None, "a union net's control comes with its mode (validation)"
            text = torch.cat((self.modes[mode][None], text))
        return NetPrompt(text, pooled)

    def vectors(self, timesteps: Tensor, packed: Packed) -> tuple[Vectors, ...]:
        emb = embed(self.weights, timesteps, packed.pooled, packed.guidance)
        return vectors(self.weights, emb)

    def samples(
        self, packed: Packed, at: Vectors, scales: Sequence[float]
    ) -> Iterator[list[Tensor]]:
        weights, stream = self.weights, packed.layout.narrow.image_stream
        latents, hints = packed.tokens.split((self.channels, weights.width), dim=1)
        image = weights.x_embedder(latents.contiguous(), stream.spans) + hints
        kinds = ("kv",) * len(self.outs)
        state = State(self.at_step(weights, at), packed, kinds, (packed.text, image))
        for number, out in enumerate(self.outs):
            state.run(number, number + 1)
            yield list(out(state.computed_image(), stream.spans).split(stream.lengths))


def check_net(
    net: Mapping[str, Any], base: Mapping[str, Any], control_spec: ControlNetSpec
) -> None:
    """Raise ValueError if a net's configuration does not fit that of its base."""
    if problem := further_input(net, control_spec):
        raise ValueError(f"it {problem}")
    for name in ("in_channels", *control_spec.equal):
        if net.get(name) is None:
            continue
        if list(np.ravel(net[name])) != list(np.ravel(base[name])):
            raise ValueError(f"its {name} is {net[name]}, that of the model {base[name]}")


def _places(
    spread: Spread, base: tuple[int, int], depth: tuple[int, int], whole: tuple[int, int]
) -> tuple[tuple[int, ...], ...]:
    """Return the places of the first `depth` double and single blocks of `whole`."""
    block_places = list[tuple[int, ...]]()
    for first, count, of, blocks in zip((0, base[0]), depth, base, whole, strict=True):
        placed = spread(count, first, of)
        block_places += [*placed, *[()] * (blocks - len(placed))]
    return tuple(block_places)


def common_depth(depths: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """Return the depth that diffusers uses for each net of an edit with several: the shallowest,
    because it sums the nets' outputs before it spreads them. If the first net has no blocks of a
    kind, none has outputs there.
    """
    doubles, singles = zip(*depths, strict=True)
    return _shallowest(doubles), _shallowest(singles)


def _equally_deep(nets: Sequence[FlowNet]) -> list[FlowNet]:
    flux_nets = [net for net in nets if isinstance(net, FluxControlNet)]
    assert len(flux_nets) == len(nets), "the setting is FLUX.1's"
    depth = common_depth([net.depth for net in flux_nets])
    return [net.as_shallow_as(depth) for net in flux_nets]


def _shallowest(counts: Sequence[int]) -> int:
    return min(filter(None, counts)) if counts[0] else 0


class NetPrompt(NamedTuple):
    """A prompt as a net takes it."""

    text: Tensor
    """[T, width] from the net's context_embedder; in a union net the mode's token comes first. Nets
    that do not read it have none."""
    pooled: Tensor | None
    cis: Tensor | None = None
    """[T, head_dim / 2] rotary factors of the text; None: those of the base's."""


class FluxNetInput(NamedTuple):
    """One net's inputs for an edit, beside those of its base."""

    control: ControlInput
    net: FlowNet
    hint: Tensor
    """[N, width] tokens of the embedded picture, in the row's order: computed tokens first."""
    prompts: tuple[NetPrompt, ...]
    """The prompt and, if the net runs with it, the negative prompt."""
    guidance: float | None

    @classmethod
    def encode(
        cls,
        control: ControlInput,
        net: FlowNet,
        picture: Tensor,
        prompts: Sequence[tuple[Tensor, Tensor | None, Tensor | None]],
        guidance_scale: float | None,
    ) -> FluxNetInput:
        """Compute a net's constant inputs for an edit, from prompts: states, pooled vector, and
        rotary factors if they are not the base's.
        """
        hint = net.hint_embedder(picture, ((0, len(picture)),))
        net_prompts = [
            net.prompt(embeds, pooled, control.mode)._replace(cis=cis)
            for embeds, pooled, cis in prompts
        ]
        return cls(control, net, hint, tuple(net_prompts), guidance_scale if net.guided else None)

    def passes(self, row: RowInput) -> list[RowInput]:
        """Return the net's inputs for these tokens of a row, one for each prompt."""
        hint = self.hint[: len(row.tokens)]
        tokens = torch.cat((row.tokens[:, : self.net.channels], hint), dim=1)
        return [
            replace(
                row,
                tokens=tokens,
                text=prompt.text,
                pooled=prompt.pooled,
                guidance=self.guidance,
                cis=_with_text(row, prompt),
                picture=(),
            )
            for prompt in self.prompts
        ]


def _with_text(row: RowInput, prompt: NetPrompt) -> Tensor:
    """Return the rotary factors of a prompt's text and the row's image tokens."""
    cis, text = row.cis, len(prompt.text)
    if prompt.cis is not None or not text:
        image = cis[len(row.text) :]
        return image if prompt.cis is None else torch.cat((prompt.cis, image))
    if text > len(row.text):  # the mode stands where all text does
        return torch.cat((cis[:1], cis))
    return cis


class FluxNets(Nets[FluxNetInput]):
    """Nets over rows whose base takes a `RowInput`."""

    in_parts = True

    def __init__(self) -> None:
        self._vectors: dict[tuple[object, ...], tuple[int, Sequence[Any]]] = {}
        """By net, inputs and lookaheads: the first row's step, and the vectors of that step and the
        next ones."""

    def outputs(
        self, net: FlowNet, same: Sequence[NetRequest[FluxNetInput]]
    ) -> Iterator[NetOutput]:
        inputs = [_net_inputs(request) for request in same]
        packed = Packed(list(chain.from_iterable(inputs)))
        scales = [
            request.scale for request, passes in zip(same, inputs, strict=True) for _ in passes
        ]
        samples = net.samples(packed, self._vectors_of(net, same, packed), scales)
        for places, by_pass in zip(net.places, samples, strict=True):
            parts = iter(by_pass)
            yield (
                places,
                [
                    [_computed(next(parts), request, row) for row in passes]
                    for request, passes in zip(same, inputs, strict=True)
                ],
            )
        for request, passes in zip(same, inputs, strict=True):
            captures = [row.capture for row in passes if isinstance(row.capture, StepCache)]
            for step_cache in captures:
                step_cache.complete_refresh(request.row.timesteps[0])
            if captures:
                request.keep(captures)

    def _vectors_of(
        self, net: FlowNet, same: Sequence[NetRequest[FluxNetInput]], packed: Packed
    ) -> Any:
        """Return the step's vectors, computed for several steps at once. A lone row always gets the
        same groups of steps, because products of other shapes round differently.
        """
        first = same[0].row
        passes = [(id(request.net_input), request.row.lookahead) for request in same]
        key, step = (id(net), *passes), first.step
        begin, step_vectors = self._vectors.get(key, (step, ()))
        if not begin <= step < begin + len(step_vectors):
            before = (
                first.before if all(request.row.before == first.before for request in same) else ()
            )
            ahead = min(
                LEAST_PRECOMPUTED_STEPS,
                *(len(before) + len(request.row.timesteps) for request in same),
            )
            by_pass = [
                [*before, *request.row.timesteps][:ahead]
                for request in same
                for _ in request.net_input.prompts
            ]
            [timesteps] = to_device([torch.tensor(by_pass).T.contiguous()], packed.tokens.device)
            begin, step_vectors = step - len(before), net.vectors(timesteps, packed)
            self._vectors[key] = begin, step_vectors
        return step_vectors[step - begin]


def _computed(sample: Tensor, request: NetRequest[FluxNetInput], row: RowInput) -> Tensor:
    """Return a sample of a net's `row` without the tokens that the base does not compute."""
    return sample[: len(sample) - len(row.tokens) + request.row.base_input.computed]


class NetTokens(NamedTuple):
    """The base's tokens in a step, from which a net's input is made."""

    row: RowInput
    """All tokens of the row, those that the base computes first."""
    computed: int
    """Number of them that the base computes; 0: a lookahead only fills step caches."""
    active: int
    """Number of them that are computed between refresh steps; 0: the row has none."""


def _net_inputs(request: NetRequest[FluxNetInput]) -> list[RowInput]:
    """Return the net's passes: of the computed tokens between refresh steps, else of all, with a
    `StepCache` as capture if the others are to be kept.
    """
    row, (net_tokens, computed, active) = request.row, request.row.base_input
    if request.cached is not None:
        cis, cached_cis = net_tokens.cis.tensor_split((len(net_tokens.text) + computed,))
        passes = request.net_input.passes(
            replace(net_tokens, tokens=net_tokens.tokens[:computed], cis=cis)
        )
        for previous_cache in request.cached:
            previous_cache.begin_loads(row.step)
        return [
            input_between_refreshes(row_input, cached_cis, previous, lambda: row.timesteps[0])
            for row_input, previous in zip(passes, request.cached, strict=True)
        ]
    passes = request.net_input.passes(net_tokens)
    if not request.keeps:
        return passes
    last, blocks = request.last, request.net_input.net.blocks
    step_caches: Sequence[StepCache]
    if last is None:
        schedule = row.control.schedule
        step_caches = [row.control.place(StepCache(schedule), blocks) for _ in passes]
    else:
        step_caches = last.tokens
    at, reads = row.timesteps[0], row.lookahead is not None
    for step_cache in step_caches:
        step_cache.begin_refresh(row.step, at, active, len(net_tokens.tokens), reads=reads)
    return [
        replace(row_input, capture=step_cache)
        for row_input, step_cache in zip(passes, step_caches, strict=True)
    ]


def controlled(
    control: RowControl[FluxNetInput],
    tokens: NetTokens,
    times: Sequence[float],
    step: int,
    lookahead: int | None = None,
) -> Controlled[FluxNetInput]:
    """Return a row before its step; `times` are the timesteps of all its steps."""
    sparse, idle = tokens.computed < len(tokens.row.tokens), tokens.active > 0
    now, before = (
        times[step : step + LEAST_PRECOMPUTED_STEPS],
        times[step - step % LEAST_PRECOMPUTED_STEPS : step],
    )
    if lookahead is not None:
        now, before = times[lookahead : lookahead + 1], ()
    return Controlled(
        control,
        tokens,
        sparse,
        idle,
        now,
        step,
        len(times),
        lookahead,
        adds=tokens.computed > 0,
        before=before,
    )


@dataclass(frozen=True, slots=True, eq=False)
class FluxNetRow:
    """A row of a ControlNet service, whose base runs in another process."""

    control: RowControl[FluxNetInput]
    base: RowInput
    """The base's input without tokens; text only to be counted."""
    cis: Tensor
    """[T + N, head_dim / 2] of text and all tokens, in the row's order."""
    timesteps: Sequence[float]
    active: int

    @classmethod
    def of(cls, opening: Opening, nets: Mapping[str, FlowNet]) -> FluxNetRow:
        """Build from `ControlledAdapter.opening`, moved to the nets' device (`Opening.on`)."""
        message, arrays = opening.spec, opening.arrays
        row_nets = [nets[opened.net] for opened in message.controls]
        if message.shallowest:
            row_nets = _equally_deep(row_nets)
        text_cis = [name for name in arrays if name.startswith("text_cis.")]
        arrays = {**arrays, **{name: torch.view_as_complex(arrays[name]) for name in text_cis}}
        prompts = [
            (arrays[f"embeds.{i}"], arrays.get(f"pooled.{i}"), arrays.get(f"text_cis.{i}"))
            for i in range(sum(name.startswith("embeds.") for name in arrays))
        ]
        inputs = [
            FluxNetInput.encode(
                opened.input, row_nets[i], arrays[f"picture.{i}"], prompts, message.guidance
            )
            for i, opened in enumerate(message.controls)
        ]
        none, text = (prompts[0][0].new_empty(count, 0) for count in (0, message.text))
        cis = torch.view_as_complex(arrays["cis"])
        base = RowInput(none, text, None, None, cis, pads=message.pads)
        passes = tuple([PassResiduals() for _ in prompts])
        control = RowControl(tuple(inputs), message.schedule, passes=passes)
        return cls(control, base, cis, message.timesteps, message.active)

    def at(
        self, step: int, sample: Tensor, computed: int, lookahead: int | None
    ) -> Controlled[FluxNetInput]:
        """See `NetRow`; `sample` is [N, channels], tokens that the base computes first."""
        row = replace(self.base, tokens=sample, cis=self.cis)
        net_tokens = NetTokens(row, computed, self.active)
        control = self.control if lookahead is None else self.control.for_lookahead
        return controlled(control, net_tokens, self.timesteps, step, lookahead)
