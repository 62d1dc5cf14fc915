"""A row's own diffusers sampler, with whatever it remembers of the steps it took."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from maskserve_core.config import Config, ConfigError
from maskserve_core.contracts.request import steps_run
from maskserve_core.models.facts import ModelFacts
from maskserve_engine.stages.loader import load_plain, sampler_name

_SERVED = (
    "DDIMScheduler",
    "DPMSolverMultistepScheduler",
    "EulerDiscreteScheduler",
    "PNDMScheduler",
)
TRAINED_STEPS = 1000
"""Timesteps that every served model was trained on."""
_MEMORY = (
    "_step_index",
    "is_scale_input_called",
    "model_outputs",
    "lower_order_nums",
    "ets",
    "counter",
    "cur_sample",
    "cur_model_output",
)
"""What the served samplers change in themselves as they go."""


def load_sampler(config: Config, facts: ModelFacts) -> Any:
    """The sampler that the model's folder names, with the options that diffusers' pipeline gives
    it; ConfigError if it is not served.
    """
    import diffusers

    named = sampler_name(config)
    if named not in _SERVED:
        raise _refused(named, f" is not served with UNets; served: {', '.join(_SERVED)}")
    sampler = load_plain(config, "scheduler", getattr(diffusers, named))
    if not facts.micro_conditioning and sampler.config.get("steps_offset", 1) != 1:
        # Stable Diffusion's pipelines, other than SDXL's, set it whatever the folder says.
        sampler = type(sampler).from_config(sampler.config, steps_offset=1)
    return sampler


def _refused(name: str, what: str) -> ConfigError:
    return ConfigError(f"[model] path: sampler {name}{what}")


def check_sampler(sampler: Any) -> None:
    """Refuse settings with which rows could not be stepped here as diffusers' pipeline steps them.

    Raises:
        ConfigError: naming the sampler or its option.
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
    if name == "PNDMScheduler" and not config.skip_prk_steps:
        raise _refused(name, ": skip_prk_steps must be true, as diffusers' pipelines set it")


class Sampler:
    """Steps of one row, exactly as diffusers' inpainting pipelines take them.

    Args:
        model: the model's sampler; it is copied, and what it holds of other rows is dropped.
        steps: num_inference_steps.
        strength: share of the steps that is run.
    """

    def __init__(self, model: Any, steps: int, strength: float = 1.0) -> None:
        self._own = copy.deepcopy(model)
        self._own.set_timesteps(steps)
        begin = (steps - steps_run(steps, strength, rounds_up=False)) * self._own.order
        self.timesteps: Tensor = self._own.timesteps[begin:]
        """[n] model calls: PNDM makes one more than it has steps."""
        if hasattr(self._own, "set_begin_index"):
            self._own.set_begin_index(begin)
        self.whole = strength == 1.0
        """Whether latents begin as pure noise."""

    def start(self, clean: Tensor | None, noise: Tensor) -> Tensor:
        """Latents before the first step; `clean` is not read at full strength."""
        if self.whole:
            return noise * self._own.init_noise_sigma
        assert clean is not None
        return self.noised(clean, noise, 0)

    def noised(self, clean: Tensor, noise: Tensor, step: int) -> Tensor:
        """`clean` as noisy as the latents are before `step`; the row is at that step."""
        at = self.timesteps[step : step + 1]
        one, zero = torch.ones(1, dtype=clean.dtype), torch.zeros(1, dtype=clean.dtype)
        # With `clean` itself it would take its factors to the device, and wait for that.
        signal, share = self._own.add_noise(one, zero, at), self._own.add_noise(zero, one, at)
        return signal[0] * clean + share[0] * noise

    def scaled(self, latents: Tensor, step: int) -> Tensor:
        """The latents as the model takes them."""
        return self._own.scale_model_input(latents, self.timesteps[step])

    def move(self, answer: Tensor, step: int, latents: Tensor) -> Tensor:
        """The latents after `step`, from the model's guided answer."""
        return self._own.step(answer, self.timesteps[step], latents, return_dict=False)[0]

    def memory(self) -> dict[str, Any]:
        """What it remembers of the steps it took: numbers and tensors, some in tuples."""
        own = vars(self._own)
        found = {name: own[name] for name in _MEMORY if name in own}
        return {name: tuple(x) if isinstance(x, list) else x for name, x in found.items()}

    def remember(self, memory: Mapping[str, Any]) -> None:
        """Go on from the `memory` of the same row's sampler elsewhere."""
        own = {name: list(x) if isinstance(x, tuple) else x for name, x in memory.items()}
        vars(self._own).update(own)


class NoiseLevels:
    """How a model's inputs are mixed of image and noise, at every timestep it was trained on.

    Whatever the sampler, what the model takes is signal · latents + noise share · noise, and
    signal² + share² is 1; only the samplers' own latents are scaled differently.
    """

    def __init__(self, sampler: Any) -> None:
        self._signal = sampler.alphas_cumprod.double().sqrt()
        self._sigma = ((1 - sampler.alphas_cumprod.double()) / sampler.alphas_cumprod).sqrt()
        self._predicts_velocity = sampler.config.prediction_type == "v_prediction"
        self.at = lru_cache(maxsize=4096)(self._at)

    def __getstate__(self) -> dict[str, Any]:
        """Without what `at` has kept: to another process only the levels go."""
        return {name: value for name, value in vars(self).items() if name != "at"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.at = lru_cache(maxsize=4096)(self._at)

    def _at(self, timestep: float) -> tuple[float, float]:
        """(signal, noise share) at a timestep; between two of them sigma is interpolated."""
        place = min(max(timestep, 0.0), TRAINED_STEPS - 1.0)
        below = min(int(place), TRAINED_STEPS - 2)
        sigma = torch.lerp(self._sigma[below], self._sigma[below + 1], place - below)
        signal = float((sigma**2 + 1) ** -0.5)
        return signal, float(sigma) * signal

    def mixed(self, clean: Tensor, noise: Tensor, timestep: float) -> Tensor:
        """The model's input for an image and its noise."""
        signal, share = self.at(timestep)
        return signal * clean + share * noise

    def estimate(self, taken: Tensor, answer: Tensor, timestep: float) -> Tensor:
        """The image that the model expects, from what it took and answered."""
        signal, share = self.at(timestep)
        if self._predicts_velocity:
            return signal * taken - share * answer
        return (taken - share * answer) / signal
