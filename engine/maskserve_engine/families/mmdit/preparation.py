"""What the rows of an edit begin with, as far as it follows from its job alone: in host memory.

The schedule; latents packed into tokens, and all random numbers, in the order of the pipeline that
is served; Fill's extra channels, or what Inpaint blends in after each step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from maskserve_common.contracts.request import steps_run
from maskserve_common.contracts.settings import acting
from maskserve_common.imaging.masks import TokenIds, active_tokens, tokens_within, widened
from maskserve_engine.base.buckets import bucket
from maskserve_engine.base.job import Conditioning, ControlInput, EditJob
from maskserve_engine.cache.loader import Selection
from maskserve_engine.families.mmdit.schedule import Schedule, Shift, linear_shift, make_schedule
from maskserve_engine.spec.facts import ModelFacts
from maskserve_engine.stages.latents import (
    Posterior,
    draw,
    is_soft,
    joins,
    noise_outside,
    outside_seed,
    template_noise,
)

BEFORE = "before"
"""Name of the states of a prompt's words that stand before the picture it is about, where the
family's denoiser has the picture itself in their midst."""
PATCH = 2  # latents per token along one side, fixed in diffusers' Flux pipelines


def pack_latents(latents: Tensor) -> Tensor:
    """[C, h, w] → tokens [h/2 · w/2, 4C], row-major."""
    c, h, w = latents.shape
    x = latents.view(c, h // PATCH, PATCH, w // PATCH, PATCH)
    return x.permute(1, 3, 0, 2, 4).reshape((h // PATCH) * (w // PATCH), c * PATCH * PATCH)


def unpack_latents(tokens: Tensor, grid: tuple[int, int]) -> Tensor:
    """Tokens [gh · gw, 4C] → [C, 2gh, 2gw]."""
    gh, gw = grid
    c = tokens.shape[1] // (PATCH * PATCH)
    x = tokens.view(gh, gw, c, PATCH, PATCH).permute(2, 0, 3, 1, 4)
    return x.reshape(c, gh * PATCH, gw * PATCH)


@dataclass(frozen=True, slots=True)
class FlowBlend:
    """Inpaint semantics: outside the mask, latents follow the noised source. So they do under its
    grey, until the edit takes them in (`latents.joins`).
    """

    mask: Tensor
    """[n, 4C] float32, 1 = edit."""
    clean: Tensor
    """[n, 4C] source latents."""
    noise: Tensor
    """[n, 4C] the request's noise."""

    def apply(self, latents: Tensor, sigma: Tensor, after: int, steps: int) -> Tensor:
        """Latents after so many of the row's steps, the last of which ended at `sigma`."""
        source = self.clean if after == steps else self.source(sigma)
        return torch.where(self.mask >= joins(after, steps), latents, source)

    def source(self, sigma: Tensor) -> Tensor:
        """[n, 4C] noised to `sigma`."""
        sigma = sigma.to(self.clean.dtype)
        return sigma * self.noise + (1.0 - sigma) * self.clean

    def take(self, index: Tensor) -> FlowBlend:
        return FlowBlend(
            *(tensor.index_select(0, index) for tensor in (self.mask, self.clean, self.noise))
        )


@dataclass(frozen=True, slots=True)
class FlowStart:
    """A row's tensors before its first step, all tokens, in the model's dtype."""

    latents: Tensor
    """[n, 4C]"""
    condition: Tensor | None
    """[n, extra channels] for Fill."""
    blend: FlowBlend | None
    """For Inpaint."""
    context: Tensor | None = None
    """[R, 4C] of the pictures that are only looked at, where the model takes any."""

    def take(self, index: Tensor) -> FlowStart:
        """Some image tokens, without the context."""
        return FlowStart(
            self.latents.index_select(0, index),
            None if self.condition is None else self.condition.index_select(0, index),
            None if self.blend is None else self.blend.take(index),
        )


def packed_mask(edit_mask: Tensor, factor: int, dtype: torch.dtype) -> Tensor:
    """Fill's mask channels [n, 4·factor²] of a [H, W] mask of 0 and 1."""
    h, w = edit_mask.shape[0] // factor, edit_mask.shape[1] // factor
    channels = edit_mask.view(h, factor, w, factor).permute(1, 3, 0, 2)
    return pack_latents(channels.reshape(factor * factor, h, w)).to(dtype)


def start_fill(
    image: Posterior,
    masked: Posterior,
    edit_mask: NDArray[np.uint8],
    factor: int,
    schedule: Schedule,
    generator: torch.Generator,
) -> FlowStart:
    """FluxFillPipeline's preparation; draws image sample, noise, masked-image sample, in order."""
    clean = image.sample(generator)
    noise = draw(clean.shape, generator, clean.dtype)
    latents = _mixed(clean, noise, schedule)
    mask = torch.from_numpy(edit_mask > 0).float()
    condition = torch.cat(
        (pack_latents(masked.sample(generator)), packed_mask(mask, factor, latents.dtype)), dim=1
    )
    blend = None
    if is_soft(edit_mask):
        strength = torch.from_numpy(edit_mask).float()[None, None] / 255
        blend = blended(clean, noise, F.adaptive_max_pool2d(strength, clean.shape[1:])[0])
    return FlowStart(pack_latents(latents), condition, blend)


def blended(clean: Tensor, noise: Tensor, mask: Tensor) -> FlowBlend:
    """Of [C, h, w] latents and a mask of them, [1, h, w] float32."""
    parts = (mask.expand_as(clean).contiguous(), clean, noise)
    return FlowBlend(*(pack_latents(part) for part in parts))


def start_inpaint(
    clean: Tensor,
    noise: Tensor,
    mask: Tensor,
    schedule: Schedule,
    seed: int | None,
) -> FlowStart:
    """FluxInpaintPipeline's preparation; the masked image that it encodes is never used.

    Args:
        clean: [C, h, w] of the source.
        noise: [C, h, w]
        mask: [1, h, w] float32, 1 = edit.
        schedule: the row's.
        seed: of the noise outside the mask; None: it is the edit's, too.
    """
    if seed is not None:
        noise = noise_outside(noise, mask, seed)
    latents = _mixed(clean, noise, schedule)
    return FlowStart(pack_latents(latents), None, blended(clean, noise, mask))


def _mixed(clean: Tensor, noise: Tensor, schedule: Schedule) -> Tensor:
    """Latents before the first step."""
    sigma = schedule.sigmas[0].to(clean.dtype)
    return sigma * noise + (1.0 - sigma) * clean


@dataclass(frozen=True, slots=True)
class FlowPrompt:
    """What text encoders answered, in the model's dtype."""

    embeds: Tensor
    """[T, T5 width]"""
    pooled: Tensor | None
    """[pooled width], where the family has it."""


@dataclass(frozen=True, slots=True)
class FlowInputs:
    """What a row begins with."""

    schedule: Schedule
    start: FlowStart
    prompt: FlowPrompt
    negative: FlowPrompt | None


@dataclass(frozen=True, slots=True)
class FlowTemplate:
    """The template's own model inputs: what priming runs on and inactive tokens are pinned to."""

    clean: Tensor
    """[n, 4C] posterior mode of the source."""
    noise: Tensor
    """[n, 4C] the template's own noise."""
    condition: Tensor | None
    """[n, extra channels]: for Fill the unmasked image and an empty mask."""
    context: Tensor | None = None
    """[R, 4C] of the pictures that are only looked at, where the model takes any."""

    def take(self, index: Tensor) -> FlowTemplate:
        """Some image tokens, and all of the context."""
        condition = None if self.condition is None else self.condition.index_select(0, index)
        clean, noise = self.clean.index_select(0, index), self.noise.index_select(0, index)
        return FlowTemplate(clean, noise, condition, self.context)

    def filled(self, factor: int) -> FlowTemplate:
        """With what Fill's models take besides; made where it is used, as it says nothing new."""
        mask = self.clean.new_zeros(len(self.clean), (PATCH * factor) ** 2)
        return replace(self, condition=torch.cat((self.clean, mask), dim=1))

    def at(self, sigma: Tensor) -> Tensor:
        """[n + R, in_channels] model inputs at `sigma`."""
        sigma = sigma.to(self.clean.dtype)
        latents = sigma * self.noise + (1.0 - sigma) * self.clean
        return model_inputs(latents, self.condition, self.context)


def model_inputs(latents: Tensor, condition: Tensor | None, context: Tensor | None) -> Tensor:
    """[n + R, in_channels] of latents [n, 4C] and what goes with them, beside and behind."""
    if condition is not None:
        latents = torch.cat((latents, condition), dim=1)
    return latents if context is None else torch.cat((latents, context))


def template_inputs(image: Posterior, noise_seed: int, *, context: bool) -> FlowTemplate:
    """Not `filled` yet; equal for every edit of the same pixels and noise seed."""
    clean = image.mode()
    noise = template_noise(clean.shape, noise_seed, clean.dtype)
    tokens = pack_latents(clean)
    return FlowTemplate(tokens, pack_latents(noise), None, tokens if context else None)


@dataclass(frozen=True, slots=True)
class FlowPrepared:
    """Of one job."""

    inputs: FlowInputs
    """Of all tokens."""
    template: FlowTemplate | None
    """Of all tokens, once prepared: of edits whose rows may read or make entries."""
    active: TokenIds
    """Of a cached row."""
    selection: Selection
    """The other tokens."""
    inner: TokenIds
    """Of a row that leaves the ring of its mask out."""
    ring: TokenIds
    """What that leaves out, of the same."""
    controls: tuple[tuple[ControlInput, Tensor], ...] = ()
    """Those that act, each with its picture's latents as tokens, [N, 4C]."""


class FlowPreparation:
    """Prepares jobs; used by any thread.

    Args:
        facts: what the model folder says.
        sampler: FlowMatchEulerDiscreteScheduler, used for its sigmas only.
        dtype: of the model.
        outside_noise: `[model] outside_noise`.
        shift: of the schedule.
        buckets: whether steps are recorded, so that cached rows compute as many tokens as their
            buckets have.
    """

    def __init__(
        self,
        facts: ModelFacts,
        sampler: Any,
        *,
        dtype: torch.dtype,
        outside_noise: str,
        shift: Shift = linear_shift,
        buckets: bool = False,
    ) -> None:
        self._facts, self._sampler = facts, sampler
        self._dtype, self._buckets = dtype, buckets
        self._outside_noise, self._shift = outside_noise, shift

    def prepared(self, job: EditJob) -> FlowPrepared:
        """The job's own, if it has been prepared; else without `template`."""
        if isinstance(job.prepared, FlowPrepared):
            return job.prepared
        schedule, active = self.schedule(job), self.active(job)
        generator = torch.Generator("cpu").manual_seed(job.request.seed)
        controls = self._controls(job, schedule, generator)  # they draw first
        inputs = FlowInputs(
            schedule,
            self.start(job, schedule, generator),
            self.prompt(job.conditioning),
            None if job.negative is None else self.prompt(job.negative),
        )
        return FlowPrepared(
            inputs, None, active, self._others(job, active), *self._ringed(job), controls
        )

    def with_ring(self, job: EditJob, ring: int) -> EditJob:
        """See `Adapter.with_ring`."""
        ringed = job.with_ring(ring)
        if not isinstance(job.prepared, FlowPrepared):
            return ringed
        active = self._computed(ringed)
        inner, around = self._ringed(ringed)
        cached_selection = self._others(job, active)
        ringed_prepared = replace(
            job.prepared, active=active, selection=cached_selection, inner=inner, ring=around
        )
        return replace(ringed, prepared=ringed_prepared)

    def template(self, job: EditJob, noise_seed: int) -> FlowTemplate:
        """The job's own, if it has been prepared; else draws the template's noise."""
        if isinstance(job.prepared, FlowPrepared) and job.prepared.template is not None:
            return job.prepared.template
        image, context = self._posterior(job.moments), self._facts.semantics.context
        return template_inputs(image, noise_seed, context=context)

    def clean(self, job: EditJob) -> Tensor:
        """[N, 4C] the source: what a cached row has outside of its active tokens at the end."""
        return pack_latents(self._posterior(job.moments).mode())

    def active(self, job: EditJob) -> TokenIds:
        """Which tokens a cached row computes."""
        if isinstance(job.prepared, FlowPrepared):
            return job.prepared.active
        return self._computed(job)

    def _computed(self, job: EditJob) -> TokenIds:
        """Those of mask and ring, and where steps are recorded some more next to them."""
        active = active_tokens(job.edit_mask, self._facts.token_pixels, job.mask_ring)
        return self._bucket(job, active)

    def ringed(self, job: EditJob) -> tuple[TokenIds, TokenIds]:
        """`FlowPrepared.inner` and `ring`."""
        if isinstance(job.prepared, FlowPrepared):
            return job.prepared.inner, job.prepared.ring
        return self._ringed(job)

    def _ringed(self, job: EditJob) -> tuple[TokenIds, TokenIds]:
        ring = max(self._facts.own_ring or 0, job.mask_ring)
        inner, outer = tokens_within(job.edit_mask, self._facts.token_pixels, 0, ring)
        inner = self._bucket(job, inner)
        return inner, np.setdiff1d(outer, inner)

    def _bucket(self, job: EditJob, tokens: TokenIds) -> TokenIds:
        """Where steps are recorded, as many as their bucket has."""
        if not self.recorded(job):
            return tokens
        height, width = grid_of(job)
        return widened(tokens, height, width, bucket(len(tokens), height * width))

    def recorded(self, job: EditJob) -> bool:
        """Whether steps of its rows may be recorded: not where something of them has a way of its
        own, nor where the answer may not depend on whether they are.
        """
        if not self._buckets:
            return False
        settings, loras = job.request.settings, job.request.used_loras
        assert settings.num_inference_steps is not None
        steps = steps_run(settings.num_inference_steps, settings.strength)
        needs_eager = settings.reproducible or settings.first_block_threshold or loras
        return not (needs_eager or acting(job.controls, steps))

    def schedule(self, job: EditJob) -> Schedule:
        if isinstance(job.prepared, FlowPrepared):
            return job.prepared.inputs.schedule
        settings, (height, width) = job.request.settings, grid_of(job)
        steps, model_sigmas = settings.num_inference_steps, self._facts.sigmas
        assert steps is not None
        return make_schedule(
            self._sampler, steps, height * width, settings.strength, self._shift, model_sigmas
        )

    def prompt(self, given: Conditioning) -> FlowPrompt:
        """What the text encoders answered, in the model's dtype."""
        embeds, pooled = torch.from_numpy(given["prompt_embeds"]), given.get("pooled")
        if pooled is None:
            return FlowPrompt(embeds.to(self._dtype), None)
        return FlowPrompt(embeds.to(self._dtype), torch.from_numpy(pooled).to(self._dtype))

    def _controls(
        self, job: EditJob, schedule: Schedule, generator: torch.Generator
    ) -> tuple[tuple[ControlInput, Tensor], ...]:
        """Draw the latents of the edit's control pictures."""
        control_inputs = []
        for control in acting(job.controls, schedule.steps):
            assert control.moments is not None, "FLUX's control pictures come encoded"
            control_inputs.append(
                (control, pack_latents(self._posterior(control.moments).sample(generator)))
            )
        return tuple(control_inputs)

    def start(self, job: EditJob, schedule: Schedule, generator: torch.Generator) -> FlowStart:
        """Draw everything else random of the edit, in the pipeline's own order, on the CPU. A
        family whose pipeline has another order says so here.
        """
        image, semantics = self._posterior(job.moments), self._facts.semantics
        if semantics.masked_picture:
            masked, factor = self._posterior(job.masked_moments), self._facts.vae_scale_factor
            return start_fill(image, masked, job.edit_mask, factor, schedule, generator)
        chosen = semantics.reference and not semantics.sampled
        clean = image.mode() if chosen else image.sample(generator)
        mask = torch.from_numpy(job.edit_mask).float()[None, None] / 255
        start = start_inpaint(
            clean,
            self.noise(clean, generator),
            self.sampled(mask, clean.shape[1:])[0],
            schedule,
            outside_seed(job, self._outside_noise),
        )
        return replace(start, context=pack_latents(clean)) if semantics.context else start

    def noise(self, clean: Tensor, generator: torch.Generator) -> Tensor:
        """[C, h, w] drawn as the pipeline draws it."""
        return draw(clean.shape, generator, clean.dtype)

    def sampled(self, mask: Tensor, size: Sequence[int]) -> Tensor:
        """[1, 1, h, w] of latents, from a mask [1, 1, H, W] of pixels, as the pipeline has it."""
        return F.interpolate(mask, size=tuple(size))

    def split(self, job: EditJob, *, leaves_ring: bool) -> tuple[TokenIds, TokenIds, Selection]:
        """Tokens that all steps of a cached row compute, those that some do, and those that none
        does but dense ones.
        """
        ready = self.prepared(job)
        if not leaves_ring:
            return ready.active, ready.ring[:0], ready.selection
        beyond = self._others(job, np.concatenate((ready.inner, ready.ring)))
        return ready.inner, ready.ring, beyond

    def _others(self, job: EditJob, active: TokenIds) -> Selection:
        """The tokens that a cached row of it does not compute: behind the image's the context's,
        behind these what its text encoder was shown.
        """
        height, width = grid_of(job)
        tokens = height * width * (1 + self._facts.semantics.context) + self.shown(job)
        return Selection([np.setdiff1d(np.arange(tokens), active)])

    def shown(self, job: EditJob) -> int:
        """`ModelFacts.shown_tokens` of its prompts."""
        _, height, width = job.moments.shape
        return self._facts.shown_tokens(height, width)

    def _posterior(self, moments: NDArray[np.float32]) -> Posterior:
        return Posterior(moments, self._facts.latents, self._dtype)


def grid_of(job: EditJob) -> tuple[int, int]:
    """Rows and columns of the edit's tokens."""
    _, height, width = job.moments.shape
    return height // PATCH, width // PATCH
