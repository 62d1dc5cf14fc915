"""The sampler's step for all rows of a batch at once.

A few small operations per row add up to more than the rest of a step outside the model, so rows
are moved together; each row's latents are then views of the batch's.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from maskserve_engine.flux.rows import FluxRow, PrimingRow


def euler(rows: Sequence[FluxRow | PrimingRow], outputs: Sequence[Tensor]) -> None:
    """Take FlowMatchEulerDiscreteScheduler's step with the model's outputs, each row its own.

    Args:
        rows: of one device and dtype.
        outputs: per row [n or all, 4C], the computed tokens first.
    """
    edits: list[FluxRow] = []
    velocities: list[Tensor] = []
    for row, output in zip(rows, outputs, strict=True):
        if isinstance(row, PrimingRow):
            row.keep()
        else:
            edits.append(row)
            velocities.append(output[: len(row.latents)])
    if not edits:
        return
    lengths = [len(row.latents) for row in edits]
    velocity = torch.cat(velocities)
    latents = torch.cat([row.latents for row in edits])
    change = torch.tensor([row.schedule.walk[row.step].change for row in edits])
    change = torch.repeat_interleave(change, torch.tensor(lengths))[:, None].to(latents.device)
    # The product is rounded to the model's dtype and the sum is taken in float32, as diffusers has
    # it on CUDA. (On a CPU in half precision torch rounds its `change` first, an ulp apart.)
    moved = latents.float() + (change * velocity).to(velocity.dtype)
    moved = moved.to(velocity.dtype)
    for row, its_latents, its_velocity in zip(
        edits, moved.split(lengths), velocity.split(lengths), strict=True
    ):
        row.move(its_latents, its_velocity)
