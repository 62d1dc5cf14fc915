"""ControlNetModels beside a UNet, over the passes of the rows that have control.

A net is a copy of the UNet's way down and of its middle; its feature maps, each through a
convolution of its own, are added to those of the base. It runs by the same walk (`forward`). Beside
a cached row its stacks compute the active tokens, as those of the base do; its convolutions run on
the whole picture. Kept of the others are their keys and values, and what a stack hands on of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from maskserve_engine.base.job import ControlInput
from maskserve_engine.batch.own_anchors import OwnAnchors, OwnPlan
from maskserve_engine.batch.transfer import to_device
from maskserve_engine.control_link.opening import Opening
from maskserve_engine.control_link.served import ServedAhead, ServedRow
from maskserve_engine.families.control import (
    Asked,
    Controlled,
    Nets,
    PassResiduals,
    RowControl,
    Said,
)
from maskserve_engine.families.unet.forward import (
    PackedPasses,
    PassInput,
    added_embedding,
    maps_of_net,
    micro_conditioning,
)
from maskserve_engine.families.unet.spec import CONTROL, check_net, level_sizes
from maskserve_engine.families.unet.tile import Ids
from maskserve_engine.families.unet.weights import UnetWeights
from maskserve_engine.layers.scatter_kv import KvSource


@dataclass(frozen=True, slots=True, eq=False)
class UnetControlNet:
    """A ControlNetModel's weights, found once."""

    weights: UnetWeights
    outs: tuple[Any, ...]
    """The convolution that each feature map goes through, the middle's last."""
    levels: tuple[int, ...]
    """Of each block of its stacks."""

    @classmethod
    def of(cls, model: Any, base: Any, channels: int) -> UnetControlNet:
        """A net beside its base.

        Args:
            model: ControlNetModel in eval mode.
            base: UNet2DConditionModel that it is for.
            channels: of the latents.

        Raises:
            ValueError: it does not fit the base, or is not served; in one sentence.
        """
        net_config, of_base = model.config, {**base.config, "in_channels": channels}
        for name in ("in_channels", *CONTROL.equal):
            if net_config[name] != of_base[name]:
                raise ValueError(
                    f"its {name} is {net_config[name]}, that of the model {of_base[name]}"
                )
        check_net(net_config)
        weights = UnetWeights.of(model)
        middle = len(model.down_blocks) - 1
        stages = [*enumerate(weights.down_blocks), (middle, weights.mid_block)]
        blocks = [
            [level] * len(stack.transformer_blocks) for level, stage in stages for stack in stage
        ]
        outs = (*model.controlnet_down_blocks, model.controlnet_mid_block)
        return cls(weights, outs, tuple(chain.from_iterable(blocks)))

    def read(self, picture: Tensor) -> Tensor:
        """[C, h, w] of a control picture [1, 3, H, W] from 0 to 1: the same at every step."""
        model = self.weights.model
        if model.config.controlnet_conditioning_channel_order == "bgr":
            picture = picture.flip(1)
        return model.controlnet_cond_embedding(picture)[0]

    def prompt(self, text: Tensor, micro: Sequence[Tensor]) -> PassInput:
        """A pass that computes all tokens.

        Args:
            text: [T, width] of its prompt.
            micro: of SDXL: [pooled width] and the sizes [6]; else nothing.
        """
        model = self.weights.model
        return PassInput(
            text, added_embedding(model, micro_conditioning(model, *micro)) if micro else None
        )


class UnetNetInput(NamedTuple):
    """What a net is given of one edit, beside what its base is given."""

    control: ControlInput
    net: UnetControlNet
    hint: Tensor
    """[C, h, w] what the net has read from the picture."""
    passes: tuple[PassInput, ...]
    """Of the prompt, then of the negative one; all tokens computed."""
    others: tuple[Tensor, ...] = ()
    """Level → [m] ids of a cached row's inactive tokens; none of a dense one."""

    @classmethod
    def made(
        cls,
        control: ControlInput,
        net: UnetControlNet,
        picture: Tensor,
        texts: Tensor,
        micro: Sequence[Tensor],
    ) -> UnetNetInput:
        """Of one control.

        Args:
            control: what it asks for.
            net: that it names.
            picture: [1, 3, H, W] from 0 to 1.
            texts: [passes, T, width] of the prompt, then of the negative one.
            micro: of SDXL: [passes, pooled width] and the sizes [passes, 6]; else nothing.
        """
        passes = [
            net.prompt(text, micro_of_pass)
            for text, *micro_of_pass in zip(texts, *micro, strict=True)
        ]
        return cls(control, net, net.read(picture), tuple(passes))


def others_of(active: Mapping[int, Ids], size: Sequence[int]) -> list[Tensor]:
    """Level → [m] ids of the tokens that are not among the active ones, in host memory.

    Args:
        active: level → their ids.
        size: (height, width) of the latents.
    """
    return [
        torch.from_numpy(np.setdiff1d(np.arange(height * width), active[level]))
        for level, (height, width) in enumerate(level_sizes(size[0], size[1], len(active)))
    ]


class NetAnchors(OwnAnchors):
    """A pass's inactive tokens in a net's stacks, as its anchors have left them
    (`stack.StackCapture`), for the steps that compute the active ones.

    Args:
        plan: of the row's nets.
        others: level → [m] ids of the inactive tokens.
        levels: of the net's blocks.
    """

    def __init__(self, plan: OwnPlan, others: Sequence[Tensor], levels: Sequence[int]) -> None:
        super().__init__(plan)
        self.text = False  # a UNet's is in attention of its own
        self._ids, self._levels = others, levels
        self.now = 0.0
        """Timestep of the step that reads them."""

    def end(self, block: int, output: Tensor) -> None:
        self._keep(block, "end", (output,))

    def map(self, number: int, x: Tensor, groups: int) -> None:
        """Convolutions run on the whole picture."""

    def _others(self, block: int, x: Tensor) -> Tensor:
        return x.index_select(0, self._ids[self._levels[block]])


class ServedPass(NamedTuple):
    """The residuals of one pass of a row whose nets a service runs."""

    served: ServedRow | ServedAhead
    number: int

    def after(self, number: int) -> Tensor | None:
        added = self.served.after(number)
        return None if added is None else added[self.number]


@dataclass(slots=True, eq=False)
class UnetServedControl:
    """As `RowControl`, of a row whose nets a service runs."""

    served: ServedRow
    passes: tuple[ServedPass, ...]

    @property
    def ahead(self) -> UnetServedControl:
        """As of `RowControl`."""
        passes = [ServedPass(self.served.ahead, served_pass.number) for served_pass in self.passes]
        return UnetServedControl(self.served, tuple(passes))


@dataclass(frozen=True, slots=True)
class _Rest:
    """`stack.InactivePassTokens` of one pass in one net, whatever is kept of it at the time."""

    control: RowControl[UnetNetInput]
    number: int
    """Of the input."""
    half: int
    """Of the pass."""

    def source(self, block: int, part: str, wanted: Tensor | None = None) -> KvSource:
        assert wanted is None, "a net's passes have no tile"
        step_cache: NetAnchors = self.control.kept[self.number].tokens[self.half]
        return step_cache.source(block, step_cache.now, part)


class UnetSample(NamedTuple):
    """What the base is given of a row."""

    sample: Tensor
    """[channels, h, w] of the latents."""
    active: Mapping[int, Ids] | None
    """Level → ids of the tokens that the base computes; None: all."""


def controlled(
    control: RowControl[UnetNetInput],
    given: UnetSample,
    timestep: float,
    step: int,
    steps: int,
    foreseen: int | None = None,
) -> Controlled[UnetNetInput]:
    """A row that is about to take a step."""
    has_cached = bool(control.inputs[0].others)
    sparse = given.active is not None
    return Controlled(control, given, sparse, has_cached, (timestep,), step, steps, foreseen)


class _Run(NamedTuple):
    """Passes that a net is run over, for as long as the same rows go on."""

    packed: PackedPasses
    hints: Tensor
    """[P, C, h, w]"""


class UnetNets(Nets[UnetNetInput]):
    """Nets over rows of one latent shape, of which the base is given a `UnetSample`."""

    in_parts, stacked = False, True

    def __init__(self) -> None:
        self._runs: dict[tuple[int, ...], _Run] = {}
        """By net, the rows' inputs, and which of them compute the active tokens alone."""

    def say(self, net: UnetControlNet, same: Sequence[Asked[UnetNetInput]]) -> Iterator[Said]:
        run = self._packed(net, same)
        counts = [len(request.own.passes) for request in same]
        rows = [
            request.row for request, count in zip(same, counts, strict=True) for _ in range(count)
        ]
        sample = torch.stack([row.given.sample for row in rows])
        timesteps = torch.tensor([row.timesteps[0] for row in rows])
        [timesteps] = to_device([timesteps], sample.device)
        captures_by_row = [_seeing(net, request) for request in same]
        first, captures = 0, []
        for request, anchors in zip(same, captures_by_row, strict=True):
            captures += [
                (i, i + 1, step_cache) for i, step_cache in enumerate(anchors, start=first)
            ]
            first += len(request.own.passes)
        maps = maps_of_net(net.weights, run.packed, sample, run.hints, timesteps, captures)
        for request, anchors in zip(same, captures_by_row, strict=True):
            for step_cache in anchors:
                step_cache.passed(request.row.timesteps[0])
            if anchors:
                request.keep(anchors)
        for number, (out, map) in enumerate(zip(net.outs, maps, strict=True)):
            yield (number,), [request.unbind() for request in out(map).split(counts)]

    def _packed(self, net: UnetControlNet, same: Sequence[Asked[UnetNetInput]]) -> _Run:
        key = (
            id(net),
            *[id(request.own) for request in same],
            *[request.kept is None for request in same],
        )
        if key not in self._runs:
            hints = [request.own.hint for request in same for _ in request.own.passes]
            sample, depth = same[0].row.given.sample, len(net.weights.down_blocks)
            height, width = sample.shape[1:]
            pass_inputs = list(chain.from_iterable(map(_given, same)))
            packed = PackedPasses(pass_inputs, (height, width), depth, sample.device)
            self._runs[key] = _Run(packed, torch.stack(hints))
        return self._runs[key]


def _seeing(net: UnetControlNet, asked: Asked[UnetNetInput]) -> Sequence[NetAnchors]:
    """What sees the passes that a row's net is run over; none where nothing of them is kept."""
    row, last = asked.row, asked.last
    if not asked.keeps:
        for step_cache in asked.kept or ():
            step_cache.now = row.timesteps[0]
        return ()
    new_caches = [
        NetAnchors(row.control.own, asked.own.others, net.levels) for _ in asked.own.passes
    ]
    anchors: Sequence[NetAnchors] = new_caches if last is None else last.tokens
    reads = row.foreseen is not None
    for step_cache in anchors:
        step_cache.anchor(row.step, row.timesteps[0], 0, 0, reads=reads)
    return anchors


def _given(asked: Asked[UnetNetInput]) -> list[PassInput]:
    """The passes as the net is to compute them."""
    if asked.kept is None:
        return list(asked.own.passes)
    active, control = asked.row.given.active, asked.row.control
    return [
        replace(pass_input, active=active, rest=_Rest(control, asked.number, half))
        for half, pass_input in enumerate(asked.own.passes)
    ]


@dataclass(frozen=True, slots=True, eq=False)
class UnetNetRow:
    """A row whose base is elsewhere, as a ControlNet service holds it."""

    control: RowControl[UnetNetInput]
    active: Mapping[int, Ids] | None
    """Level → ids of the tokens that the base computes where it reads an entry; None: it reads
    none.
    """
    timesteps: Sequence[float]

    @classmethod
    def of(cls, opening: Opening, nets: Mapping[str, UnetControlNet]) -> UnetNetRow:
        """From `UnetAdapter.opening`, as `Opening.on` the nets' device."""
        facts, arrays = opening.facts, opening.arrays
        texts = arrays["texts"]
        micro = [arrays[name] for name in ("micro.0", "micro.1") if name in arrays]
        inputs = [
            UnetNetInput.made(opened.input, nets[opened.net], arrays[f"picture.{i}"], texts, micro)
            for i, opened in enumerate(facts.controls)
        ]
        ids = [arrays[name].numpy() for name in sorted(arrays) if name.startswith("active.")]
        active = dict(enumerate(ids)) or None
        if active is not None:
            cached_ids = others_of(active, inputs[0].hint.shape[1:])
            device_ids = tuple(to_device(cached_ids, texts.device))
            inputs = [opened._replace(others=device_ids) for opened in inputs]
        passes = tuple([PassResiduals() for _ in texts])
        return cls(RowControl(tuple(inputs), facts.own, passes=passes), active, facts.timesteps)

    def at(
        self, step: int, sample: Tensor, computed: int, foreseen: int | None
    ) -> Controlled[UnetNetInput]:
        """See `NetRow`; `sample` is [channels, h, w]."""
        unet_sample = UnetSample(sample, self.active if computed < sample[0].numel() else None)
        control, at = self.control, step if foreseen is None else foreseen
        control = control if foreseen is None else control.ahead
        return controlled(
            control, unet_sample, self.timesteps[at], step, len(self.timesteps), foreseen
        )
