"""Stable Diffusion 2.1 and SDXL, base and inpainting, behind the engine's adapter interface."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from maskserve_core.config import Config, ConfigError
from maskserve_core.contracts.entry_key import Anchor, anchor_steps
from maskserve_core.contracts.facts import ModelFacts
from maskserve_core.imaging.tokens import active_tokens, active_tokens_per_level
from maskserve_core.planning.flops import ModelWork, RowTokens, Totals
from maskserve_core.planning.flops_unet import level_sizes, unet_work
from maskserve_engine.families.posterior import Posterior
from maskserve_engine.families.stepping import Stepping
from maskserve_engine.families.transfer import moved
from maskserve_engine.families.unet.batch import Batch, Row
from maskserve_engine.families.unet.conditioning import (
    Inputs,
    Start,
    TemplateInputs,
    start_row,
    template_inputs,
)
from maskserve_engine.families.unet.forward import added_embedding, block_places
from maskserve_engine.families.unet.rows import (
    Guidance,
    Inactive,
    Prepared,
    Prompt,
    UnetPrimingRow,
    UnetRow,
)
from maskserve_engine.families.unet.sampler import (
    TRAINED_STEPS,
    NoiseLevels,
    Sampler,
    check_sampler,
    load_sampler,
)
from maskserve_engine.families.unet.tile import Ids, Tile, tile_of
from maskserve_engine.families.unet.tokens import selection_of
from maskserve_engine.job import Conditioning, EditJob, TokenCounts
from maskserve_engine.stages.loader import held_bytes, load_part


class UnetAdapter(Stepping[Row, Any]):
    """Rows of edits over one UNet2DConditionModel.

    Args:
        facts: what the model folder says.
        model: UNet2DConditionModel in eval mode.
        sampler: the pipeline's own, copied for every row.
        vae_scale: the VAE's scaling_factor.
        exact_vae: whether the pipeline runs the VAE in float32 whatever the model's dtype.
        own_entries: whether the second pass of guided steps has entries of its own, where they
            would differ (`[cache] cfg_entries`).
        halo: `[cache] conv_halo`.
    """

    anchor_tolerance = 1.0
    """Any anchor serves any step (docs/adr/0007). An anchor's sigma is its timestep's share of all
    that the model was trained on."""

    def __init__(
        self,
        facts: ModelFacts,
        model: Any,
        sampler: Any,
        vae_scale: float,
        *,
        exact_vae: bool,
        own_entries: bool = False,
        halo: int = 0,
    ) -> None:
        check_sampler(sampler)
        super().__init__(Batch, model)
        self.facts, self.model, self.sampler = facts, model, sampler
        self.vae_scale, self.exact_vae = vae_scale, exact_vae
        self.device: torch.device = model.device
        self.dtype: torch.dtype = model.dtype
        self.weight_bytes = held_bytes(model)
        self.entry_halves = 2 if own_entries and facts.zeros_for_empty_prompt else 1
        self._halo = halo
        self._vae_dtype = torch.float32 if exact_vae else self.dtype
        self.places = block_places(model)
        self.blocks = len(self.places)
        kept = len(self._make_work(1, 1).maps)
        self.maps = range(self.blocks, self.blocks + kept)
        """Numbers of the feature maps among an entry's blocks."""
        self._depth = range(len(model.down_blocks))
        self._noise_levels = NoiseLevels(sampler)
        self._timesteps = lru_cache(maxsize=256)(self._make_timesteps)
        self.work = lru_cache(maxsize=64)(self._make_work)

    @classmethod
    def load(cls, facts: ModelFacts, config: Config) -> UnetAdapter:
        """Raises ConfigError when a part is missing, unreadable or not served."""
        from diffusers import AutoencoderKL, UNet2DConditionModel

        if config.model.first_block_threshold:
            raise ConfigError("[model] first_block_threshold: a setting of FLUX models; use 0")
        if config.cache.conv_halo and config.cache.entry_kind != "kv":
            raise ConfigError(
                f"[cache] conv_halo: {config.cache.conv_halo} goes with entry_kind kv, "
                f"not {config.cache.entry_kind}"
            )
        vae = AutoencoderKL.load_config(f"{config.model.path}/vae")
        return cls(
            facts,
            load_part(config, "unet", UNet2DConditionModel),
            load_sampler(config),
            float(vae.get("scaling_factor", 0.18215)),
            exact_vae=facts.micro_conditioning and bool(vae.get("force_upcast", True)),
            own_entries=config.cache.cfg_entries == "own",
            halo=config.cache.conv_halo,
        )

    def steps(self, job: EditJob) -> int:
        return len(self._walk(job))

    def tokens(self, job: EditJob) -> TokenCounts:
        active = active_tokens(job.edit_mask, self.facts.token_pixels, job.mask_ring)
        _, height, width = job.moments.shape
        return TokenCounts(len(active), height * width)

    def counted(self, job: EditJob) -> Totals:
        _, height, width = job.moments.shape
        ids = self._active(job)
        active = tuple(float(len(own)) for own in ids.values())
        tile, convolved = self._tile(ids, height, width), None
        if tile is not None:
            convolved = tuple(float(level.box.area) for level in tile)
        passes = [each for each in (job.conditioning, job.negative) if each is not None]
        return self.work(height, width).totals(
            [RowTokens(active, float(len(each["prompt_embeds"])), convolved) for each in passes]
        )

    def batch_key(self, job: EditJob) -> Hashable:
        return job.moments.shape  # convolutions run on all positions of all rows at once

    def blank_prompt(self, tokens: int) -> Conditioning:
        config = self.model.config
        prompt = {"prompt_embeds": np.zeros((tokens, config.cross_attention_dim), np.float32)}
        if self.facts.micro_conditioning:
            sizes = 6 * config.addition_time_embed_dim
            pooled = config.projection_class_embeddings_input_dim - sizes
            prompt["pooled"] = np.zeros(pooled, np.float32)
        return prompt

    def sigmas(self, job: EditJob) -> list[tuple[float, float]]:
        """(timestep as a share of all, timestep) of each model call: the samplers scale their own
        latents differently, but the model takes the same at the same timestep.
        """
        return [(t / TRAINED_STEPS, t) for t in self._walk(job)]

    def anchors(self, tokens: int, steps: int, stride: int) -> tuple[Anchor, ...]:
        """Of every `stride` timesteps of the schedule the one in their middle."""
        walk = tuple(dict.fromkeys(self._timesteps(steps, 1.0)))  # PNDM takes one of them twice
        taken = [Anchor(t / TRAINED_STEPS, t) for t in walk]
        chosen = anchor_steps([anchor.sigma for anchor in taken], stride)
        return tuple(taken[i] for i in chosen)

    def prepare(self, job: EditJob, noise_seed: int | None) -> EditJob:
        with torch.inference_mode():
            return replace(job, prepared=self._prepare(job, noise_seed))

    def dense_row(self, job: EditJob) -> UnetRow:
        with torch.inference_mode():
            return self._row(job, self._prepared(job).inputs)

    def cached_row(self, job: EditJob, noise_seed: int) -> UnetRow:
        with torch.inference_mode():
            ready = self._prepared(job, noise_seed)
            assert ready.inactive is not None, "prepared without the template's noise"
            return self._row(job, ready.inputs, ready.inactive)

    def priming_row(
        self,
        job: EditJob,
        anchors: Sequence[Anchor],
        prompt: Conditioning,
        noise_seed: int,
        kinds: Sequence[frozenset[str]],
        format: str,
    ) -> UnetPrimingRow:
        none = {name: np.zeros_like(array) for name, array in prompt.items()}
        with torch.inference_mode():
            given = tuple([self._texts(p, job) for p in (prompt, none)[: self.entry_halves]])
            own = self._prepared(job, noise_seed).inactive
            assert own is not None, "prepared without the template's noise"
            template, texts = moved((own.template, given), self.device)
            return UnetPrimingRow(
                request_id=job.request.request_id,
                template=template,
                anchors=tuple(anchors),
                prompts=tuple([self._prompt(each) for each in texts]),
                kinds=kinds,
                format=format,
                maps=len(self.maps),
            )

    def _prepared(self, job: EditJob, noise_seed: int | None = None) -> Prepared:
        ready = job.prepared
        return ready if isinstance(ready, Prepared) else self._prepare(job, noise_seed)

    def _prepare(self, job: EditJob, noise_seed: int | None) -> Prepared:
        negative = None if job.negative is None else self._texts(job.negative, job)
        inputs = Inputs(self._start(job), self._texts(job.conditioning, job), negative)
        return Prepared(inputs, None if noise_seed is None else self._inactive(job, noise_seed))

    def _inactive(self, job: EditJob, noise_seed: int) -> Inactive:
        _, height, width = job.moments.shape
        ids = self._active(job)
        mask = np.zeros(height * width, np.bool_)
        mask[ids[0]] = True
        tile, work = self._tile(ids, height, width), self.work(height, width)
        return Inactive(
            active=ids,
            mask=torch.from_numpy(mask.reshape(1, height, width)),
            template=self._template(job, noise_seed),
            selection=selection_of(ids, tile, work, self.entry_halves),
            halves=self.entry_halves,
            tile=tile,
            maps=self.maps,
        )

    def _row(self, job: EditJob, inputs: Inputs, inactive: Inactive | None = None) -> UnetRow:
        """A row of what lies in host memory as yet."""
        levels = () if inactive is None else inactive.selection.levels
        rest = tuple(map(torch.from_numpy, levels))
        inputs, inactive, rest = moved((inputs, inactive, rest), self.device)
        if inactive is not None:
            inactive.selection.sent(rest)
        guidance = None
        if inputs.negative is not None:
            scale = job.request.settings.guidance_scale
            assert scale is not None, "preprocess fills in the model's default"
            guidance = Guidance(self._prompt(inputs.negative), scale)
        return UnetRow(
            request_id=job.request.request_id,
            sampler=self._sampler(job),
            noise_levels=self._noise_levels,
            prompt=self._prompt(inputs.texts),
            guidance=guidance,
            latents=inputs.start.latents,
            condition=inputs.start.condition,
            blend=inputs.start.blend,
            inactive=inactive,
        )

    def _sampler(self, job: EditJob) -> Sampler:
        settings = job.request.settings
        assert settings.num_inference_steps is not None
        return Sampler(self.sampler, settings.num_inference_steps, settings.strength)

    def _start(self, job: EditJob) -> Start:
        """Draw everything random of the edit, in the pipeline's own order, on the CPU."""
        generator = torch.Generator("cpu").manual_seed(job.request.seed)
        masked = self._posterior(job.masked_moments) if self.facts.semantics == "fill" else None
        image, sampler = self._posterior(job.moments), self._sampler(job)
        return start_row(image, masked, job.edit_mask, sampler, generator, self.dtype)

    def _template(self, job: EditJob, noise_seed: int) -> TemplateInputs:
        return template_inputs(
            self._posterior(job.moments),
            noise_seed,
            self._noise_levels,
            self.dtype,
            fill=self.facts.semantics == "fill",
        )

    def _posterior(self, moments: NDArray[np.float32]) -> Posterior:
        return Posterior(moments, 0.0, self.vae_scale, self._vae_dtype)

    def prompt(self, given: Conditioning, job: EditJob) -> Prompt:
        """A prompt as a pass of the edit takes it."""
        return self._prompt(moved(self._texts(given, job), self.device))

    def _texts(self, given: Conditioning, job: EditJob) -> tuple[Tensor, ...]:
        """What the text encoders answered, in the model's dtype; for SDXL the sizes, too."""
        texts = [given["prompt_embeds"]]
        if self.facts.micro_conditioning:
            # diffusers' defaults: the picture as if it were original, whole, wanted at this size.
            height, width = job.edit_mask.shape
            sizes = np.array([height, width, 0, 0, height, width], np.float32)
            texts += [given["pooled"], sizes]
        return tuple([torch.from_numpy(each).to(self.dtype) for each in texts])

    def _prompt(self, texts: tuple[Tensor, ...]) -> Prompt:
        text, *micro = texts
        return Prompt(text, added_embedding(self.model, *micro) if micro else None)

    def _walk(self, job: EditJob) -> tuple[float, ...]:
        settings = job.request.settings
        assert settings.num_inference_steps is not None
        return self._timesteps(settings.num_inference_steps, settings.strength)

    def _make_timesteps(self, steps: int, strength: float) -> tuple[float, ...]:
        return tuple(map(float, Sampler(self.sampler, steps, strength).timesteps))

    def _make_work(self, height: int, width: int) -> ModelWork:
        return unet_work(self.facts.denoiser, height, width, guidance=False, halo=self._halo)

    def _tile(self, ids: Mapping[int, Ids], height: int, width: int) -> Tile | None:
        """Where a row with these active tokens computes convolutions; None: everywhere."""
        if not self._halo or not len(ids[0]):  # of a template that is only to be primed
            return None
        return tile_of(ids, level_sizes(height, width, len(self._depth)), self._halo)

    def _active(self, job: EditJob) -> dict[int, Ids]:
        """Computed tokens per level."""
        return active_tokens_per_level(
            job.edit_mask, self.facts.token_pixels, self._depth, job.mask_ring
        )
