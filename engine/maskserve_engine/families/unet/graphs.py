"""A UNet's recordable step (`batch.graphs`).

A lone row's passes compute a bucket's number of tokens, and those of several rows without tiles are
padded together (`levels`). Each row with a tile takes a step of its own: tiles have sides from
buckets, too, and the tile's position and its surroundings are copied in. Step caches keep a refresh
step's values, and ControlNets' residuals are added, between two pieces. IP-Adapters, priming rows
and projected blocks are not recorded.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from torch import Tensor

from maskserve_engine.batch.graphs import Inputs, Launcher
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
        updates = None if self.weights.updates is None else self.weights.updates.shapes
        if self.weights.updates is not None and updates is None:
            return None
        kinds = tuple(self.kinds) if any(self.packed.rests) else ()
        shapes = self.packed.shapes(self.weights.attends)
        return shapes, tuple(self.sample.shape), kinds, updates

    @property
    def common(self) -> bool:
        """A row's later steps have the shapes of its tile, and steps whose passes compute all
        tokens have few.
        """
        return self.packed.together or self.packed.tiled or not any(self.packed.rests)

    def copied(self, inputs: Inputs) -> UnetStep:
        packed = self.packed.copied(inputs, self.weights.attends)
        weights = self.weights.copied(inputs.copy, packed.moving)
        sample, timesteps = map(inputs.copy, (self.sample, self.timesteps))
        step = UnetStep(weights, packed, sample, timesteps, self.kinds)
        if weights.updates is not None:
            step.run(Launcher())  # tiles of the passes are made before the step is recorded
        return step

    def take(self, other: UnetStep, *, all_inputs: bool) -> None:
        self.sample.copy_(other.sample)
        self.timesteps.copy_(other.timesteps)
        if all_inputs:
            if self.weights.updates is not None and other.weights.updates is not None:
                self.weights.updates.take(other.weights.updates)
            self.packed.take(other.packed, self.weights.attends)
        self.packed.turn_to(other.packed, anew=all_inputs)

    def run(self, launcher: Launcher) -> Tensor:
        inputs = self.packed, self.sample, self.timesteps, self.kinds
        return forward(self.weights, *inputs, launcher=launcher)

    def answer_of(self, recorded: Tensor) -> Tensor:
        return recorded.clone()
