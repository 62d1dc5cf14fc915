"""ControlNetModels beside a UNet, over the passes of the rows that have control.

A net is a copy of the UNet's way down and of its middle; its feature maps, each through a
convolution of its own, are added to those of the base. It runs by the same walk (`forward`).

Beside a cached row the net's stacks compute the active tokens, as those of the base do; its
convolutions run on the whole picture. What the others are in a stack cannot come from the
template's entries, which know nothing of the control picture: the net computes all tokens at one
step in so many and keeps their keys and values, and what the stack hands on of them, with the edit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from maskserve_core.models.unet import CONTROL, check_net, level_sizes
from maskserve_engine.base.job import ControlInput
from maskserve_engine.batch.transfer import to_device
from maskserve_engine.cache.entries import Coded
from maskserve_engine.control_link.opening import Opening
from maskserve_engine.control_link.served import ServedRow
from maskserve_engine.families.control_batches import NetStep, Residual, Send
from maskserve_engine.families.unet.forward import (
    PackedPasses,
    PassInput,
    added_embedding,
    maps_of_net,
    micro_conditioning,
)
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
        own, of_base = model.config, {**base.config, "in_channels": channels}
        for name in ("in_channels", *CONTROL.equal):
            if own[name] != of_base[name]:
                raise ValueError(f"its {name} is {own[name]}, that of the model {of_base[name]}")
        check_net(own)
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
        passes = [net.prompt(text, own) for text, *own in zip(texts, *micro, strict=True)]
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


class KeptTokens:
    """A pass's inactive tokens in a net's stacks, as of a step that computed all tokens
    (`stack.StackCapture`), for the steps that compute the active ones.

    Args:
        others: level → [m] ids of the inactive tokens.
        levels: of the net's blocks.
    """

    text = False
    """A UNet's text is in attention of its own."""

    def __init__(self, others: Sequence[Tensor], levels: Sequence[int]) -> None:
        self._others, self._levels = others, levels
        self._sources: dict[tuple[int, str], KvSource] = {}

    def hidden(self, block: int, hidden: Tensor) -> None:
        """Nobody reads it."""

    def keys_values(self, block: int, keys: Tensor, values: Tensor) -> None:
        self._keep(block, "kv", keys.flatten(1), values.flatten(1))

    def end(self, block: int, output: Tensor) -> None:
        self._keep(block, "end", output)

    def source(self, block: int, part: str) -> KvSource:
        """Of the inactive tokens alone, in the order of their ids."""
        return self._sources[block, part]

    def _keep(self, block: int, part: str, *tokens: Tensor) -> None:
        ids = self._others[self._levels[block]]
        taken = tuple([Coded("model", each.index_select(0, ids)) for each in tokens])
        self._sources[block, part] = KvSource(taken)


class KeptPasses(NamedTuple):
    """Of all passes of a row in one net."""

    step: int
    """Of the row, when it was computed."""
    passes: tuple[KeptTokens, ...]


@dataclass(slots=True, eq=False)
class PassControl:
    """The residuals of one pass of a row (`batch.packing.Residuals`)."""

    added: dict[int, Tensor] = field(default_factory=dict)
    """By the place in the UNet."""

    def after(self, number: int) -> Tensor | None:
        return self.added.get(number)


@dataclass(slots=True, eq=False)
class UnetRowControl:
    """What ControlNets add to one row, computed before each of its steps."""

    inputs: tuple[UnetNetInput, ...]
    passes: tuple[PassControl, ...]
    """The prompt's, then the negative prompt's."""
    others: tuple[Tensor, ...] = ()
    """Level → [m] ids of a cached row's inactive tokens; none of a dense one."""
    refresh: int = 1
    """Steps from one that computes all tokens to the next."""
    exact: bool = False
    """Whether what is kept may not be computed anew at another step (`reproducible`)."""
    kept: dict[int, KeptPasses] = field(default_factory=dict)
    """By the number of the input, of a cached row."""


class ServedPass(NamedTuple):
    """The residuals of one pass of a row whose nets a service runs."""

    served: ServedRow
    number: int

    def after(self, number: int) -> Tensor | None:
        added = self.served.after(number)
        return None if added is None else added[self.number]


@dataclass(slots=True, eq=False)
class UnetServedControl:
    """As `UnetRowControl`, of a row whose nets a service runs."""

    served: ServedRow
    passes: tuple[ServedPass, ...]


@dataclass(frozen=True, slots=True)
class _Rest:
    """`stack.InactivePassTokens` of one pass in one net, whatever is kept of it at the time."""

    control: UnetRowControl
    number: int
    """Of the input."""
    half: int
    """Of the pass."""

    def source(self, block: int, part: str, wanted: Tensor | None = None) -> KvSource:
        assert wanted is None, "a net's passes have no tile"
        return self.control.kept[self.number].passes[self.half].source(block, part)


class UnetControlled(NamedTuple):
    """A row with control that is about to take a step."""

    control: UnetRowControl
    sample: Tensor
    """[channels, h, w] the latents as the base is given them."""
    active: Mapping[int, Ids] | None
    """Level → ids of the tokens that the base computes; None: all."""
    timestep: float
    step: int
    steps: int


class AskedPasses(NamedTuple):
    """A row that a net is run for."""

    row: UnetControlled
    number: int
    """Of the row's input."""
    own: UnetNetInput
    scale: float
    """Of the step."""

    @property
    def sparse(self) -> bool:
        """Whether the net computes the active tokens alone: what is kept of the others is not old.

        A step that is tried again, as one of a batch that failed is, does again what it did.
        """
        kept = self.row.control.kept.get(self.number)
        if self.row.active is None or kept is None:
            return False
        return 0 < self.row.step - kept.step < self.row.control.refresh

    def given(self) -> list[PassInput]:
        """The passes as the net is to compute them."""
        if not self.sparse:
            return list(self.own.passes)
        return [
            replace(each, active=self.row.active, rest=_Rest(self.row.control, self.number, half))
            for half, each in enumerate(self.own.passes)
        ]

    def keeps(self) -> KeptPasses | None:
        """What is to see all tokens of a cached row, and to be kept; None: nothing."""
        control, own = self.row.control, self.own
        if self.row.active is None or self.sparse or control.refresh == 1:
            return None
        seeing = [KeptTokens(control.others, own.net.levels) for _ in own.passes]
        return KeptPasses(self.row.step, tuple(seeing))


class _Run(NamedTuple):
    """Passes that a net is run over, for as long as the same rows go on."""

    packed: PackedPasses
    hints: Tensor
    """[P, C, h, w]"""


class UnetNets:
    """ControlNets beside a batch, for as long as the same rows go on."""

    def __init__(self) -> None:
        self._runs: dict[tuple[int, ...], _Run] = {}
        """By net, the rows' inputs, and which of them compute the active tokens alone."""

    def run(self, rows: Sequence[UnetControlled]) -> None:
        """Have what ControlNets add to the next step of these rows, of one latent shape, in their
        `UnetRowControl`. Each net runs once, over the passes of all rows that have it.
        """
        asked: dict[int, list[AskedPasses]] = {}
        for each in rows:
            for own in each.control.passes:
                own.added.clear()
            for number, given in enumerate(each.control.inputs):
                scale = given.control.scale_at(each.step, each.steps)
                if scale:
                    asked.setdefault(id(given.net), []).append(
                        AskedPasses(each, number, given, scale)
                    )
        for same in asked.values():
            self._run(same[0].own.net, same)

    def _run(self, net: UnetControlNet, same: Sequence[AskedPasses]) -> None:
        run = self._packed(net, same)
        passes = [(each, own) for each in same for own in each.row.control.passes]
        sample = torch.stack([each.row.sample for each, _ in passes])
        timesteps = torch.tensor([each.row.timestep for each, _ in passes])
        [timesteps] = to_device([timesteps], sample.device)
        fresh = [each.keeps() for each in same]
        seeing = [
            own
            for each, kept in zip(same, fresh, strict=True)
            for own in (kept.passes if kept else [None] * len(each.own.passes))
        ]
        captures = [(i, i + 1, own) for i, own in enumerate(seeing) if own is not None]
        maps = maps_of_net(net.weights, run.packed, sample, run.hints, timesteps, captures)
        for each, kept in zip(same, fresh, strict=True):
            if kept is not None:
                each.row.control.kept[each.number] = kept
        for number, (out, map) in enumerate(zip(net.outs, maps, strict=True)):
            for (each, own), added in zip(passes, out(map), strict=True):
                before, scaled = own.added.get(number), added * each.scale
                own.added[number] = scaled if before is None else before + scaled

    def _packed(self, net: UnetControlNet, same: Sequence[AskedPasses]) -> _Run:
        key = (id(net), *[id(each.own) for each in same], *[each.sparse for each in same])
        if key not in self._runs:
            hints = [each.own.hint for each in same for _ in each.own.passes]
            sample, depth = same[0].row.sample, len(net.weights.down_blocks)
            height, width = sample.shape[1:]
            given = list(chain.from_iterable(each.given() for each in same))
            packed = PackedPasses(given, (height, width), depth, sample.device)
            self._runs[key] = _Run(packed, torch.stack(hints))
        return self._runs[key]


@dataclass(frozen=True, slots=True, eq=False)
class UnetNetRow:
    """A row whose base is elsewhere, as a ControlNet service holds it."""

    control: UnetRowControl
    active: Mapping[int, Ids] | None
    """Level → ids of the tokens that the base computes where it reads an entry; None: it reads
    none.
    """
    timesteps: Sequence[float]

    @classmethod
    def of(cls, opening: Opening, nets: Mapping[str, UnetControlNet]) -> UnetNetRow:
        """From `UnetAdapter.opening`, its arrays on the nets' device."""
        facts, arrays = opening.facts, opening.arrays
        texts = arrays["texts"]
        micro = [arrays[name] for name in ("micro.0", "micro.1") if name in arrays]
        inputs = [
            UnetNetInput.made(each.input, nets[each.net], arrays[f"picture.{i}"], texts, micro)
            for i, each in enumerate(facts.controls)
        ]
        ids = [arrays[name].cpu().numpy() for name in sorted(arrays) if name.startswith("active.")]
        active, others = dict(enumerate(ids)) or None, list[Tensor]()
        if active is not None:
            others = others_of(active, inputs[0].hint.shape[1:])
        passes = tuple([PassControl() for _ in texts])
        there = tuple([each.to(texts.device) for each in others])
        control = UnetRowControl(tuple(inputs), passes, there, facts.refresh)
        return cls(control, active, facts.timesteps)


class UnetNetBatch:
    """See `families.control_batches.NetBatch`."""

    def __init__(self) -> None:
        self._nets = UnetNets()

    def run(self, rows: Sequence[NetStep[UnetNetRow]], send: Send) -> None:
        self._nets.run(
            [
                UnetControlled(
                    each.row.control,
                    each.sample,
                    each.row.active if each.computed < each.sample[0].numel() else None,
                    each.row.timesteps[each.step],
                    each.step,
                    len(each.row.timesteps),
                )
                for each in rows
            ]
        )
        for each in rows:
            passes = each.row.control.passes
            send(
                [
                    Residual(each.name, place, place, torch.stack([p.added[place] for p in passes]))
                    for place in passes[0].added
                ]
            )
