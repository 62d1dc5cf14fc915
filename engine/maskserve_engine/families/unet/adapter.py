"""Stable Diffusion 2.1 and SDXL, base and inpainting, behind the engine's adapter interface."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from maskserve_common.config import Config, ConfigError, outside_noise
from maskserve_common.contracts.keys import Anchor, anchor_steps
from maskserve_common.contracts.request import EditKind
from maskserve_engine.adapters.fuse import fuse_configured_loras
from maskserve_engine.base.job import Conditioning, EditJob, TokenCounts
from maskserve_engine.batch.graphs import Graphs
from maskserve_engine.batch.picture_tokens import picture_keys_of
from maskserve_engine.batch.step_cache import RefreshSchedule
from maskserve_engine.batch.stepping import Stepping
from maskserve_engine.batch.transfer import moved
from maskserve_engine.families.adapter import LoneLengths
from maskserve_engine.families.control import RowControl
from maskserve_engine.families.unet.batch import Row, UnetBatch
from maskserve_engine.families.unet.conditioning import UnetInputs
from maskserve_engine.families.unet.forward import added_embedding, micro_conditioning
from maskserve_engine.families.unet.opening import UnetControls
from maskserve_engine.families.unet.preparation import UnetPreparation
from maskserve_engine.families.unet.rows import (
    Guidance,
    UnetInactive,
    UnetPrimingRow,
    UnetPrompt,
    UnetRow,
)
from maskserve_engine.families.unet.sampler import TRAINED_STEPS, check_sampler, load_sampler
from maskserve_engine.families.unet.spec import recorded_rows, unet_work
from maskserve_engine.families.unet.surroundings import RingRoom
from maskserve_engine.families.unet.weights import UnetWeights, places_of
from maskserve_engine.layers.low_rank import Adapters, Factors, LowRankSet, low_rank_set
from maskserve_engine.planning.flops import ModelWork, Totals
from maskserve_engine.planning.refresh_steps import REFRESH_RULE, RefreshRule
from maskserve_engine.spec.model_spec import ModelSpec, refresh_rule
from maskserve_engine.stages.loader import device_of, dtype_of, module_bytes
from maskserve_engine.stages.quantise import load_denoiser
from maskserve_engine.stages.vae import vae_dtype


class UnetAdapter(Stepping[Row, UnetWeights], UnetControls):
    """Steps rows of edits over one UNet2DConditionModel.

    Args:
        spec: describes the model folder.
        model: UNet2DConditionModel in eval mode.
        sampler: the pipeline's sampler.
        exact_vae: whether the pipeline runs the VAE in float32 whatever the model's dtype.
        cfg_entries: whether the negative pass of guided steps has its own entries, if they
            would differ (`[cache] cfg_entries`).
        halo: `[cache] conv_halo`.
        outside_noise: `[model] outside_noise`.
        graphs: `[engine] cuda_graphs`.
        refresh_rule: how rows fill their step caches.
    """

    anchor_tolerance = 1.0
    """Any anchor serves any step (docs/decisions/templates.md). An anchor's sigma is its timestep
    divided by the number of trained timesteps."""

    def __init__(
        self,
        spec: ModelSpec,
        model: Any,
        sampler: Any,
        *,
        exact_vae: bool,
        cfg_entries: bool = False,
        halo: int = 0,
        outside_noise: str = "auto",
        graphs: bool = False,
        refresh_rule: RefreshRule = REFRESH_RULE,
    ) -> None:
        check_sampler(sampler)
        recorder = Graphs.on(model.device, model.dtype) if graphs else None
        self.weights = replace(UnetWeights.of(model), graphs=recorder)
        super().__init__(UnetBatch, self.weights)
        self.spec, self.model, self.sampler = spec, model, sampler
        self.exact_vae = exact_vae
        self.device: torch.device = model.device
        self.dtype: torch.dtype = model.dtype
        self.weight_bytes = module_bytes(model)
        self.entry_halves = 2 if cfg_entries and spec.zeros_for_empty_prompt else 1
        self._halo, self._refresh_rule = halo, refresh_rule
        self.places = places_of(model)
        counted = self._make_work(1, 1)
        self.blocks, self._maps = len(counted.blocks), len(counted.maps)
        self._cached_maps = unet_work(spec.denoiser, 1, 1, halo=1).maps
        self.entry_blocks = self.blocks + (self._maps + 1 if self._maps else 0)
        self.work = lru_cache(maxsize=64)(self._make_work)
        self._preparation = UnetPreparation(
            spec,
            sampler,
            vae_dtype=torch.float32 if exact_vae else self.dtype,
            dtype=self.dtype,
            levels=len(model.down_blocks),
            halo=halo,
            outside_noise=outside_noise,
            buckets=recorder is not None,
        )

    @classmethod
    def load(cls, spec: ModelSpec, config: Config) -> UnetAdapter:
        """Load a model folder.

        Raises:
            ConfigError: a part is missing, unreadable or not served.
        """
        from diffusers import UNet2DConditionModel

        if config.cache.conv_halo and config.cache.entry_kind != "kv":
            raise ConfigError(
                f"[cache] conv_halo: {config.cache.conv_halo} goes with entry_kind kv, "
                f"not {config.cache.entry_kind}"
            )
        return cls(
            spec,
            load_denoiser(
                config,
                "unet",
                UNet2DConditionModel,
                partial(fuse_configured_loras, config, part="denoiser"),
            ),
            load_sampler(config, spec),
            exact_vae=vae_dtype(config, spec, "encoder") != dtype_of(config),
            cfg_entries=config.cache.cfg_entries == "own",
            halo=config.cache.conv_halo,
            outside_noise=outside_noise(config),
            graphs=recorded_rows(spec, config) > 0,
            refresh_rule=refresh_rule(config, spec, device_of(config).type),
        )

    def steps(self, job: EditJob) -> int:
        return len(self._preparation.schedule(job).timesteps)

    def tokens(self, job: EditJob) -> TokenCounts:
        _, height, width = job.moments.shape
        active = self._preparation.active(job)
        side = self.spec.dense_sides and active.cover_a_side
        return TokenCounts(len(active.levels[0]), height * width, cover_a_side=side)

    def totals(
        self, job: EditJob, schedule: RefreshSchedule | None = None, *, refresh: bool = False
    ) -> Totals:
        _, height, width = job.moments.shape
        active = self._preparation.active(job)
        passes = [
            conditioning
            for conditioning in (job.conditioning, job.negative)
            if conditioning is not None
        ]
        rows = [
            active.row(len(conditioning["prompt_embeds"]), refreshes=schedule is not None)
            for conditioning in passes
        ]
        totals = self.work(height, width).totals(rows)
        tiled = any(row.convolved is not None for row in rows)
        if self.weights.graphs is None or not tiled:
            return totals
        return replace(totals, alone=1, together=False)  # it replays a recorded step of its own

    def batch_key(self, job: EditJob) -> Hashable:
        return job.moments.shape  # convolutions run on all positions of all rows at once

    def lone_lengths(self, job: EditJob, words: int, usual: tuple[float, float]) -> LoneLengths:
        return LoneLengths()  # shapes depend on the mask's form, too

    def blank_prompt(self, tokens: int) -> Conditioning:
        config = self.model.config
        prompt = {"prompt_embeds": np.zeros((tokens, config.cross_attention_dim), np.float32)}
        if self.spec.micro_conditioning:
            sizes = 6 * config.addition_time_embed_dim
            pooled = config.projection_class_embeddings_input_dim - sizes
            prompt["pooled"] = np.zeros(pooled, np.float32)
        return prompt

    def sigmas(self, job: EditJob) -> list[tuple[float, float]]:
        """Return (timestep as a share of all, timestep) of each model call. Samplers scale latents
        differently, but the model's input at a timestep is the same.
        """
        return [(t / TRAINED_STEPS, t) for t in self._preparation.schedule(job).timesteps]

    def anchors(self, tokens: int, steps: int, stride: int) -> tuple[Anchor, ...]:
        """Return the middle one of every `stride` timesteps of the schedule."""
        walk = self._preparation.schedule_of(steps, 1.0).timesteps
        step_anchors = [
            Anchor(t / TRAINED_STEPS, t) for t in dict.fromkeys(walk)
        ]  # PNDM repeats one
        chosen = anchor_steps([anchor.sigma for anchor in step_anchors], stride)
        return tuple(step_anchors[i] for i in chosen)

    def prepare(self, job: EditJob) -> EditJob:
        with torch.inference_mode():
            return replace(job, prepared=self._preparation.prepared(job))

    def prepare_template(self, job: EditJob, noise_seed: int) -> EditJob:
        with torch.inference_mode():
            ready = self._preparation.prepared(job)
            inactive = self._inactive(job, noise_seed)
            return replace(job, prepared=replace(ready, inactive=inactive))

    def with_settings(self, job: EditJob, **changes: int) -> EditJob:
        return self.prepare(job.with_settings(**changes))

    def dense_row(self, job: EditJob) -> UnetRow:
        with torch.inference_mode():
            return self._row(job, self._preparation.prepared(job).inputs)

    def cached_row(
        self, job: EditJob, noise_seed: int, schedule: RefreshSchedule | None = None
    ) -> UnetRow:
        with torch.inference_mode():
            ready = self._preparation.prepared(job)
            return self._row(job, ready.inputs, self._inactive(job, noise_seed))

    def refreshing_row(self, job: EditJob, schedule: RefreshSchedule) -> UnetRow:
        with torch.inference_mode():
            ready, seed = self._preparation.prepared(job), job.request.template_noise_seed
            inactive = replace(
                self._inactive(job, seed),
                tile=ready.active.refresh_tile,
                feature_maps=self._cached_maps,
            )
            return self._row(job, ready.inputs, inactive, schedule)

    def refreshing_row_bytes(self, job: EditJob) -> int:
        """Return the bytes of the surroundings of its tile (as they are, their change, and at the
        next step) and of kept answers.
        """
        tile, (channels, height, width) = (
            self._preparation.active(job).refresh_tile,
            job.moments.shape,
        )
        answers = 2 * (channels // 2) * height * width * self.dtype.itemsize
        if tile is None:
            return answers
        passes = 1 if job.negative is None else 2
        return answers + 3 * RingRoom.bytes_of(tile, self._cached_maps, passes, self.dtype)

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
        prompts = (prompt, none)[: self.entry_halves]
        with torch.inference_mode():
            prompt_texts = tuple(
                [self._preparation.texts(conditioning, job) for conditioning in prompts]
            )
            cached_inputs = self._inactive(job, noise_seed)
            template, texts = moved((cached_inputs.template, prompt_texts), self.device)
            return UnetPrimingRow(
                request_id=job.request.request_id,
                template=template,
                anchors=tuple(anchors),
                prompts=tuple([self._prompt(conditioning) for conditioning in texts]),
                kinds=kinds,
                format=format,
                maps=self._maps,
            )

    def most_ranks(self, job: EditJob) -> int:
        """Return one rank for each pass (`batch.cfg_parallel`)."""
        return 1 if job.negative is None else 2

    def carried(self, row: UnetRow | UnetPrimingRow) -> tuple[Any, ...] | None:
        """Return [K, C, h, w] latents and sampler memory; nothing for a priming row; None if the
        row's ControlNets keep tensors that another rank would miss.
        """
        if isinstance(row, UnetPrimingRow):
            return ()
        control = row.control
        missed = isinstance(control, RowControl) and control.missed
        return None if missed else (row.state,)

    def follow(self, row: UnetRow | UnetPrimingRow, carried: tuple[Any, ...], steps: int) -> None:
        self.release()  # the batch was packed for the row's earlier step
        row.step = steps
        if isinstance(row, UnetRow):
            (row.state,) = carried
            row.begin_anew()

    def low_rank(self, factors: Mapping[str, Factors]) -> LowRankSet:
        with torch.inference_mode():
            return low_rank_set(factors, self.places, self.device, self.dtype)

    def attach(self, row: Any, job: EditJob, adapters: Adapters) -> None:
        row.adapters = adapters
        if isinstance(row, UnetRow) and row.refresh_schedule is not None:
            row.begin_anew()  # its lookahead was computed without them
        with torch.inference_mode():
            row.change_prompts(lambda prompt: self._changed(prompt, adapters))

    def _inactive(self, job: EditJob, noise_seed: int) -> UnetInactive:
        _, height, width = job.moments.shape
        work = self.work(height, width)
        return self._preparation.inactive(job, noise_seed, work, self.entry_halves)

    def _row(
        self,
        job: EditJob,
        inputs: UnetInputs,
        inactive: UnetInactive | None = None,
        refresh_schedule: RefreshSchedule | None = None,
    ) -> UnetRow:
        levels = () if inactive is None else inactive.selection.levels
        level_indices = tuple(map(torch.from_numpy, levels))
        inputs, inactive, level_indices = moved((inputs, inactive, level_indices), self.device)
        if inactive is not None:
            inactive.selection.keep_ids(level_indices)
        guidance = None
        if inputs.negative is not None:
            scale = job.request.settings.guidance_scale
            assert scale is not None, "preprocess fills in the model's default"
            negative = self._prompt(inputs.negative)
            guidance = Guidance(self._with_picture(negative, inputs.picture_keys[1], job), scale)
        schedule = self._preparation.schedule(job)
        return UnetRow(
            request_id=job.request.request_id,
            schedule=schedule,
            noise_levels=self._preparation.noise_levels,
            prompt=self._with_picture(self._prompt(inputs.texts), inputs.picture_keys[0], job),
            guidance=guidance,
            state=schedule.state(inputs.start.latents),
            condition=inputs.start.condition,
            blend=inputs.start.blend,
            inactive=inactive,
            refresh_schedule=refresh_schedule,
        )

    def prompt(self, conditioning: Conditioning, job: EditJob) -> UnetPrompt:
        """Return a prompt as the edit's passes take it, on the device."""
        return self._prompt(moved(self._preparation.texts(conditioning, job), self.device))

    def _changed(self, prompt: UnetPrompt, adapters: Adapters) -> UnetPrompt:
        """Return the prompt with its micro-conditioning recomputed for the row's LoRAs."""
        if prompt.micro is None:
            return prompt
        return replace(prompt, added=added_embedding(self.model, prompt.micro, adapters))

    def _with_picture(self, prompt: UnetPrompt, packed: Tensor | None, job: EditJob) -> UnetPrompt:
        """Return the prompt with the keys and values of an IP-Adapter's picture, if it has one."""
        setting = job.request.settings.ip_adapter
        if packed is None or setting is None:
            return prompt
        assert self.spec.ip_adapters is not None
        widths = self.spec.ip_adapters.widths
        return replace(prompt, picture=picture_keys_of(packed, widths, setting.scale))

    def _prompt(self, texts: tuple[Tensor, ...]) -> UnetPrompt:
        text, *micro_inputs = texts
        if not micro_inputs:
            return UnetPrompt(text, None)
        micro = micro_conditioning(self.model, *micro_inputs)
        return UnetPrompt(text, added_embedding(self.model, micro), micro)

    def _make_work(
        self, height: int, width: int, *, kind: EditKind = "inpaint", further: int = 0
    ) -> ModelWork:
        recorded = self.weights.graphs is not None
        return unet_work(
            self.spec.denoiser, height, width, guidance=False, halo=self._halo, recorded=recorded
        )
