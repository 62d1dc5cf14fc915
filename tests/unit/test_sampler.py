"""The packed sampler step against diffusers' own, row by row."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler

from maskserve_engine.flux.rows import FluxRow
from maskserve_engine.flux.sampler import euler
from maskserve_engine.flux.schedule import make_schedule


def new_row(sampler: FlowMatchEulerDiscreteScheduler, tokens: int, steps: int, dtype: torch.dtype):
    empty = torch.empty(0)
    return FluxRow(
        request_id=f"{tokens}-{steps}",
        schedule=make_schedule(sampler, steps, tokens),
        grid=(tokens, 1),
        text=empty,
        pooled=empty,
        guidance=None,
        cis=empty,
        latents=torch.randn(tokens, 16).to(dtype),
        condition=None,
        blend=None,
    )


# In half precision torch's CPU kernels round one factor more than its CUDA kernels do.
ULP = {torch.float32: 0.0, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}


@pytest.mark.parametrize("dtype", ULP)
@pytest.mark.parametrize("uniform", [True, False])
def test_rows_moved_together_move_as_diffusers_moves_each(
    dtype: torch.dtype, uniform: bool
) -> None:
    torch.manual_seed(int(np.random.default_rng().integers(2**31)))
    sampler = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, shift=3.0)
    sizes = [(24, 7)] * 3 if uniform else [(5, 4), (24, 7), (9, 28)]
    rows, samplers = [], []
    for tokens, steps in sizes:
        rows.append(new_row(sampler, tokens, steps, dtype))
        samplers.append(copy.deepcopy(sampler))  # as set by make_schedule
    expected = [row.latents for row in rows]
    for _ in range(4):
        outputs = [torch.randn(len(row.latents) + 3, 16).to(dtype) for row in rows]
        for i, (row, own) in enumerate(zip(rows, samplers, strict=True)):
            velocity = outputs[i][: len(row.latents)]
            timestep = own.timesteps[row.step]
            expected[i] = own.step(velocity, timestep, row.latents, return_dict=False)[0]
        euler(rows, outputs)
        for row, latents in zip(rows, expected, strict=True):
            assert row.latents.dtype == dtype
            assert torch.allclose(row.latents, latents, rtol=ULP[dtype], atol=ULP[dtype])
