"""UNet2DConditionModel over any mix of rows of one latent shape: dense, cached and priming."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from maskserve_engine.cache.entries import Recorder
from maskserve_engine.families.unet.levels import make_level
from maskserve_engine.families.unet.stack import Rest, Stack, Text


@dataclass(frozen=True, slots=True)
class PassInput:
    """What one evaluation of the model is given beside latents and timestep."""

    text: Tensor
    """[T, width] prompt embedding."""
    added: Tensor | None
    """[embedding width] of SDXL's micro-conditioning; None for models without it."""
    active: Mapping[int, Tensor] | None = None
    """Level → [n] ids of the computed tokens; None where all are computed."""
    rest: Rest | None = None
    """The inactive tokens; given with `active`."""


class Packed:
    """The passes of all rows, for as long as the same rows go on.

    Args:
        passes: in order; passes of one row follow one another.
        shape: (height, width) of the latents.
        depth: levels of the UNet.
        device: of the model.
    """

    def __init__(
        self,
        passes: Sequence[PassInput],
        shape: tuple[int, int],
        depth: int,
        device: torch.device,
    ) -> None:
        self.rests = tuple(each.rest for each in passes)
        self.text = Text(torch.cat([each.text for each in passes]))
        lengths = [len(each.text) for each in passes]
        added = [each.added for each in passes if each.added is not None]
        self.added = torch.stack(added) if added else None
        self.levels = []
        height, width = shape
        for level in range(depth):
            active = [None if each.active is None else each.active[level] for each in passes]
            self.levels.append(make_level(height * width, active, lengths, device))
            height, width = (height + 1) // 2, (width + 1) // 2


def added_embedding(model: Any, pooled: Tensor, time_ids: Tensor) -> Tensor:
    """SDXL's micro-conditioning as it is added to the timestep's embedding.

    Args:
        model: the UNet.
        pooled: [pooled width] of the second text encoder.
        time_ids: [6] original size, crop and target size.
    """
    sizes = model.add_time_proj(time_ids).flatten().to(pooled.dtype)
    return model.add_embedding(torch.cat((pooled, sizes))[None])[0]


def forward(
    model: Any,
    packed: Packed,
    sample: Tensor,
    timesteps: Tensor,
    kinds: Sequence[str] = (),
    captures: Sequence[tuple[int, int, Recorder]] = (),
) -> Tensor:
    """The model's output for every pass.

    Args:
        model: UNet2DConditionModel.
        packed: the passes.
        sample: [P, in_channels, h, w].
        timesteps: [P], float32.
        kinds: `dense`, `project` or `kv` per block in the order they run, for all cached passes;
            not read when there are none.
        captures: (first pass, behind its last pass, capture) of each priming row.

    Returns:
        [P, out_channels, h, w]
    """
    embedding = model.time_embedding(model.time_proj(timesteps).to(sample.dtype))
    if packed.added is not None:
        embedding = embedding + packed.added
    walk = _Walk(packed, kinds, captures, embedding)
    x = model.conv_in(sample)
    skips = [x]
    for stage in model.down_blocks:
        for resnet, stack in _layers(stage):
            x = walk.layer(resnet, stack, x)
            skips.append(x)
        for sampler in stage.downsamplers or ():
            x = sampler(x)
            walk.level += 1
            skips.append(x)
    first, *others = model.mid_block.resnets
    x = first(x, embedding)
    for stack, resnet in zip(model.mid_block.attentions, others, strict=True):
        x = resnet(walk.stack(stack, x), embedding)
    for stage in model.up_blocks:
        for resnet, stack in _layers(stage):
            x = walk.layer(resnet, stack, torch.cat((x, skips.pop()), dim=1))
        for sampler in stage.upsamplers or ():
            # An odd side was rounded up on the way down.
            x = sampler(x, tuple(skips[-1].shape[2:]))
            walk.level -= 1
    return model.conv_out(model.conv_act(model.conv_norm_out(x)))


def _layers(stage: Any) -> list[tuple[Any, Any]]:
    """ResNets of a stage, each with the stack behind it or None."""
    stacks = getattr(stage, "attentions", None) or [None] * len(stage.resnets)
    return list(zip(stage.resnets, stacks, strict=True))


class _Walk:
    """Where the walk through the UNet is: its level, and the number of the next block."""

    def __init__(
        self,
        packed: Packed,
        kinds: Sequence[str],
        captures: Sequence[tuple[int, int, Recorder]],
        embedding: Tensor,
    ) -> None:
        self.packed, self.kinds, self.captures = packed, kinds, captures
        self.embedding = embedding
        self.level = 0
        self.block = 0

    def layer(self, resnet: Any, stack: Any, x: Tensor) -> Tensor:
        x = resnet(x, self.embedding)
        return x if stack is None else self.stack(stack, x)

    def stack(self, module: Any, x: Tensor) -> Tensor:
        packed = self.packed
        run = Stack(packed.levels[self.level], packed.text, packed.rests, self.captures, self.kinds)
        x = run.run(module, self.block, x)
        self.block += len(module.transformer_blocks)
        return x


@dataclass(frozen=True, slots=True)
class BlockPlace:
    """Where a transformer block stands in the UNet."""

    level: int
    begins: bool
    """Whether its stack begins with it: its input is there for all tokens, from proj_in."""


def block_places(model: Any) -> tuple[BlockPlace, ...]:
    """Every block of the UNet, in the order they run."""
    bottom = len(model.down_blocks) - 1
    stages = [*enumerate(model.down_blocks), (bottom, model.mid_block)]
    stages += [(bottom - step, stage) for step, stage in enumerate(model.up_blocks)]
    return tuple(
        BlockPlace(level, begins=number == 0)
        for level, stage in stages
        for stack in getattr(stage, "attentions", None) or ()
        for number in range(len(stack.transformer_blocks))
    )
