"""The walk of one row through the sigmas, and the sampler that it is asked of."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from maskserve_core.config import Config, ConfigError
from maskserve_core.contracts.request import steps_run
from maskserve_engine.stages.loader import load_plain, sampler_name


class Walk(NamedTuple):
    """One step in plain numbers, each exactly a float32."""

    timestep: float
    """0 to 1000, what the model is told."""
    sigma: float
    change: float
    """Of sigma, to the next step: negative."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """Flow-matching Euler steps of one row: its own walk through the sigmas."""

    sigmas: Tensor
    """[n + 1] float32, the last one 0."""
    walk: tuple[Walk, ...]

    @property
    def steps(self) -> int:
        return len(self.walk)


_SERVED = "FlowMatchEulerDiscreteScheduler"


def load_sampler(config: Config) -> Any:
    """The sampler of a model folder.

    Raises:
        ConfigError: the folder names another class than FlowMatchEulerDiscreteScheduler. Its
            options would be read all the same, and every edit stepped in another way.
    """
    from diffusers import FlowMatchEulerDiscreteScheduler

    _check_name(sampler_name(config))
    sampler = load_plain(config, "scheduler", FlowMatchEulerDiscreteScheduler)
    if sampler.config.get("shift_terminal") and config.model.num_inference_steps == 1:
        raise ConfigError(
            "[model] num_inference_steps: 1 cannot be stretched to the sampler's shift_terminal; "
            "use 2 or more"
        )
    return sampler


def check_sampler(sampler: Any) -> None:
    """Refuse samplers whose step this engine does not reproduce.

    Raises:
        ConfigError: another class than FlowMatchEulerDiscreteScheduler, or a stochastic one.
    """
    _check_name(type(sampler).__name__)
    if sampler.config.get("stochastic_sampling", False) or sampler.config.get(
        "invert_sigmas", False
    ):
        raise ConfigError("[model] path: stochastic or inverted samplers are not served")


def _check_name(name: str) -> None:
    if name != _SERVED:
        raise ConfigError(
            f"[model] path: sampler {name} is not served with this model; served: {_SERVED}"
        )


Shift = Callable[[Mapping[str, Any], int, int], float | None]
"""By how much larger pictures are noised longer (`mu`), of a sampler's config, image tokens and
number of steps; None: the pipeline asks its sampler for so many steps and no more."""


def linear_shift(config: Mapping[str, Any], tokens: int, steps: int) -> float:
    """Of most pipelines: linear in the tokens."""
    base, top = config.get("base_image_seq_len", 256), config.get("max_image_seq_len", 4096)
    low, high = config.get("base_shift", 0.5), config.get("max_shift", 1.15)
    slope: float = (high - low) / (top - base)
    mu: float = tokens * slope + (low - slope * base)
    return mu


def make_schedule(
    sampler: Any,
    steps: int,
    tokens: int,
    strength: float = 1.0,
    shift: Shift = linear_shift,
    own: Sequence[float] = (),
) -> Schedule:
    """The schedule that diffusers' inpaint pipelines of such models use.

    Args:
        sampler: FlowMatchEulerDiscreteScheduler, which several threads may ask.
        steps: num_inference_steps.
        tokens: image tokens, which shift the schedule of most models.
        strength: share of the steps that is run.
        shift: the family's.
        own: `ModelFacts.sigmas`.
    """
    assert not own or len(own) == steps, "other steps are refused of such models"
    sampler, mu = copy.copy(sampler), shift(sampler.config, tokens, steps)  # it changes below
    if mu is None:
        sampler.set_timesteps(steps)
    else:
        sampler.set_timesteps(sigmas=own or np.linspace(1.0, 1 / steps, steps), mu=mu)
    begin = steps - steps_run(steps, strength)
    sigmas, timesteps = sampler.sigmas[begin:].clone(), sampler.timesteps[begin:]
    columns = timesteps.tolist(), sigmas[:-1].tolist(), sigmas.diff().tolist()
    return Schedule(sigmas, tuple(Walk(*step) for step in zip(*columns, strict=True)))
