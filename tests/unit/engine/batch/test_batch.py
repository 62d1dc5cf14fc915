"""Rows moved together move as diffusers moves each, and a batch is packed anew when it must be."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.pipelines.flux.pipeline_flux_fill import calculate_shift

from maskserve_engine.families.mmdit.batch import FlowBatch
from maskserve_engine.families.mmdit.preparation import unpack_latents
from maskserve_engine.families.mmdit.rows import FlowRow, PromptPass
from maskserve_engine.families.mmdit.schedule import make_schedule
from maskserve_engine.families.mmdit.spans import ImageSpans, MaskedTokens

pytestmark = pytest.mark.each_value

CHANNELS, TEXT = 16, 3


# In half precision torch's CPU kernels round one factor more than its CUDA kernels do.
ULP = {torch.float32: 0.0, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}


class Velocities:
    """A transformer without blocks: its answers are random, and kept."""

    block_count = two_streams = alone = mode_blocks = placed_bytes = 0
    width = head_dim = 1

    def __init__(self) -> None:
        self.answer = torch.empty(0)
        self.timesteps: list[float] = []

    def with_adapters(self, rows: Any) -> Velocities:
        return self

    def embed(self, tokens: torch.Tensor, stream: Any) -> torch.Tensor:
        return tokens

    def last(self, image: torch.Tensor, stream: Any) -> torch.Tensor:
        self.answer = torch.randn(len(image), CHANNELS).to(image.dtype)
        return self.answer.clone()


class Batch(FlowBatch[Any]):
    """Rows stepped by `Velocities`."""

    def vectors(self, weights: Any, steps: slice) -> list[list[float]]:
        return self.timesteps[steps].tolist()

    def at_step(self, weights: Any, vectors: list[float]) -> Any:
        weights.timesteps = vectors
        return weights


@pytest.fixture
def velocities() -> Velocities:
    torch.manual_seed(0)
    return Velocities()


@pytest.fixture
def sampler() -> FlowMatchEulerDiscreteScheduler:
    return FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, shift=3.0)


def new_row(
    sampler: FlowMatchEulerDiscreteScheduler,
    tokens: int,
    steps: int,
    dtype: torch.dtype = torch.float32,
    *,
    condition: bool = True,
) -> FlowRow:
    return FlowRow(
        request_id=f"{tokens}-{steps}",
        schedule=make_schedule(sampler, steps, tokens),
        passes=(
            PromptPass(
                torch.zeros(TEXT, 8, dtype=dtype),
                torch.zeros(TEXT, 4, dtype=torch.complex64),
                torch.zeros(4, dtype=dtype),
            ),
        ),
        image=ImageSpans(
            (tokens, 1),
            MaskedTokens(
                None,
                torch.zeros(tokens, 4, dtype=torch.complex64),
                torch.randn(tokens, CHANNELS).to(dtype),
                torch.randn(tokens, 5).to(dtype) if condition else None,
                None,
            ),
        ),
    )


@pytest.mark.parametrize("dtype", ULP)
@pytest.mark.parametrize("condition", [True, False])
@pytest.mark.parametrize("sizes", [[(24, 7)], [(24, 7)] * 3, [(5, 4), (24, 7), (9, 28)]])
def test_rows_move_as_diffusers_moves_each(
    sampler: FlowMatchEulerDiscreteScheduler,
    velocities: Velocities,
    sizes: list[tuple[int, int]],
    dtype: torch.dtype,
    condition: bool,
) -> None:
    rows, samplers = [], []
    for tokens, steps in sizes:
        rows.append(new_row(sampler, tokens, steps, dtype, condition=condition))
        row_sampler = copy.deepcopy(sampler)
        row_sampler.set_timesteps(
            sigmas=np.linspace(1.0, 1 / steps, steps), mu=calculate_shift(tokens)
        )
        samplers.append(row_sampler)
    batch = None
    for step in range(4):
        copies = [row.latents.clone() for row in rows]
        batch = Batch.of(rows, batch)
        batch.step(velocities, ())
        assert velocities.timesteps == [
            float(row_sampler.timesteps[step]) for row_sampler in samplers
        ]
        parts = torch.split(velocities.answer, [len(row.latents) for row in rows])
        for row, row_sampler, latents, velocity in zip(rows, samplers, copies, parts, strict=True):
            timestep = row_sampler.timesteps[step]
            [expected] = row_sampler.step(velocity, timestep, latents, return_dict=False)
            assert row.step == step + 1
            assert row.latents.dtype == dtype
            assert torch.allclose(row.latents, expected, rtol=ULP[dtype], atol=ULP[dtype])
            clean = row.latents.float() - row_sampler.sigmas[step + 1] * velocity.float()
            estimate = unpack_latents(clean, row.image.grid)
            assert torch.allclose(
                torch.from_numpy(row.estimate().array()),
                estimate,
                rtol=1e-5,
                atol=2 * ULP[dtype] + 1e-5,
            )


def test_the_same_rows_are_packed_once(
    sampler: FlowMatchEulerDiscreteScheduler, velocities: Velocities
) -> None:
    rows = [new_row(sampler, 6, 9), new_row(sampler, 8, 9)]
    first = Batch.of(rows, None)
    first.step(velocities, ())
    assert Batch.of(list(rows), first) is first


def test_the_model_sees_the_moved_latents_beside_the_condition(
    sampler: FlowMatchEulerDiscreteScheduler, velocities: Velocities
) -> None:
    rows = [new_row(sampler, 6, 9), new_row(sampler, 8, 9)]
    batch = Batch.of(rows, None)
    batch.step(velocities, ())
    anew = Batch(rows)
    assert torch.equal(batch.packed.tokens, anew.packed.tokens)


def test_a_row_that_joins_or_leaves_has_the_batch_packed_anew(
    sampler: FlowMatchEulerDiscreteScheduler, velocities: Velocities
) -> None:
    one, two, three = (new_row(sampler, 6, 9) for _ in range(3))
    batch = Batch.of([one, two], None)
    batch.step(velocities, ())
    latents_before = one.latents.clone()
    for rows in ([one], [one, three], [two, one], [one, two, three]):
        other = Batch.of(rows, batch)
        assert other is not batch
        at = 6 * next(i for i, row in enumerate(rows) if row is one)
        assert torch.equal(other.packed.tokens[at : at + 6, :CHANNELS], latents_before)


def test_a_finished_rows_latents_are_its_own(
    sampler: FlowMatchEulerDiscreteScheduler, velocities: Velocities
) -> None:
    """A later batch must not change an answer on its way out."""
    row, two = new_row(sampler, 6, 1), new_row(sampler, 6, 9)
    batch = Batch.of([row, two], None)
    batch.step(velocities, ())
    latents_before, result = row.latents.clone(), row.result().array()
    Batch.of([two], batch).step(velocities, ())
    assert torch.equal(row.latents, latents_before)
    assert np.array_equal(row.result().array(), result)


class BrokenBlend:
    """Changes nothing, and is short of memory the second time."""

    def __init__(self) -> None:
        self.calls = 0

    def apply(self, latents: torch.Tensor, *_: Any) -> torch.Tensor:
        self.calls += 1
        if self.calls > 1:
            raise RuntimeError("out of memory")
        return latents


@pytest.mark.parametrize("at", [0, 1, 2])
def test_no_row_has_moved_when_a_step_fails(
    sampler: FlowMatchEulerDiscreteScheduler, velocities: Velocities, at: int
) -> None:
    """They are tried again one by one: what had moved would move twice."""
    rows = [new_row(sampler, 6, 9) for _ in range(3)]
    rows[at].image.masked.blend = BrokenBlend()  # type: ignore[assignment]
    batch = Batch.of(rows, None)
    batch.step(velocities, ())
    before = [row.latents.clone() for row in rows]
    with pytest.raises(RuntimeError, match="out of memory"):
        batch.step(velocities, ())
    assert [row.step for row in rows] == [1, 1, 1]
    for row, latents in zip(rows, before, strict=True):
        assert torch.equal(row.latents, latents)
