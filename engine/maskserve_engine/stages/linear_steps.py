"""A diffusers sampler's steps as matrices.

A sampler's step is linear in latents, memory and the model's answer. So each step is a matrix, and
its columns are the sampler's results for unit vectors: no formula of a sampler is copied
(docs/adr/0041).
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

_MEMORY = ("model_outputs", "ets", "cur_sample", "last_sample")
"""Attributes in which the served samplers keep tensors of earlier steps, as a tensor or a list."""
_LATENTS = "latents", 0
"""The first place of a row's state, before its memory."""

_Place = tuple[str, int]


def is_linear(sampler: Any) -> bool:
    """Return whether results scale with their inputs. They do not if a sampler clips its
    prediction.
    """
    random = torch.randn(4, 1, 8, generator=torch.Generator().manual_seed(0))
    ends = []
    for size in (1.0, 10.0):
        probe_sampler = copy.deepcopy(sampler)
        probe_sampler.set_timesteps(3)
        latents, *answers = (size * random).unbind()
        for timestep, answer in zip(probe_sampler.timesteps, answers, strict=False):
            probe_sampler.scale_model_input(latents, timestep)
            latents = probe_sampler.step(answer, timestep, latents, return_dict=False)[0]
        ends.append(latents / size)
    return torch.allclose(ends[0], ends[1], rtol=1e-3, atol=1e-3)


class ProbedStep(NamedTuple):
    """A step taken with unit vectors for each tensor before it and for the answer."""

    before: list[_Place]
    after: dict[_Place, Tensor]
    """[tensors before + 1] each."""


def probed(sampler: Any, timestep: Tensor) -> ProbedStep:
    """Take a step with unit vectors; the sampler's memory is replaced."""
    memory = _remembered(sampler)
    # Some samplers take apart a batch [1, numbers].
    latents, *units, answer = torch.eye(len(memory) + 2, dtype=torch.float64)[:, None].unbind()
    for (name, index), unit in zip(memory, units, strict=True):
        if isinstance(getattr(sampler, name), list):
            getattr(sampler, name)[index] = unit
        else:
            setattr(sampler, name, unit)
    moved = sampler.step(answer, timestep, latents, return_dict=False)[0]
    state_after = {_LATENTS: moved, **_remembered(sampler)}
    return ProbedStep(
        [_LATENTS, *memory], {place: row.flatten() for place, row in state_after.items()}
    )


def matrices(steps: Sequence[ProbedStep]) -> Tensor:
    """Return [n, K, K + 1] matrices of n consecutive steps: from K tensors (latents and memory) and
    the model's answer to the next K. Memory that no step reads is omitted.
    """
    read = {
        place
        for step in steps
        for number, place in enumerate(step.before)
        if place == _LATENTS
        or any(factors_of_place[number] for factors_of_place in step.after.values())
    }
    places = sorted(read, key=lambda place: (place != _LATENTS, place))
    column = {place: number for number, place in enumerate(places)}
    step_matrices = torch.zeros(len(steps), len(places), len(places) + 1)
    for matrix, (before, after) in zip(step_matrices, steps, strict=True):
        for place, factors in after.items():
            if place not in column:
                continue
            row = matrix[column[place]]
            row[-1] = factors[-1]
            for factors_of_place, factor in zip(before, factors, strict=False):
                if factors_of_place in column:
                    row[column[factors_of_place]] = factor
    return step_matrices


def _remembered(sampler: Any) -> dict[_Place, Tensor]:
    """Return the tensors of earlier steps, by attribute and index in its list."""
    tensors = {}
    for name in _MEMORY:
        stored = getattr(sampler, name, None)
        for index, item in enumerate(stored if isinstance(stored, list) else [stored]):
            if isinstance(item, Tensor):
                tensors[name, index] = item
    return tensors
