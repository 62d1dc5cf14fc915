"""The running batch: rows packed once for as long as the same rows go on.

Between steps only latents and timesteps change. Packing anew at each step, row by row, costs more
than the rest of a step outside the model; so the rows' latents live in the packed tokens, where
the sampler's step for all of them is one operation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from maskserve_engine.flux.forward import Packed, forward
from maskserve_engine.flux.rows import FluxRow, PrimingRow

Row = FluxRow | PrimingRow


class Batch:
    """Some rows and their packed inputs."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.rows = tuple(rows)
        self.guided = tuple((i, row.negative) for i, row in enumerate(rows) if row.negative)
        """Index and negative prompt of rows that take a second pass, packed behind all rows."""
        inputs = [row.model_input() for row in rows]
        inputs += [negative.input(inputs[i]) for i, negative in self.guided]
        self.packed = Packed(inputs)
        self.stays = all(row.inputs_stay for row in rows)

    @classmethod
    def of(cls, rows: Sequence[Row], last: Batch | None) -> Batch:
        """The batch of these rows: the last one, if it holds for them still."""
        return last if last is not None and last.holds(rows) else cls(rows)

    def holds(self, rows: Sequence[Row]) -> bool:
        """Whether it was packed for just these rows and needs no packing anew."""
        return (
            self.stays
            and len(rows) == len(self.rows)
            and all(mine is row for mine, row in zip(self.rows, rows, strict=True))
            and all(row.inputs_stay for row in rows)
        )

    def step(self, model: Any, kinds: Sequence[str]) -> None:
        """Take one step of every row: the model, then FlowMatchEulerDiscreteScheduler's step.

        No row has moved if it raises, so that the rows can be tried again one by one.
        """
        packed, rows = self.packed, self.rows
        moments = [row.moment() for row in rows]
        moments += [moments[i] for i, _ in self.guided]
        velocity = forward(model, packed, moments, kinds)
        stream = packed.ways.narrow.image_stream
        answers = velocity.split(stream.lengths)
        for (i, negative), away in zip(self.guided, answers[len(rows) :], strict=True):
            answers[i].sub_(away).mul_(negative.scale).add_(away)
        still = [0.0] * len(self.guided)  # second passes follow their rows below
        changes = torch.tensor([row.change for row in rows] + still, device=velocity.device)
        wide, changes = stream.spread(velocity, changes[:, None])
        # The product is rounded to the model's dtype and the sum is taken in float32, as diffusers
        # has it on CUDA. (On a CPU in half precision torch rounds `changes` first, an ulp apart.)
        move = (wide * changes).to(velocity.dtype).view_as(velocity)
        latents = packed.tokens[:, : velocity.shape[1]]
        if any(row.blends for row in rows):
            moved = latents + move
            for row, part in zip(rows, moved.split(stream.lengths), strict=False):
                row.blend_in(part)
            latents.copy_(moved)  # nothing is allocated from here on
        else:
            latents.add_(move)
        parts = latents.split(stream.lengths)
        for (i, _), second in zip(self.guided, parts[len(rows) :], strict=True):
            second.copy_(parts[i])
        for row, own, answer in zip(rows, parts, answers, strict=False):
            row.advance(own, answer)
