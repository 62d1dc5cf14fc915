"""A row's own walk through the sampler's sigmas."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from maskserve_core.config import ConfigError
from maskserve_core.contracts.settings_rules import steps_run


class Walk(NamedTuple):
    """One step in plain numbers, each exactly a float32."""

    timestep: float
    """0 to 1000, what the model is told."""
    sigma: float
    change: float
    """Of sigma, to the next step: negative."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """Flow-matching Euler steps of one row."""

    sigmas: Tensor
    """[n + 1] float32, the last one 0."""
    walk: tuple[Walk, ...]

    @property
    def steps(self) -> int:
        return len(self.walk)


def check_sampler(sampler: Any) -> None:
    """Refuse samplers whose step this engine does not reproduce.

    Raises:
        ConfigError: another class than FlowMatchEulerDiscreteScheduler, or a stochastic one.
    """
    name = type(sampler).__name__
    if name != "FlowMatchEulerDiscreteScheduler":
        raise ConfigError(f"[model] path: sampler {name} is not served with Flux models")
    if sampler.config.get("stochastic_sampling", False) or sampler.config.get(
        "invert_sigmas", False
    ):
        raise ConfigError("[model] path: stochastic or inverted samplers are not served")


def make_schedule(sampler: Any, steps: int, tokens: int, strength: float = 1.0) -> Schedule:
    """The schedule that FluxFillPipeline and FluxInpaintPipeline use.

    Args:
        sampler: FlowMatchEulerDiscreteScheduler, which several threads may ask.
        steps: num_inference_steps.
        tokens: image tokens, which shift the schedule of most Flux models.
        strength: share of the steps that is run.
    """
    sampler, config = copy.copy(sampler), sampler.config  # setting timesteps changes it
    base, top = config.get("base_image_seq_len", 256), config.get("max_image_seq_len", 4096)
    low, high = config.get("base_shift", 0.5), config.get("max_shift", 1.15)
    slope = (high - low) / (top - base)
    mu = tokens * slope + (low - slope * base)
    sampler.set_timesteps(sigmas=np.linspace(1.0, 1 / steps, steps), mu=mu)
    begin = steps - steps_run(steps, strength)
    sigmas, timesteps = sampler.sigmas[begin:].clone(), sampler.timesteps[begin:]
    columns = timesteps.tolist(), sigmas[:-1].tolist(), sigmas.diff().tolist()
    return Schedule(sigmas, tuple(Walk(*step) for step in zip(*columns, strict=True)))
