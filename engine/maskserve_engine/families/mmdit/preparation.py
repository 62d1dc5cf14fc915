"""Initial tensors of an edit's rows, as far as they depend on its job alone, in host memory.

The schedule; latents packed into tokens, and all random numbers in the order of the pipeline that
makes edits of the job's kind; Fill's extra channels, or Inpaint's blend after each step.
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

from maskserve_common.contracts.request import EditKind
from maskserve_common.contracts.settings import acting
from maskserve_common.imaging.masks import (
    UNSELECTED,
    TokenIds,
    active_tokens,
    cover_a_side,
    tokens_within,
    widened,
)
from maskserve_engine.base.job import Conditioning, ControlInput, EditJob, TokenCounts
from maskserve_engine.batch.picture_tokens import PICTURE_KEYS, packed_keys_of
from maskserve_engine.cache.loader import Selection
from maskserve_engine.families.mmdit.schedule import (
    Schedule,
    Shift,
    at_model_steps,
    linear_shift,
    make_schedule,
)
from maskserve_engine.layers.attention import bucket
from maskserve_engine.spec.model_spec import ModelSpec
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
"""Name of the prompt states before the picture, for families whose denoiser inserts the picture
between words."""


def before(number: int) -> str:
    """Return the name of the prompt states before a picture, by its number."""
    return f"{BEFORE}.{number}" if number else BEFORE


Grid = tuple[int, int]
"""Rows and columns of a picture's tokens."""
PATCH = 2  # latents per token along one side, fixed in diffusers' Flux pipelines


def pack_latents(latents: Tensor) -> Tensor:
    """Reshape [C, h, w] → tokens [h/2 · w/2, 4C], row-major."""
    c, h, w = latents.shape
    x = latents.view(c, h // PATCH, PATCH, w // PATCH, PATCH)
    return x.permute(1, 3, 0, 2, 4).reshape((h // PATCH) * (w // PATCH), c * PATCH * PATCH)


def unpack_latents(tokens: Tensor, grid: tuple[int, int]) -> Tensor:
    """Reshape tokens [gh · gw, 4C] → [C, 2gh, 2gw]."""
    gh, gw = grid
    c = tokens.shape[1] // (PATCH * PATCH)
    x = tokens.view(gh, gw, c, PATCH, PATCH).permute(2, 0, 3, 1, 4)
    return x.reshape(c, gh * PATCH, gw * PATCH)


@dataclass(frozen=True, slots=True)
class FlowBlend:
    """Inpaint semantics: outside the mask, latents follow the noised source. Grey areas follow it
    until the edit takes them in (`latents.joins`).
    """

    mask: Tensor
    """[n, 4C] float32, 1 = edit."""
    clean: Tensor
    """[n, 4C] source latents."""
    noise: Tensor
    """[n, 4C] noise of the request."""

    def apply(self, latents: Tensor, sigma: Tensor, after: int, steps: int) -> Tensor:
        """Return the latents after `after` of the row's steps; the last one ended at
        `sigma`.
        """
        source = self.clean if after == steps else self.source(sigma)
        return torch.where(self.mask >= joins(after, steps), latents, source)

    def source(self, sigma: Tensor) -> Tensor:
        """Return [n, 4C] source noised to `sigma`."""
        sigma = sigma.to(self.clean.dtype)
        return sigma * self.noise + (1.0 - sigma) * self.clean

    def take(self, index: Tensor) -> FlowBlend:
        return FlowBlend(
            *(tensor.index_select(0, index) for tensor in (self.mask, self.clean, self.noise))
        )


@dataclass(frozen=True, slots=True)
class FlowStart:
    """A row's tensors before its first step, for all tokens, in the model's dtype."""

    latents: Tensor
    condition: Tensor | None
    """[n, extra channels] for Fill."""
    blend: FlowBlend | None
    """Set for Inpaint, and for Fill with grey masks."""
    context: Tensor | None = None
    """[R, 4C] context tokens: reference pictures, if the model takes any."""

    def take(self, index: Tensor) -> FlowStart:
        """Return some image tokens, without the context."""
        return FlowStart(
            self.latents.index_select(0, index),
            None if self.condition is None else self.condition.index_select(0, index),
            None if self.blend is None else self.blend.take(index),
        )


def packed_mask(edit_mask: Tensor, factor: int, dtype: torch.dtype) -> Tensor:
    """Return Fill's mask channels [n, 4·factor²] of a [H, W] mask of 0 and 1."""
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
    """Prepare as FluxFillPipeline does; draws image sample, noise and masked-image sample, in this
    order.
    """
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
    """Return the blend of [C, h, w] latents with a [1, h, w] float32 mask."""
    parts = (mask.expand_as(clean).contiguous(), clean, noise)
    return FlowBlend(*(pack_latents(part) for part in parts))


def start_inpaint(
    clean: Tensor,
    noise: Tensor,
    mask: Tensor,
    schedule: Schedule,
    seed: int | None,
) -> FlowStart:
    """Prepare as FluxInpaintPipeline does, without its unused masked image.

    Args:
        clean: [C, h, w] latents of the source.
        noise: [C, h, w].
        mask: [1, h, w] float32, 1 = edit.
        schedule: schedule of the row.
        seed: seed of the noise outside the mask; None: one noise for all.
    """
    if seed is not None:
        noise = noise_outside(noise, mask, seed)
    latents = _mixed(clean, noise, schedule)
    return FlowStart(pack_latents(latents), None, blended(clean, noise, mask))


def _mixed(clean: Tensor, noise: Tensor, schedule: Schedule) -> Tensor:
    sigma = schedule.sigmas[0].to(clean.dtype)
    return sigma * noise + (1.0 - sigma) * clean


@dataclass(frozen=True, slots=True)
class FlowPrompt:
    """Output of the text encoders, in the model's dtype."""

    embeds: Tensor
    """[T, text width]."""
    pooled: Tensor | None
    """[pooled width]; None for families without it."""
    picture: Tensor | None = None
    """[tokens, W] of an IP-Adapter's picture (`picture_tokens.PICTURE_KEYS`); None: there is
    none."""


@dataclass(frozen=True, slots=True)
class FlowInputs:
    schedule: Schedule
    start: FlowStart
    prompt: FlowPrompt
    negative: FlowPrompt | None


@dataclass(frozen=True, slots=True)
class FlowTemplate:
    """The template's model inputs: priming runs on them, and cached tokens are fixed to them."""

    clean: Tensor
    """[n, 4C] posterior mode of the source."""
    noise: Tensor
    """[n, 4C] noise of the template."""
    condition: Tensor | None
    """[n, extra channels]; for Fill the unmasked image and an empty mask."""
    context: Tensor | None = None
    """[R, 4C] context tokens: reference pictures, if the model takes any."""

    def take(self, index: Tensor) -> FlowTemplate:
        """Return some image tokens, with all of the context."""
        condition = None if self.condition is None else self.condition.index_select(0, index)
        clean, noise = self.clean.index_select(0, index), self.noise.index_select(0, index)
        return FlowTemplate(clean, noise, condition, self.context)

    def filled(self, factor: int) -> FlowTemplate:
        """Add the condition of Fill models. It is made on the device, because it follows from
        `clean`.
        """
        mask = self.clean.new_zeros(len(self.clean), (PATCH * factor) ** 2)
        return replace(self, condition=torch.cat((self.clean, mask), dim=1))

    @property
    def result(self) -> Tensor:
        """[n, 4C] latents in the edit's result."""
        return self.clean

    def at(self, sigma: Tensor, change: float = 0.0) -> Tensor:
        """Return [n + R, in_channels] model inputs at `sigma`, however far that lies ahead."""
        sigma = sigma.to(self.clean.dtype)
        latents = sigma * self.noise + (1.0 - sigma) * self.clean
        return model_inputs(latents, self.condition, self.context)


def model_inputs(latents: Tensor, condition: Tensor | None, context: Tensor | None) -> Tensor:
    """Return [n + R, in_channels] from latents [n, 4C], condition channels and context tokens."""
    if condition is not None:
        latents = torch.cat((latents, condition), dim=1)
    return latents if context is None else torch.cat((latents, context))


def template_inputs(image: Posterior, noise_seed: int, *, context: bool) -> FlowTemplate:
    """Return template inputs that are not `filled`; equal for all edits of the same pixels and
    noise seed.
    """
    clean = image.mode()
    noise = template_noise(clean.shape, noise_seed, clean.dtype)
    tokens = pack_latents(clean)
    return FlowTemplate(tokens, pack_latents(noise), None, tokens if context else None)


@dataclass(frozen=True, slots=True)
class EditTokens:
    """Image tokens of an edit, by the steps of a cached row that compute them."""

    active: TokenIds
    """Computed at every step."""
    inner: TokenIds
    """Computed at every step by a row whose ring is cached."""
    ring: TokenIds
    selection: Selection
    """Tokens beside the active ones."""
    counts: TokenCounts


@dataclass(frozen=True, slots=True)
class FlowPrepared:
    inputs: FlowInputs
    template: FlowTemplate | None
    """All tokens; set for edits whose rows may read or make entries."""
    tokens: EditTokens
    controls: tuple[tuple[ControlInput, Tensor], ...] = ()
    """Active controls, each with its picture's tokens (`FlowPreparation.control_tokens`)."""


def _kept_tokens(job: EditJob, like: Tensor) -> Tensor:
    """Return [N, 4] tokens of the latents outside an edit's mask (1), as ControlNets that fill it
    see them.
    """
    outside = torch.from_numpy(job.edit_mask <= UNSELECTED).to(like.dtype)
    return pack_latents(F.interpolate(outside[None, None], size=latents_shape(job)[1:])[0])


class FlowPreparation:
    """Prepares jobs; thread-safe."""

    def __init__(
        self,
        spec: ModelSpec,
        sampler: Any,
        *,
        dtype: torch.dtype,
        outside_noise: str,
        shift: Shift = linear_shift,
        flow_sigmas: frozenset[EditKind] = frozenset(),
        buckets: bool = False,
    ) -> None:
        self._spec, self._sampler = spec, sampler
        self._dtype, self._buckets = dtype, buckets
        self._outside_noise, self._shift = outside_noise, shift
        self._flow_sigmas = flow_sigmas

    def prepared(self, job: EditJob) -> FlowPrepared:
        """Return the job's prepared tensors; if missing, prepare them without `template`."""
        if isinstance(job.prepared, FlowPrepared):
            return job.prepared
        schedule = self.schedule(job)
        generator = torch.Generator("cpu").manual_seed(job.request.seed)
        controls = self._controls(job, schedule, generator)  # they draw first
        inputs = FlowInputs(
            schedule,
            self.start(job, schedule, generator),
            self.prompt(job.conditioning),
            None if job.negative is None else self.prompt(job.negative),
        )
        return FlowPrepared(inputs, None, self._tokens(job), controls)

    def with_settings(self, job: EditJob, **changes: int) -> EditJob:
        before, job = job.prepared, job.with_settings(**changes)
        if not isinstance(before, FlowPrepared):
            return job
        inputs = replace(before.inputs, schedule=self.schedule(job))
        return replace(job, prepared=replace(before, inputs=inputs, tokens=self._tokens(job)))

    def template(self, job: EditJob, noise_seed: int) -> FlowTemplate:
        """Return the job's prepared template; if missing, draw its noise."""
        if isinstance(job.prepared, FlowPrepared) and job.prepared.template is not None:
            return job.prepared.template
        image, context = self._posterior(job.moments), self._spec.semantics.context
        return template_inputs(image, noise_seed, context=context)

    def clean(self, job: EditJob) -> Tensor:
        """Return [N, 4C] latents of the source: a cached row's result outside of the mask."""
        return pack_latents(self._posterior(job.moments).mode())

    def references(self, job: EditJob) -> Tensor:
        """Return [R, 4C] latents of the source and of the further references."""
        return self._with_further(self.clean(job), job)

    def _with_further(self, clean: Tensor, job: EditJob) -> Tensor:
        """Return [R, 4C]: the source's tokens [N, 4C], then those of the further references."""
        further = [pack_latents(self._posterior(moments).mode()) for moments in job.references]
        return torch.cat((clean, *further)) if further else clean

    def tokens(self, job: EditJob) -> EditTokens:
        return job.prepared.tokens if isinstance(job.prepared, FlowPrepared) else self._tokens(job)

    def _tokens(self, job: EditJob) -> EditTokens:
        """Find the tokens of mask and ring, widened to a bucket if steps are recorded."""
        pixels, ring = self._spec.token_pixels, max(self._spec.refresh.ring or 0, job.mask_ring)
        active = self._bucket(job, active_tokens(job.edit_mask, pixels, job.mask_ring))
        inner, outer = tokens_within(job.edit_mask, pixels, 0, ring)
        inner = self._bucket(job, inner)
        around, (height, width) = np.setdiff1d(outer, inner), grid_of(job)
        side = self._spec.dense_steps.side > 0 and cover_a_side(active, height, width)
        counts = TokenCounts(len(active), height * width, len(inner), len(around), side)
        return EditTokens(active, inner, around, self._cached_selection(job, active), counts)

    def _bucket(self, job: EditJob, tokens: TokenIds) -> TokenIds:
        if not self.recorded(job):
            return tokens
        height, width = grid_of(job)
        return widened(tokens, height, width, bucket(len(tokens), height * width))

    def recorded(self, job: EditJob) -> bool:
        """Return whether the rows' steps may be recorded. They may not if a part of them has to run
        unrecorded, or if the result must be reproducible.
        """
        if not self._buckets:
            return False
        return not (job.request.settings.reproducible or PICTURE_KEYS in job.conditioning)

    def schedule(self, job: EditJob) -> Schedule:
        if isinstance(job.prepared, FlowPrepared):
            return job.prepared.inputs.schedule
        settings, (height, width) = job.request.settings, grid_of(job)
        steps, model_sigmas = settings.num_inference_steps, self._spec.sigmas
        assert steps is not None
        schedule = make_schedule(
            self._sampler,
            steps,
            height * width,
            settings.strength,
            self._shift,
            model_sigmas,
            flow_sigmas=job.request.kind in self._flow_sigmas,
        )
        return at_model_steps(schedule, settings.step_interval or 1)

    def prompt(self, conditioning: Conditioning) -> FlowPrompt:
        embeds, pooled = torch.from_numpy(conditioning["prompt_embeds"]), conditioning.get("pooled")
        return FlowPrompt(
            embeds.to(self._dtype),
            None if pooled is None else torch.from_numpy(pooled).to(self._dtype),
            packed_keys_of(conditioning, self._dtype),
        )

    def _controls(
        self, job: EditJob, schedule: Schedule, generator: torch.Generator
    ) -> tuple[tuple[ControlInput, Tensor], ...]:
        control_inputs = []
        for control in acting(job.controls, schedule.steps):
            assert control.moments is not None, "control pictures come encoded"
            tokens = self.control_tokens(control.moments, job, generator)
            if control.fills:
                tokens = torch.cat((tokens, _kept_tokens(job, tokens)), dim=1)
            control_inputs.append((control, tokens))
        return tuple(control_inputs)

    def control_tokens(
        self, moments: NDArray[np.float32], job: EditJob, generator: torch.Generator
    ) -> Tensor:
        """Return [N, in] tokens of a control picture as nets take them."""
        return pack_latents(self._posterior(moments).sample(generator))

    def start(self, job: EditJob, schedule: Schedule, generator: torch.Generator) -> FlowStart:
        """Draw all other random numbers of the edit, on the CPU, in the pipeline's order. Families
        with another order override this.
        """
        if job.request.kind == "generate":
            return FlowStart(pack_latents(self.noise(job, generator)), None, None)
        image, semantics = self._posterior(job.moments), self._spec.semantics
        if semantics.masked_picture:
            masked, factor = self._posterior(job.masked_moments), self._spec.vae_scale_factor
            return start_fill(image, masked, job.edit_mask, factor, schedule, generator)
        whole = job.request.kind == "edit"
        chosen = semantics.reference and (whole or not semantics.sampled)
        clean = image.mode() if chosen else image.sample(generator)
        noise = self.noise(job, generator)
        if whole:
            latents = noise if semantics.reference else _mixed(clean, noise, schedule)
            start = FlowStart(pack_latents(latents), None, None)
        else:
            mask = torch.from_numpy(job.edit_mask).float()[None, None] / 255
            start = start_inpaint(
                clean,
                noise,
                self.sampled(mask, clean.shape[1:])[0],
                schedule,
                outside_seed(job, self._outside_noise),
            )
        if not semantics.context:
            return start
        return replace(start, context=self._with_further(pack_latents(clean), job))

    def noise(self, job: EditJob, generator: torch.Generator) -> Tensor:
        """Return [C, h, w] noise, drawn as the pipeline draws it."""
        return draw(latents_shape(job), generator, self._dtype)

    def sampled(self, mask: Tensor, size: Sequence[int]) -> Tensor:
        """Resize a mask [1, 1, H, W] of pixels to [1, 1, h, w] of latents, as the pipeline does."""
        return F.interpolate(mask, size=tuple(size))

    def split(self, job: EditJob, *, leaves_ring: bool) -> tuple[TokenIds, TokenIds, Selection]:
        """Return the tokens that all steps of a cached row compute, those that some steps compute,
        and those that only dense steps compute.
        """
        tokens = self.tokens(job)
        if not leaves_ring:
            return tokens.active, tokens.ring[:0], tokens.selection
        beyond = self._cached_selection(job, np.concatenate((tokens.inner, tokens.ring)))
        return tokens.inner, tokens.ring, beyond

    def _cached_selection(self, job: EditJob, active: TokenIds) -> Selection:
        """Return the tokens that a cached row does not compute: image tokens, the context, then
        shown tokens.
        """
        height, width = grid_of(job)
        grids = reference_grids(job, self._spec) if self._spec.semantics.context else ()
        tokens = sum(rows * columns for rows, columns in ((height, width), *grids))
        return Selection([np.setdiff1d(np.arange(tokens + self.picture_words(job)), active)])

    def picture_words(self, job: EditJob) -> int:
        _, height, width = job.moments.shape
        return self._spec.encoder_picture_tokens(height, width)

    def _posterior(self, moments: NDArray[np.float32]) -> Posterior:
        return Posterior(moments, self._spec.latents, self._dtype)


def latents_shape(job: EditJob) -> torch.Size:
    """Return (C, h, w)."""
    channels, height, width = job.moments.shape
    return torch.Size((channels // 2, height, width))


def grid_of(job: EditJob) -> Grid:
    _, height, width = job.moments.shape
    return height // PATCH, width // PATCH


def reference_grids(job: EditJob, spec: ModelSpec) -> tuple[Grid, ...]:
    """Return the grids of the row's reference pictures, of which the source is the first."""
    if not spec.references(job.request.kind):
        return ()
    shapes = [moments.shape for moments in (job.moments, *job.references)]
    return tuple([(height // PATCH, width // PATCH) for _, height, width in shapes])
