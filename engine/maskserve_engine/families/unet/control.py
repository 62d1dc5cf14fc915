"""ControlNetModels beside a UNet, over the passes of the rows that have control."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from maskserve_core.models.unet import CONTROL
from maskserve_engine.control_link.opening import Opening
from maskserve_engine.control_link.served import ServedRow
from maskserve_engine.families.control_batches import NetStep, Residual, Send
from maskserve_engine.job import ControlInput


def check_net(model: Any, base: Any, channels: int) -> None:
    """Whether a net fits a base.

    Args:
        model: ControlNetModel.
        base: UNet2DConditionModel.
        channels: of the latents.

    Raises:
        ValueError: it does not; in one sentence.
    """
    own, of_base = model.config, {**base.config, "in_channels": channels}
    for name in ("in_channels", *CONTROL.equal):
        if own[name] != of_base[name]:
            raise ValueError(f"its {name} is {own[name]}, that of the model {of_base[name]}")
    if own.global_pool_conditions:
        raise ValueError("its global_pool_conditions is not served")


class UnetNetInput(NamedTuple):
    """What a net is given of one edit, beside what its base is given."""

    control: ControlInput
    net: Any
    """ControlNetModel in eval mode; it runs as diffusers has it."""
    picture: Tensor
    """[1, 3, H, W], from 0 to 1."""
    texts: Tensor
    """[passes, T, width] of the prompt, then of the negative one."""
    micro: tuple[Tensor, ...]
    """Of SDXL: [passes, pooled width] and the sizes [passes, 6]; else nothing."""


@dataclass(slots=True, eq=False)
class PassControl:
    """The residuals of one pass of a row (`batch.residuals.Residuals`)."""

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


class UnetControlled(NamedTuple):
    """A row with control that is about to take a step."""

    control: UnetRowControl
    sample: Tensor
    """[channels, h, w] the latents as the base is given them."""
    timestep: float
    step: int
    steps: int


Asked = tuple[UnetControlled, UnetNetInput, float]
"""A row, what a net is given of it, and the step's scale."""


def run_nets(rows: Sequence[UnetControlled]) -> None:
    """Have what ControlNets add to the next step of these rows, of one latent shape, in their
    `UnetRowControl`. Each net runs once, over the passes of all rows that have it.
    """
    asked: dict[tuple[int, int], list[Asked]] = {}
    for each in rows:
        for own in each.control.passes:
            own.added.clear()
        for given in each.control.inputs:
            scale = given.control.scale_at(each.step, each.steps)
            if scale:  # prompts of other lengths are not packed by the real class
                key = id(given.net), given.texts.shape[1]
                asked.setdefault(key, []).append((each, given, scale))
    for same in asked.values():
        _run(same)


def _run(same: Sequence[Asked]) -> None:
    passes = [(*each, own) for each in same for own in each[0].control.passes]
    samples = [row.sample for row, _, _, _ in passes]
    micro = zip(*[given.micro for _, given, _ in same], strict=True)
    downs, middle = same[0][1].net(
        torch.stack(samples),
        torch.tensor([row.timestep for row, _, _, _ in passes], device=samples[0].device),
        torch.cat([given.texts for _, given, _ in same]),
        torch.cat([given.picture for _, given, _, _ in passes]),
        added_cond_kwargs=dict(
            zip(("text_embeds", "time_ids"), map(torch.cat, micro), strict=False)
        ),
        return_dict=False,
    )
    for number, maps in enumerate((*downs, middle)):
        for (_, _, scale, own), added in zip(passes, maps, strict=True):
            before, scaled = own.added.get(number), added * scale
            own.added[number] = scaled if before is None else before + scaled


@dataclass(frozen=True, slots=True, eq=False)
class UnetNetRow:
    """A row whose base is elsewhere, as a ControlNet service holds it."""

    control: UnetRowControl
    timesteps: Sequence[float]

    @classmethod
    def of(cls, opening: Opening, nets: Mapping[str, Any]) -> UnetNetRow:
        """From `UnetAdapter.opening`, its arrays on the nets' device."""
        arrays = opening.arrays
        micro = tuple([arrays[name] for name in ("micro.0", "micro.1") if name in arrays])
        inputs = [
            UnetNetInput(each.input, nets[each.net], arrays[f"picture.{i}"], arrays["texts"], micro)
            for i, each in enumerate(opening.facts.controls)
        ]
        passes = tuple([PassControl() for _ in arrays["texts"]])
        return cls(UnetRowControl(tuple(inputs), passes), opening.facts.timesteps)


class UnetNetBatch:
    """See `families.adapter.NetBatch`."""

    def run(self, rows: Sequence[NetStep[UnetNetRow]], send: Send) -> None:
        run_nets(
            [
                UnetControlled(
                    each.row.control,
                    each.sample,
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
