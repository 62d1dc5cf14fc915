"""Schedules of rows: sigma and timestep of each step, as the model's sampler sets them.

The sampler is diffusers' Euler sampler (FlowMatchEulerDiscreteScheduler) or a multistep one. The
step of a multistep sampler is a matrix (`stages.linear_steps`): from it a row computes the velocity
that moves its latents as the sampler would.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from maskserve_common.config import Config, ConfigError
from maskserve_common.contracts.request import model_steps, steps_run
from maskserve_engine.stages.linear_steps import matrices, probed
from maskserve_engine.stages.loader import load_plain, sampler_name


class Walk(NamedTuple):
    """Numbers of one step; each has a float32's value."""

    timestep: float
    """Timestep that the model sees, 0 to 1000."""
    sigma: float
    change: float
    """Sigma of the next step less this one; negative."""


Move = tuple[tuple[float, ...], ...]
"""Matrix of K rows and K + 1 columns. It takes the latents, K - 1 kept tensors and the model's
answer to the next latents and kept tensors."""


@dataclass(frozen=True, slots=True)
class Schedule:
    sigmas: Tensor
    """[steps + 1] float32; the last one is 0."""
    walk: tuple[Walk, ...]
    moves: tuple[Move, ...] = ()
    """Matrix of each step, if the sampler is a multistep one; otherwise empty."""

    @property
    def steps(self) -> int:
        return len(self.walk)


_EULER = "FlowMatchEulerDiscreteScheduler"
_TAKES_SIGMAS = (_EULER, "UniPCMultistepScheduler")
_SERVED = (*_TAKES_SIGMAS, "DPMSolverMultistepScheduler")


def load_sampler(config: Config, *, passes_sigmas: bool, shift: float | None = None) -> Any:
    """Load the sampler of a model folder.

    Args:
        config: the worker's configuration.
        passes_sigmas: whether the pipeline passes sigmas to the sampler.
        shift: schedule shift of the Euler sampler that a folder without a sampler gets; None: the
            folder must have one.

    Raises:
        ConfigError: the sampler's class is not served. It could load the folder's options, but
            would step all edits in another way.
    """
    import diffusers

    if shift is not None and not (Path(config.model.path) / "scheduler").is_dir():
        return diffusers.FlowMatchEulerDiscreteScheduler(shift=shift)
    name = sampler_name(config)
    _check_name(name, _TAKES_SIGMAS if passes_sigmas else _SERVED)
    sampler = load_plain(config, "scheduler", getattr(diffusers, name))
    if sampler.config.get("shift_terminal") and config.model.num_inference_steps == 1:
        raise ConfigError(
            "[model] num_inference_steps: 1 cannot be stretched to the sampler's shift_terminal; "
            "use 2 or more"
        )
    return sampler


def check_sampler(sampler: Any) -> None:
    """Refuse samplers whose steps this engine does not reproduce.

    Raises:
        ConfigError: the class is not served, or with these options it draws noise, is not linear,
            or does not fit flow models.
    """
    name, config = type(sampler).__name__, sampler.config
    _check_name(name, _SERVED)
    if name != _EULER:
        _check_multistep(name, config)
    if sampler.config.get("stochastic_sampling", False) or sampler.config.get(
        "invert_sigmas", False
    ):
        raise ConfigError("[model] path: stochastic or inverted samplers are not served")


def _check_name(name: str, served: Sequence[str]) -> None:
    if name not in served:
        raise ConfigError(
            f"[model] path: sampler {name} is not served with this model; served: "
            f"{', '.join(served)}"
        )


def _check_multistep(name: str, config: Mapping[str, Any]) -> None:
    for key, value in {
        "use_flow_sigmas": True,
        "prediction_type": "flow_prediction",
        "final_sigmas_type": "zero",
        "num_train_timesteps": 1000,
        "thresholding": False,
        "solver_p": None,
        "predict_x0": True,
    }.items():
        if config.get(key, value) != value:
            raise ConfigError(
                f"[model] path: sampler {name}: {key} {config[key]} is not served with this model; "
                f"use {value}"
            )
    if str(config.get("algorithm_type", "")).startswith("sde"):
        raise ConfigError(
            f"[model] path: sampler {name}: algorithm_type {config['algorithm_type']} draws noise "
            "as it goes; not served"
        )


Shift = Callable[[Mapping[str, Any], int, int], float | None]
"""(sampler's config, image tokens, steps) -> shift `mu` of the schedule, which grows with the
picture. None: the pipeline passes no shift and no sigmas, only the number of steps."""


def linear_shift(config: Mapping[str, Any], tokens: int, steps: int) -> float:
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
    sigmas: Sequence[float] = (),
    *,
    flow_sigmas: bool = False,
) -> Schedule:
    """Return the schedule of diffusers' pipelines for flow models.

    Args:
        sampler: the model's sampler; several threads may use it.
        steps: num_inference_steps.
        tokens: number of image tokens; the schedule of most models depends on it.
        strength: share of the steps, the last ones, that an edit runs.
        shift: function of the family that computes `mu`.
        sigmas: `ModelSpec.sigmas`; empty: those of the pipeline.
        flow_sigmas: whether a sampler with `use_flow_sigmas` chooses the sigmas itself.
    """
    assert not sigmas or len(sigmas) == steps, "other steps are refused of such models"
    mu, begin = shift(sampler.config, tokens, steps), steps - steps_run(steps, strength)
    chooses_sigmas = flow_sigmas and bool(sampler.config.get("use_flow_sigmas"))
    if type(sampler).__name__ == _EULER:
        sampler = _with_timesteps(copy.copy(sampler), steps, mu, _pipeline_sigmas(steps, sigmas))
        return _schedule(sampler, begin, ())
    listed_sigmas = () if chooses_sigmas else _pipeline_sigmas(steps, sigmas)
    return _multistep(sampler, steps, mu, begin, listed_sigmas)


def at_model_steps(schedule: Schedule, interval: int) -> Schedule:
    """Return the schedule of the steps in which the model runs (`model_steps`). Each of them also
    takes the steps up to the next one, whose answers lie on a line through its own answer and the
    one before, over the number of the step (TaylorSeer, arXiv 2503.06923, of first order).
    """
    count = schedule.steps
    computed = model_steps(count, interval)
    if len(computed) == count:
        return schedule
    ends = (*computed[1:], count)
    euler = [((1.0, step.change),) for step in schedule.walk]
    moves = [np.array(move) for move in schedule.moves or euler]
    walk, joined, before = list[Walk](), list[Move](), None
    for step, end in zip(computed, ends, strict=True):
        slope = 0.0 if before is None else 1.0 / (step - before)
        joined.append(_joined(moves[step:end], slope))
        change = sum(at.change for at in schedule.walk[step:end])
        walk.append(schedule.walk[step]._replace(change=change))
        before = step
    return Schedule(schedule.sigmas[[*computed, count]], tuple(walk), tuple(joined))


def _joined(moves: Sequence[NDArray[np.float64]], slope: float) -> Move:
    """Return the matrix of several steps, whose kept tensors are the sampler's and the model's last
    answer. The steps' own matrices take answer + slope * n * (answer - last answer) at step n.
    """
    size = len(moves[0])
    state = np.eye(size, size + 2)  # by columns: latents, kept tensors, last answer, answer
    for n, move in enumerate(moves):
        answer = np.zeros(size + 2)
        answer[-2:] = -slope * n, 1.0 + slope * n
        state = move @ np.vstack((state, answer))
    kept_answer = np.eye(1, size + 2, size + 1)
    return _tuples(np.vstack((state, kept_answer)).tolist())


def _pipeline_sigmas(steps: int, sigmas: Sequence[float]) -> tuple[float, ...]:
    """Return the sigmas that pipelines pass to their sampler."""
    return tuple(sigmas) or tuple(np.linspace(1.0, 1 / steps, steps).tolist())


def _with_timesteps(sampler: Any, steps: int, mu: float | None, sigmas: tuple[float, ...]) -> Any:
    """Return the sampler with the timesteps that diffusers' pipeline sets; empty `sigmas`: the
    sampler chooses them.
    """
    if mu is None:
        sampler.set_timesteps(steps)
    elif sigmas:
        sampler.set_timesteps(sigmas=np.array(sigmas), mu=mu)
    else:
        sampler.set_timesteps(steps, mu=mu)
    return sampler


def _schedule(sampler: Any, begin: int, moves: tuple[Move, ...]) -> Schedule:
    sigmas, timesteps = sampler.sigmas[begin:].clone(), sampler.timesteps[begin:]
    columns = timesteps.tolist(), sigmas[:-1].tolist(), sigmas.diff().tolist()
    return Schedule(sigmas, tuple(Walk(*step) for step in zip(*columns, strict=True)), moves)


@lru_cache(maxsize=256)
def _multistep(
    sampler: Any, steps: int, mu: float | None, begin: int, sigmas: tuple[float, ...]
) -> Schedule:
    """Return a multistep sampler's schedule. Cached, because probing takes milliseconds a step."""
    sampler = _with_timesteps(copy.deepcopy(sampler), steps, mu, sigmas)
    sampler.set_begin_index(begin)
    probe_sampler = copy.deepcopy(sampler)
    moves = matrices(
        [probed(probe_sampler, timestep) for timestep in probe_sampler.timesteps[begin:]]
    )
    return _schedule(sampler, begin, tuple(_tuples(move) for move in moves.tolist()))


def _tuples(move: list[list[float]]) -> Move:
    return tuple([tuple(row) for row in move])
