"""A model's diffusers sampler, and its steps as factors that move all rows at once."""

from __future__ import annotations

import copy
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from maskserve_common.config import Config, ConfigError
from maskserve_common.contracts.request import steps_run
from maskserve_engine.spec.model_spec import ModelSpec
from maskserve_engine.stages.linear_steps import is_linear, matrices, probed
from maskserve_engine.stages.loader import load_plain, sampler_name

_SERVED = (
    "DDIMScheduler",
    "DPMSolverMultistepScheduler",
    "EulerDiscreteScheduler",
    "PNDMScheduler",
    "UniPCMultistepScheduler",
)
TRAINED_STEPS = 1000
"""Number of timesteps that every served model was trained on."""


def load_sampler(config: Config, spec: ModelSpec) -> Any:
    """Load the sampler of the model's folder, with the options that diffusers' pipeline sets.

    Raises:
        ConfigError: it is not served.
    """
    import diffusers

    class_name = sampler_name(config)
    if class_name not in _SERVED:
        raise _refused(class_name, f" is not served with UNets; served: {', '.join(_SERVED)}")
    sampler = load_plain(config, "scheduler", getattr(diffusers, class_name))
    if not spec.micro_conditioning and sampler.config.get("steps_offset", 1) != 1:
        # Stable Diffusion's pipelines, other than SDXL's, set it whatever the folder says.
        sampler = type(sampler).from_config(sampler.config, steps_offset=1)
    return sampler


def _refused(name: str, reason: str) -> ConfigError:
    return ConfigError(f"[model] path: sampler {name}{reason}")


def check_sampler(sampler: Any) -> None:
    """Refuse settings with which rows would be stepped differently from diffusers' pipeline.

    Raises:
        ConfigError: names the sampler or its option.
    """
    name, config = type(sampler).__name__, sampler.config
    if config.num_train_timesteps != TRAINED_STEPS:
        raise _refused(
            name, f" has {config.num_train_timesteps} train timesteps, not {TRAINED_STEPS}"
        )
    if config.prediction_type not in ("epsilon", "v_prediction"):
        raise _refused(name, f": prediction_type {config.prediction_type} is not served")
    if str(config.get("algorithm_type", "")).startswith("sde"):
        raise _refused(
            name, f": algorithm_type {config.algorithm_type} draws noise as it goes; not served"
        )
    if str(config.get("variance_type", "")).startswith("learned"):
        raise _refused(name, f": variance_type {config.variance_type} is not served")
    if config.get("thresholding", False):
        raise _refused(name, ": thresholding looks at whole images; not served")
    if config.get("solver_p") is not None:
        raise _refused(name, ": solver_p, a sampler inside the sampler, is not served")
    if name == "PNDMScheduler" and not config.skip_prk_steps:
        raise _refused(name, ": skip_prk_steps must be true, as diffusers' pipelines set it")


class StepFactors(NamedTuple):
    """Factors of a row's tensors in each of n steps, float32 in host memory."""

    scales: Tensor
    """[n] scale of the latents in the model's input."""
    pins: Tensor
    """[n, 2] signal and noise share of a template in the model's input."""
    moves: Tensor | None
    """[n, K, K + 1] matrix from the row's state and the model's answer to the next state. A state
    has K tensors: latents and the sampler's memory. None: steps are not linear."""
    sources: Tensor
    """[n, 2] signal and noise share of an image as noisy as the latents after a step; (1, 0) after
    the last one."""

    def part(self, begin: int, end: int) -> StepFactors:
        at = slice(begin, end)
        moves = None if self.moves is None else self.moves[at]
        return StepFactors(self.scales[at], self.pins[at], moves, self.sources[at])


class UnetSchedule:
    """The steps of edits with this number of steps and strength, exactly as in diffusers'
    pipelines. Rows share it: it has no state.

    Each step is a matrix probed from diffusers' sampler (`stages.linear_steps`).
    """

    def __init__(self, model: Any, levels: NoiseLevels, steps: int, strength: float = 1.0) -> None:
        self._sampler = copy.deepcopy(model)
        self._sampler.set_timesteps(steps)
        begin = (steps - steps_run(steps, strength, rounds_up=False)) * self._sampler.order
        self._timesteps: Tensor = self._sampler.timesteps[begin:]
        if hasattr(self._sampler, "set_begin_index"):
            self._sampler.set_begin_index(begin)
        self.timesteps = tuple(map(float, self._timesteps))
        """Timestep of each model call; PNDM makes one more than it has steps."""
        self.whole = strength == 1.0
        """Whether latents start as pure noise."""
        self._levels = levels

    def start(self, clean: Tensor | None, noise: Tensor) -> Tensor:
        """Return the initial latents; `clean` is not read at full strength."""
        if self.whole:
            return noise * self._sampler.init_noise_sigma
        assert clean is not None
        signal, share = _noised(self._sampler, self._timesteps[:1], clean.dtype)
        return signal * clean + share * noise

    def state(self, latents: Tensor) -> Tensor:
        """Return the initial state [K, C, h, w] float32 from [C, h, w] latents; the memory is 0."""
        moves = self.factors.moves
        remembered = 0 if moves is None else moves.shape[1] - 1
        return F.pad(latents.float()[None], (0, 0) * 3 + (0, remembered))

    def move(self, answer: Tensor, step: int, latents: Tensor) -> Tensor:
        """Return the latents after a step, from the guided answer, for samplers without `moves`.
        Only samplers without memory are not linear.
        """
        timestep = self._timesteps[step]
        moved: Tensor = self._sampler.step(answer, timestep, latents, return_dict=False)[0]
        return moved

    @cached_property
    def factors(self) -> StepFactors:
        scales, sources, steps = [], [], []
        sampler, unit = copy.deepcopy(self._sampler), torch.ones(1, dtype=torch.float64)
        linear = is_linear(sampler)
        for step, timestep in enumerate(self._timesteps):
            at = self._timesteps[step : step + 1]
            sources.append(torch.cat(_noised(sampler, at, unit.dtype)))
            scales.append(sampler.scale_model_input(unit, timestep))
            if linear:
                steps.append(probed(sampler, timestep))
        return StepFactors(
            torch.cat(scales).float(),
            torch.tensor([self._levels.at(timestep) for timestep in self.timesteps]),
            matrices(steps) if linear else None,
            torch.stack([*sources[1:], torch.tensor([1.0, 0.0])]).float(),
        )


def _noised(sampler: Any, timestep: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return [1] signal and [1] noise share at a timestep; a sampler with a step counter must be at
    that step.
    """
    unit, zero = torch.ones(1, dtype=dtype), torch.zeros(1, dtype=dtype)
    return sampler.add_noise(unit, zero, timestep), sampler.add_noise(zero, unit, timestep)


class NoiseLevels:
    """Signal and noise share of a model's input, at every timestep it was trained on.

    Whatever the sampler, the model's input is signal · latents + noise share · noise, and signal² +
    share² is 1; only the samplers' latents are scaled differently.
    """

    def __init__(self, sampler: Any) -> None:
        self._sigma = ((1 - sampler.alphas_cumprod.double()) / sampler.alphas_cumprod).sqrt()
        self._predicts_velocity = sampler.config.prediction_type == "v_prediction"
        self.at = lru_cache(maxsize=4096)(self._at)

    def __getstate__(self) -> dict[str, Any]:
        """Drop the cache of `at`, for another process."""
        return {name: value for name, value in vars(self).items() if name != "at"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.at = lru_cache(maxsize=4096)(self._at)

    def _at(self, timestep: float) -> tuple[float, float]:
        """Return (signal, noise share) at a timestep; sigma is interpolated between two of them."""
        place = min(max(timestep, 0.0), TRAINED_STEPS - 1.0)
        below = int(place)
        # The last sigma is infinite where the noisiest input has no signal left.
        sigma = self._sigma[below]
        if place > below:
            sigma = sigma + (place - below) * (self._sigma[below + 1] - sigma)
        signal = float((sigma**2 + 1) ** -0.5)
        return signal, (1 - signal**2) ** 0.5

    def mixed(self, clean: Tensor, noise: Tensor, timestep: float) -> Tensor:
        signal, share = self.at(timestep)
        return signal * clean + share * noise

    def estimate(self, model_input: Tensor, answer: Tensor, timestep: float) -> Tensor:
        signal, share = self.at(timestep)
        if self._predicts_velocity:
            return signal * model_input - share * answer
        return (model_input - share * answer) / signal

    def velocity(self, model_input: Tensor, answer: Tensor, timestep: float) -> Tensor:
        """Return the answer as velocity, signal · noise - noise share · latents: its error is that
        of the picture at any timestep.
        """
        if self._predicts_velocity:
            return answer
        signal, share = self.at(timestep)
        return (answer - share * model_input) / signal

    def noise_in(self, model_input: Tensor, answer: Tensor, timestep: float) -> Tensor:
        signal, share = self.at(timestep)
        return share * model_input + signal * answer if self._predicts_velocity else answer
