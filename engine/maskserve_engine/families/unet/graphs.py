"""A UNet's recordable step (`batch.graphs`).

A lone row's passes compute a bucket's number of tokens, and those of several rows without tiles are
padded together (`levels`). Tiles have sides from buckets, too; the tile's position and its
surroundings are copied in. LoRAs, ControlNets, IP-Adapters, priming rows and
projected blocks are not recorded.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from torch import Tensor

from maskserve_engine.batch.graphs import AtOnce, Inputs
from maskserve_engine.families.unet.forward import PackedPasses, forward
from maskserve_engine.families.unet.weights import UnetWeights


@dataclass(frozen=True, slots=True)
class UnetStep:
    """A step; fields as the arguments of `forward`."""

    weights: UnetWeights
    packed: PackedPasses
    """The passes; their prompts are projected before a step is recorded."""
    sample: Tensor
    timesteps: Tensor
    kinds: Sequence[str]

    @property
    def shapes(self) -> Hashable | None:
        if not self.packed.plain or "project" in self.kinds:
            return None
        kinds = tuple(self.kinds) if any(self.packed.rests) else ()
        shapes = self.packed.shapes(self.weights.attends)
        return shapes, tuple(self.sample.shape), kinds

    @property
    def common(self) -> bool:
        return self.packed.together

    def copied(self, inputs: Inputs) -> UnetStep:
        inputs_of = inputs.copy(self.sample), inputs.copy(self.timesteps)
        return UnetStep(self.weights, self.packed.copied(inputs), *inputs_of, self.kinds)

    def take(self, other: UnetStep, *, anew: bool) -> None:
        self.sample.copy_(other.sample)
        self.timesteps.copy_(other.timesteps)
        if anew:
            self.packed.take(other.packed)
        self.packed.turn_to(other.packed, anew=anew)

    def run(self, asking: AtOnce) -> Tensor:
        inputs = self.packed, self.sample, self.timesteps, self.kinds
        return forward(self.weights, *inputs, asking=asking)

    def answer_of(self, recorded: Tensor) -> Tensor:
        return recorded.clone()
