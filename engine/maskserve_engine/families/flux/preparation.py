"""What the rows of an edit begin with, as far as it follows from its job alone: in host memory."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from maskserve_core.contracts.control_range import acting
from maskserve_core.imaging.masks import TokenIds, active_tokens
from maskserve_core.models.facts import ModelFacts
from maskserve_engine.batch.flow import Schedule
from maskserve_engine.cache.loader import Selection
from maskserve_engine.families.flux.conditioning import (
    PATCH,
    FluxInputs,
    FluxPrompt,
    FluxStart,
    FluxTemplate,
    pack_latents,
    start_fill,
    start_inpaint,
    template_inputs,
)
from maskserve_engine.families.flux.schedule import make_schedule
from maskserve_engine.job import Conditioning, ControlInput, EditJob
from maskserve_engine.stages.latents import Posterior


@dataclass(frozen=True, slots=True)
class FluxPrepared:
    """Of one job."""

    inputs: FluxInputs
    """Of all tokens."""
    template: FluxTemplate | None
    """Of all tokens, once prepared: of edits whose rows may read or make entries."""
    active: TokenIds
    """Of a cached row."""
    selection: Selection
    """The other tokens."""
    controls: tuple[tuple[ControlInput, Tensor], ...] = ()
    """Those that act, each with its picture's latents as tokens, [N, 4C]."""


class FluxPreparation:
    """Prepares jobs; used by any thread.

    Args:
        facts: what the model folder says.
        sampler: FlowMatchEulerDiscreteScheduler, used for its sigmas only.
        dtype: of the model.
        outside_noise: `[model] outside_noise`.
    """

    def __init__(
        self,
        facts: ModelFacts,
        sampler: Any,
        *,
        dtype: torch.dtype,
        outside_noise: str,
    ) -> None:
        self._facts, self._sampler = facts, sampler
        self._dtype = dtype
        self._shares_noise = outside_noise == "template"

    def prepared(self, job: EditJob) -> FluxPrepared:
        """The job's own, if it has been prepared; else without `template`."""
        if isinstance(job.prepared, FluxPrepared):
            return job.prepared
        schedule, active = self.schedule(job), self.active(job)
        generator = torch.Generator("cpu").manual_seed(job.request.seed)
        controls = self._controls(job, schedule, generator)  # they draw first
        inputs = FluxInputs(
            schedule,
            self._start(job, schedule, generator),
            self.prompt(job.conditioning),
            None if job.negative is None else self.prompt(job.negative),
        )
        return FluxPrepared(inputs, None, active, _others(job, active), controls)

    def with_ring(self, job: EditJob, ring: int) -> EditJob:
        """See `Adapter.with_ring`."""
        ringed = job.with_ring(ring)
        if not isinstance(job.prepared, FluxPrepared):
            return ringed
        active = active_tokens(job.edit_mask, self._facts.token_pixels, ring)
        own = replace(job.prepared, active=active, selection=_others(job, active))
        return replace(ringed, prepared=own)

    def template(self, job: EditJob, noise_seed: int) -> FluxTemplate:
        """The job's own, if it has been prepared; else draws the template's noise."""
        own = job.prepared.template if isinstance(job.prepared, FluxPrepared) else None
        return own or template_inputs(self._posterior(job.moments), noise_seed)

    def active(self, job: EditJob) -> TokenIds:
        """Which tokens a cached row computes."""
        if isinstance(job.prepared, FluxPrepared):
            return job.prepared.active
        return active_tokens(job.edit_mask, self._facts.token_pixels, job.mask_ring)

    def schedule(self, job: EditJob) -> Schedule:
        if isinstance(job.prepared, FluxPrepared):
            return job.prepared.inputs.schedule
        settings, (height, width) = job.request.settings, grid_of(job)
        steps = settings.num_inference_steps
        assert steps is not None
        return make_schedule(self._sampler, steps, height * width, settings.strength)

    def prompt(self, given: Conditioning) -> FluxPrompt:
        """What the text encoders answered, in the model's dtype."""
        embeds, pooled = given["prompt_embeds"], given["pooled"]
        return FluxPrompt(*(torch.from_numpy(each).to(self._dtype) for each in (embeds, pooled)))

    def _controls(
        self, job: EditJob, schedule: Schedule, generator: torch.Generator
    ) -> tuple[tuple[ControlInput, Tensor], ...]:
        """Draw the latents of the edit's control pictures."""
        found = []
        for control in acting(job.controls, schedule.steps):
            assert control.moments is not None, "FLUX's control pictures come encoded"
            found.append(
                (control, pack_latents(self._posterior(control.moments).sample(generator)))
            )
        return tuple(found)

    def _start(self, job: EditJob, schedule: Schedule, generator: torch.Generator) -> FluxStart:
        """Draw everything else random of the edit, in the pipeline's own order, on the CPU."""
        image, factor = self._posterior(job.moments), self._facts.vae_scale_factor
        if self._facts.semantics == "fill":
            masked = self._posterior(job.masked_moments)
            return start_fill(image, masked, job.edit_mask, factor, schedule, generator)
        seed = job.request.template_noise_seed if self._shares_noise else None
        return start_inpaint(image, job.edit_mask, factor, schedule, generator, seed)

    def _posterior(self, moments: NDArray[np.float32]) -> Posterior:
        return Posterior(moments, self._facts.latents, self._dtype)


def grid_of(job: EditJob) -> tuple[int, int]:
    """Rows and columns of the edit's tokens."""
    _, height, width = job.moments.shape
    return height // PATCH, width // PATCH


def _others(job: EditJob, active: TokenIds) -> Selection:
    """The tokens that a cached row of it does not compute."""
    height, width = grid_of(job)
    return Selection([np.setdiff1d(np.arange(height * width), active)])
