"""FLUX.1 (dev, schnell, Fill) behind the engine's adapter interface."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from maskserve_core.config import Config, ConfigError
from maskserve_core.contracts.entry_key import Anchor, anchor_steps, cover
from maskserve_core.contracts.facts import ModelFacts
from maskserve_core.imaging.tokens import TokenIds, active_tokens
from maskserve_core.imaging.validation import steps_run
from maskserve_core.planning.flops import ModelWork, RowTokens, Totals
from maskserve_core.planning.flops_flux import flux_work
from maskserve_engine.cache.selection import Selection
from maskserve_engine.families.flux.batch import Batch, Row
from maskserve_engine.families.flux.compiled import compile_halves
from maskserve_engine.families.flux.conditioning import (
    Inputs,
    Prepared,
    Prompt,
    Start,
    TemplateInputs,
    start_fill,
    start_inpaint,
    template_inputs,
)
from maskserve_engine.families.flux.latents import PATCH
from maskserve_engine.families.flux.rows import FluxRow, Inactive, Negative, PrimingRow
from maskserve_engine.families.flux.schedule import Schedule, check_sampler, make_schedule
from maskserve_engine.families.flux.skipping import FirstBlockCache
from maskserve_engine.families.flux.weights import Weights
from maskserve_engine.families.posterior import Posterior
from maskserve_engine.families.stepping import Stepping
from maskserve_engine.families.transfer import moved
from maskserve_engine.job import Conditioning, EditJob, TokenCounts
from maskserve_engine.stages.cpu_threads import one_cpu_thread
from maskserve_engine.stages.loader import held_bytes, load_part, load_plain


class FluxAdapter(Stepping[Row, Weights]):
    """Rows of FLUX edits over one FluxTransformer2DModel.

    Args:
        facts: what the model folder says.
        model: FluxTransformer2DModel in eval mode.
        sampler: FlowMatchEulerDiscreteScheduler, used for its sigmas only.
        vae_shift: the VAE's shift_factor.
        vae_scale: the VAE's scaling_factor.
        compiled: whether halves of blocks are compiled (`compiled`); takes its time.
        placed_bytes: `[cache] placed_bytes`.
    """

    anchor_tolerance = 1.0
    """Any anchor serves any step (docs/adr/0007): how near it is to be, the stride says."""
    entry_halves = 1

    def __init__(
        self,
        facts: ModelFacts,
        model: Any,
        sampler: Any,
        vae_shift: float,
        vae_scale: float,
        *,
        compiled: bool = False,
        placed_bytes: int = 0,
    ) -> None:
        check_sampler(sampler)
        self.facts, self.model, self.sampler = facts, model, sampler
        self.vae_shift, self.vae_scale = vae_shift, vae_scale
        self.device: torch.device = model.device
        self.dtype: torch.dtype = model.dtype
        self.weight_bytes = held_bytes(model)
        weights = replace(Weights.of(model), placed_bytes=placed_bytes)
        self.weights = replace(weights, halves=compile_halves(weights)) if compiled else weights
        super().__init__(Batch, self.weights)
        self.blocks = len(self.weights.double_blocks) + len(self.weights.single_blocks)
        self._cis = lru_cache(maxsize=64)(self._make_cis)
        self.work = lru_cache(maxsize=64)(self._make_work)
        self.anchors = lru_cache(maxsize=64)(self._make_anchors)

    @classmethod
    def load(cls, facts: ModelFacts, config: Config) -> FluxAdapter:
        """Raises ConfigError when a part is missing or unreadable."""
        from diffusers import (
            AutoencoderKL,
            FlowMatchEulerDiscreteScheduler,
            FluxTransformer2DModel,
        )

        if config.cache.conv_halo:
            raise ConfigError("[cache] conv_halo: a setting of UNets; use 0")
        vae = AutoencoderKL.load_config(f"{config.model.path}/vae")
        return cls(
            facts,
            load_part(config, "transformer", FluxTransformer2DModel),
            load_plain(config, "scheduler", FlowMatchEulerDiscreteScheduler),
            float(vae.get("shift_factor") or 0.0),
            float(vae.get("scaling_factor", 1.0)),
            compiled=config.model.compile,
            placed_bytes=config.cache.placed_bytes,
        )

    def steps(self, job: EditJob) -> int:
        settings = job.request.settings
        assert settings.num_inference_steps is not None
        return steps_run(settings.num_inference_steps, settings.strength)

    def tokens(self, job: EditJob) -> TokenCounts:
        gh, gw = self._grid(job)
        return TokenCounts(len(self._active(job)), gh * gw)

    def _make_work(self, height: int, width: int) -> ModelWork:
        return flux_work(self.facts.denoiser, height, width)

    def counted(self, job: EditJob) -> Totals:
        _, height, width = job.moments.shape
        texts = [each for each in (job.conditioning, job.negative) if each is not None]
        active = (float(self.tokens(job).active),)
        return self.work(height, width).totals(
            [RowTokens(active, float(len(text["prompt_embeds"]))) for text in texts]
        )

    def batch_key(self, job: EditJob) -> Hashable:
        return None  # rows are packed without padding: any may share a step

    def blank_prompt(self, tokens: int) -> Conditioning:
        config = self.facts.denoiser
        return {
            "prompt_embeds": np.zeros((tokens, config["joint_attention_dim"]), np.float32),
            "pooled": np.zeros(config["pooled_projection_dim"], np.float32),
        }

    def sigmas(self, job: EditJob) -> list[tuple[float, float]]:
        schedule = self._schedule(job)
        return [(step.sigma, step.timestep) for step in schedule.walk]

    def _make_anchors(self, tokens: int, steps: int, stride: int) -> tuple[Anchor, ...]:
        """Of every `stride` timesteps of the schedule the one in their middle, and as many between
        them that no step of any schedule is out of reach.
        """
        walk = make_schedule(self.sampler, steps, tokens).walk
        chosen = anchor_steps([step.sigma for step in walk], stride)
        taken = (Anchor(walk[i].sigma, walk[i].timestep) for i in chosen)
        return cover(tuple(taken), self.anchor_tolerance)

    def prepare(self, job: EditJob) -> EditJob:
        with torch.inference_mode():
            return replace(job, prepared=self._prepared(job))

    def prepare_template(self, job: EditJob, noise_seed: int) -> EditJob:
        with torch.inference_mode():
            ready = self._prepared(job)
            template = self._template(job, ready, noise_seed)
            return replace(job, prepared=replace(ready, template=template))

    def dense_row(self, job: EditJob) -> FluxRow:
        with torch.inference_mode():
            return self._row(job, moved(self._prepared(job).inputs, self.device))

    def cached_row(self, job: EditJob, noise_seed: int) -> FluxRow:
        with torch.inference_mode():
            ready = self._prepared(job)
            own = self._template(job, ready, noise_seed)
            active, index = map(torch.from_numpy, (ready.active, *ready.selection.levels))
            with one_cpu_thread():
                start, rest = ready.inputs.start.take(active), own.take(index)
            there = (replace(ready.inputs, start=start), rest, active, index)
            inputs, template, active, index = moved(there, self.device)
            ready.selection.sent([index])
            row = self._row(job, inputs)
            gh, gw = row.grid
            text, image = row.cis.split((len(row.text), gh * gw))
            template = self._filled(template)
            row.inactive = Inactive(active, index, template, image[index], ready.selection)
            row.cis = torch.cat((text, image[active]))
            return row

    def priming_row(
        self,
        job: EditJob,
        anchors: Sequence[Anchor],
        prompt: Conditioning,
        noise_seed: int,
        kinds: Sequence[frozenset[str]],
        format: str,
    ) -> PrimingRow:
        with torch.inference_mode():
            sigmas = torch.tensor([anchor.sigma for anchor in anchors])
            own = self._template(job, self._prepared(job), noise_seed)
            there = (own, self._prompt(prompt), sigmas)
            template, inputs, sigmas = moved(there, self.device)
            text = self.model.context_embedder(inputs.embeds)
            return PrimingRow(
                request_id=job.request.request_id,
                template=self._filled(template),
                anchors=tuple(anchors),
                sigmas=sigmas,
                text=text,
                pooled=inputs.pooled,
                guidance=self._guidance(job),
                cis=self._cis(*self._grid(job), len(text)),
                kinds=kinds,
                format=format,
            )

    def _start(self, job: EditJob) -> tuple[Schedule, Start]:
        """Draw everything random of the edit, in the pipeline's own order, on the CPU."""
        schedule = self._schedule(job)
        generator = torch.Generator("cpu").manual_seed(job.request.seed)
        image, factor = self._posterior(job.moments), self.facts.vae_scale_factor
        if self.facts.semantics == "fill":
            masked = self._posterior(job.masked_moments)
            start = start_fill(image, masked, job.edit_mask, factor, schedule, generator)
        else:
            start = start_inpaint(image, job.edit_mask, factor, schedule, generator)
        return schedule, start

    def _prepared(self, job: EditJob) -> Prepared:
        """The job's own, if it has been prepared."""
        if isinstance(job.prepared, Prepared):
            return job.prepared
        schedule, start = self._start(job)
        negative = None if job.negative is None else self._prompt(job.negative)
        inputs = Inputs(schedule, start, self._prompt(job.conditioning), negative)
        gh, gw = self._grid(job)
        active = self._active(job)
        rest = np.setdiff1d(np.arange(gh * gw), active)
        return Prepared(inputs, None, active, Selection([rest]))

    def _active(self, job: EditJob) -> TokenIds:
        if isinstance(job.prepared, Prepared):
            return job.prepared.active
        return active_tokens(job.edit_mask, self.facts.token_pixels, job.mask_ring)

    def _row(self, job: EditJob, inputs: Inputs) -> FluxRow:
        """A row that computes the tokens of `inputs`, which lie on the device."""
        text, start = self.model.context_embedder(inputs.prompt.embeds), inputs.start
        grid = self._grid(job)
        threshold = job.request.settings.first_block_threshold
        return FluxRow(
            request_id=job.request.request_id,
            schedule=inputs.schedule,
            grid=grid,
            text=text,  # the same at every step, so embedded once
            pooled=inputs.prompt.pooled,
            guidance=self._guidance(job),
            cis=self._cis(*grid, len(text)),
            latents=start.latents,
            condition=start.condition,
            blend=start.blend,
            negative=self._negative(job, inputs.negative),
            first_block=FirstBlockCache(threshold) if threshold else None,
        )

    def _schedule(self, job: EditJob) -> Schedule:
        if isinstance(job.prepared, Prepared):
            return job.prepared.inputs.schedule
        settings, (gh, gw) = job.request.settings, self._grid(job)
        assert settings.num_inference_steps is not None
        return make_schedule(self.sampler, settings.num_inference_steps, gh * gw, settings.strength)

    def _grid(self, job: EditJob) -> tuple[int, int]:
        _, h, w = job.moments.shape
        return h // PATCH, w // PATCH

    def _guidance(self, job: EditJob) -> float | None:
        return job.request.settings.guidance_scale if self.facts.guidance == "embedded" else None

    def _posterior(self, moments: NDArray[np.float32]) -> Posterior:
        return Posterior(moments, self.vae_shift, self.vae_scale, self.dtype)

    def _template(self, job: EditJob, ready: Prepared, noise_seed: int) -> TemplateInputs:
        """What was prepared, if it was."""
        return ready.template or template_inputs(self._posterior(job.moments), noise_seed)

    def _filled(self, template: TemplateInputs) -> TemplateInputs:
        fill = self.facts.semantics == "fill"
        return template.filled(self.facts.vae_scale_factor) if fill else template

    def _prompt(self, given: Conditioning) -> Prompt:
        embeds, pooled = given["prompt_embeds"], given["pooled"]
        return Prompt(*(torch.from_numpy(each).to(self.dtype) for each in (embeds, pooled)))

    def _negative(self, job: EditJob, prompt: Prompt | None) -> Negative | None:
        if prompt is None:
            return None
        scale = job.request.settings.true_cfg_scale
        assert scale is not None, "a negative prompt comes with its scale (validation)"
        return Negative(self.model.context_embedder(prompt.embeds), prompt.pooled, scale)

    def _make_cis(self, gh: int, gw: int, text: int) -> Tensor:
        """[T + gh·gw, head_dim / 2] rotary factors of text and image tokens."""
        ids = torch.zeros(text + gh * gw, 3, device=self.device)
        ids[text:, 1] = torch.arange(gh, device=self.device).repeat_interleave(gw)
        ids[text:, 2] = torch.arange(gw, device=self.device).repeat(gh)
        cos, sin = self.model.pos_embed(ids)  # each angle stands twice, side by side
        return torch.complex(cos[:, ::2].contiguous(), sin[:, ::2].contiguous())
