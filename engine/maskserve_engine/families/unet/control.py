"""ControlNetModels beside a UNet, over the passes of the rows that have control."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from maskserve_core.models.unet import CONTROL
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
