"""FLUX.1 (dev, schnell, Fill) behind the engine's adapter interface."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from maskserve_core.config import Config, ConfigError
from maskserve_core.contracts.keys import Anchor, anchor_steps, cover
from maskserve_core.contracts.request import steps_run
from maskserve_core.imaging.masks import cover_a_side
from maskserve_core.models.facts import ModelFacts
from maskserve_core.models.flux import flux_work
from maskserve_core.planning.flops import ModelWork, RowTokens, Totals
from maskserve_engine.adapters.fuse import fused
from maskserve_engine.base.job import Conditioning, EditJob, TokenCounts
from maskserve_engine.batch.flow import Negative
from maskserve_engine.batch.graphs import Graphs
from maskserve_engine.batch.skipping import FirstBlockCache
from maskserve_engine.batch.stepping import Stepping
from maskserve_engine.batch.transfer import moved
from maskserve_engine.control_link.opening import OpenedControl, Opening, OpeningFacts
from maskserve_engine.control_link.served import ServedRow
from maskserve_engine.families.flux.compiled import compile_segments
from maskserve_engine.families.flux.control import (
    FluxControlNet,
    FluxNetBatch,
    FluxNetInput,
    FluxNetRow,
    FluxRowControl,
)
from maskserve_engine.families.flux.preparation import (
    PATCH,
    FluxInputs,
    FluxPreparation,
    FluxPrompt,
    FluxTemplate,
    check_sampler,
    grid_of,
    load_sampler,
    make_schedule,
)
from maskserve_engine.families.flux.rows import (
    FluxBatch,
    FluxInactive,
    FluxPrimingRow,
    FluxRow,
    Row,
)
from maskserve_engine.families.flux.weights import FluxWeights, places_of
from maskserve_engine.layers.low_rank import (
    Adapters,
    Factors,
    LowRankSet,
    low_rank,
    low_rank_set,
)
from maskserve_engine.stages.cpu_threads import one_cpu_thread
from maskserve_engine.stages.loader import device_of, held_bytes
from maskserve_engine.stages.quantise import load_denoiser

_CONTEXT = "context_embedder"


class FluxAdapter(Stepping[Row, FluxWeights]):
    """Rows of FLUX edits over one FluxTransformer2DModel.

    Args:
        facts: what the model folder says.
        model: FluxTransformer2DModel in eval mode.
        sampler: FlowMatchEulerDiscreteScheduler, used for its sigmas only.
        compiled: whether segments of blocks are compiled (`compiled`); takes its time.
        placed_bytes: `[cache] placed_bytes`.
        outside_noise: `[model] outside_noise`.
        graphs: `[engine] flux_cuda_graphs`; keys and values are then placed anew at each step.
        control_refresh: `[controls] refresh`.
    """

    anchor_tolerance = 1.0
    """Any anchor serves any step (docs/adr/0007): how near it is to be, the stride says."""
    entry_halves = 1

    def __init__(
        self,
        facts: ModelFacts,
        model: Any,
        sampler: Any,
        *,
        compiled: bool = False,
        placed_bytes: int = 0,
        outside_noise: str = "template",
        graphs: bool = False,
        control_refresh: int = 1,
    ) -> None:
        check_sampler(sampler)
        self.facts, self.model, self.sampler = facts, model, sampler
        self.device: torch.device = model.device
        self.dtype: torch.dtype = model.dtype
        self.weight_bytes = held_bytes(model)
        recorder = Graphs.on(model.device, model.dtype) if graphs else None
        room = placed_bytes if recorder is None else 0
        weights = replace(FluxWeights.of(model), resident_bytes=room, graphs=recorder)
        self.weights = replace(weights, segments=compile_segments(weights)) if compiled else weights
        super().__init__(FluxBatch, self.weights)
        self.blocks = len(self.weights.double_blocks) + len(self.weights.single_blocks)
        self._preparation = FluxPreparation(
            facts,
            sampler,
            dtype=self.dtype,
            outside_noise=outside_noise,
            buckets=recorder is not None,
        )
        self._control_refresh = control_refresh
        self._places = places_of(model)
        self._cis = lru_cache(maxsize=64)(self._make_cis)
        self.work = lru_cache(maxsize=64)(self._make_work)
        self.anchors = lru_cache(maxsize=64)(self._make_anchors)

    @classmethod
    def load(cls, facts: ModelFacts, config: Config) -> FluxAdapter:
        """Raises ConfigError when a part is missing or unreadable."""
        from diffusers import FluxTransformer2DModel

        if config.cache.conv_halo:
            raise ConfigError("[cache] conv_halo: a setting of UNets; use 0")
        if config.engine.flux_cuda_graphs and config.cache.placed_bytes > 0:
            raise ConfigError(
                f"[cache] placed_bytes: {config.cache.placed_bytes} does not go with "
                "[engine] flux_cuda_graphs, which places them anew at each step; use 0"
            )
        return cls(
            facts,
            load_denoiser(
                config,
                "transformer",
                FluxTransformer2DModel,
                partial(fused, config, part="denoiser"),
            ),
            load_sampler(config),
            compiled=config.model.compile,
            placed_bytes=config.cache.placed_on(device_of(config).type),
            outside_noise=config.model.outside_noise,
            graphs=config.engine.flux_cuda_graphs,
            control_refresh=config.controls.refresh,
        )

    def steps(self, job: EditJob) -> int:
        settings = job.request.settings
        assert settings.num_inference_steps is not None
        return steps_run(settings.num_inference_steps, settings.strength)

    def tokens(self, job: EditJob) -> TokenCounts:
        (gh, gw), active = grid_of(job), self._preparation.active(job)
        side = self.facts.dense_steps.side > 0 and cover_a_side(active, gh, gw)
        return TokenCounts(len(active), gh * gw, side)

    def _make_work(self, height: int, width: int) -> ModelWork:
        recorded = self.weights.graphs is not None
        return flux_work(self.facts.denoiser, height, width, recorded=recorded)

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
        schedule = self._preparation.schedule(job)
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
            return replace(job, prepared=self._preparation.prepared(job))

    def prepare_template(self, job: EditJob, noise_seed: int) -> EditJob:
        with torch.inference_mode():
            ready = self._preparation.prepared(job)
            template = self._preparation.template(job, noise_seed)
            return replace(job, prepared=replace(ready, template=template))

    def with_ring(self, job: EditJob, ring: int) -> EditJob:
        return self._preparation.with_ring(job, ring)

    def dense_row(self, job: EditJob) -> FluxRow:
        with torch.inference_mode():
            return self._row(job, moved(self._preparation.prepared(job).inputs, self.device))

    def cached_row(self, job: EditJob, noise_seed: int) -> FluxRow:
        with torch.inference_mode():
            ready = self._preparation.prepared(job)
            own = self._preparation.template(job, noise_seed)
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
            row.inactive = FluxInactive(active, index, template, image[index], ready.selection)
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
    ) -> FluxPrimingRow:
        with torch.inference_mode():
            sigmas = torch.tensor([anchor.sigma for anchor in anchors])
            own = self._preparation.template(job, noise_seed)
            there = (own, self._preparation.prompt(prompt), sigmas)
            template, inputs, sigmas = moved(there, self.device)
            text = self._text(inputs.embeds)
            return FluxPrimingRow(
                request_id=job.request.request_id,
                template=self._filled(template),
                anchors=tuple(anchors),
                sigmas=sigmas,
                text=text,
                embeds=inputs.embeds,
                pooled=inputs.pooled,
                guidance=self._guidance(job),
                cis=self._cis(*grid_of(job), len(text)),
                kinds=kinds,
                format=format,
            )

    def most_ranks(self, job: EditJob) -> int:
        """As many as there are heads; of what ranks cannot share, one for each pass
        (`batch.cfg_parallel`).
        """
        request = job.request
        if request.settings.first_block_threshold:
            return 1
        if request.loras or job.controls:
            return 1 if job.negative is None else 2
        return int(self.facts.denoiser["num_attention_heads"])

    def carried(self, row: Row) -> tuple[Any, ...] | None:
        """[n, 4C] the latents of its computed tokens; nothing of a priming row. None where what its
        ControlNets keep of earlier steps would be missed: elsewhere they keep it anew.
        """
        if not isinstance(row, FluxRow):
            return ()
        control = row.residuals
        missed = isinstance(control, FluxRowControl) and control.exact and control.kept
        return None if missed else (row.latents,)

    def follow(self, row: Row, carried: tuple[Any, ...], steps: int) -> None:
        self.release()  # the row's batch holds for where it was
        row.step = steps
        if isinstance(row, FluxRow):
            (row.latents,), row.moved = carried, None

    def low_rank(self, factors: Mapping[str, Factors]) -> LowRankSet:
        with torch.inference_mode():
            return low_rank_set(factors, self._places, self.device, self.dtype)

    def attach(self, row: Any, job: EditJob, adapters: Adapters) -> None:
        both, row.adapters = (*row.adapters, *adapters), adapters
        if not any(_CONTEXT in own.updates for own, _ in both):
            return  # what the row keeps of its prompt is as it was
        with torch.inference_mode():
            if isinstance(row, FluxPrimingRow):
                row.text = self._text(row.embeds, adapters)
                return
            inputs = moved(self._preparation.prepared(job).inputs, self.device)
            row.text = self._text(inputs.prompt.embeds, adapters)
            if row.negative is not None:
                assert inputs.negative is not None
                negative = self._text(inputs.negative.embeds, adapters)
                row.negative = replace(row.negative, text=negative)

    def control_net(self, model: Any) -> FluxControlNet:
        with torch.inference_mode():
            return FluxControlNet.of(model, self.model, self.facts.latent_channels * PATCH**2)

    def control(self, row: Any, job: EditJob, nets: Mapping[str, Any]) -> None:
        if not job.controls:
            return
        with torch.inference_mode():
            prepared = self._preparation.prepared(job)
            given = (prepared.inputs.prompt.embeds, [tokens for _, tokens in prepared.controls])
            embeds, pictures = moved(given, self.device)
            inputs = [
                FluxNetInput.made(
                    control,
                    nets[control.net],
                    _in_order(row, tokens),
                    embeds,
                    job.request.settings.guidance_scale,
                )
                for (control, _), tokens in zip(prepared.controls, pictures, strict=True)
            ]
            if inputs:
                exact = job.request.settings.reproducible
                row.residuals = FluxRowControl(tuple(inputs), self._control_refresh, exact)

    def opening(self, row: Any, job: EditJob) -> Opening | None:
        prepared = self._preparation.prepared(job)
        if not prepared.controls:
            return None
        with torch.inference_mode():
            cis = row.cis
            if row.inactive is not None:
                cis = torch.cat((cis, row.inactive.cis))
            facts = OpeningFacts(
                tuple([OpenedControl.of(control) for control, _ in prepared.controls]),
                tuple([step.timestep for step in row.walk(0)]),
                len(row.text),
                job.request.settings.guidance_scale,
                self._control_refresh,
            )
            pictures = [_in_order(row, tokens.to(self.device)) for _, tokens in prepared.controls]
            arrays = {
                "embeds": prepared.inputs.prompt.embeds,
                "pooled": row.pooled,
                "cis": torch.view_as_real(cis),
                **{f"picture.{i}": picture for i, picture in enumerate(pictures)},
            }
            return Opening(facts, arrays)

    def serve_control(self, row: Any, served: ServedRow) -> None:
        row.residuals = served

    def net_row(self, opening: Opening, nets: Mapping[str, Any]) -> FluxNetRow:
        with torch.inference_mode():
            return FluxNetRow.of(opening, nets)

    def net_batch(self) -> FluxNetBatch:
        return FluxNetBatch()

    def _text(self, embeds: Tensor, adapters: Adapters = ()) -> Tensor:
        """[T, width] what the model's first layer makes of a prompt's states [T, in]."""
        own = self.weights.context_embedder
        if adapters:
            own = low_rank(_CONTEXT, own, (adapters,))
        return own(embeds, ((0, len(embeds)),))

    def _row(self, job: EditJob, inputs: FluxInputs) -> FluxRow:
        """A row that computes the tokens of `inputs`, which lie on the device."""
        text, start = self._text(inputs.prompt.embeds), inputs.start
        grid = grid_of(job)
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
            recorded=self._preparation.recorded(job),
        )

    def _guidance(self, job: EditJob) -> float | None:
        return job.request.settings.guidance_scale if self.facts.guidance == "embedded" else None

    def _filled(self, template: FluxTemplate) -> FluxTemplate:
        fill = self.facts.semantics == "fill"
        return template.filled(self.facts.vae_scale_factor) if fill else template

    def _negative(self, job: EditJob, prompt: FluxPrompt | None) -> Negative | None:
        if prompt is None:
            return None
        scale = job.request.settings.true_cfg_scale
        assert scale is not None, "a negative prompt comes with its scale (validation)"
        return Negative(self._text(prompt.embeds), prompt.pooled, scale)

    def _make_cis(self, gh: int, gw: int, text: int) -> Tensor:
        """[T + gh·gw, head_dim / 2] rotary factors of text and image tokens."""
        ids = torch.zeros(text + gh * gw, 3, device=self.device)
        ids[text:, 1] = torch.arange(gh, device=self.device).repeat_interleave(gw)
        ids[text:, 2] = torch.arange(gw, device=self.device).repeat(gh)
        cos, sin = self.model.pos_embed(ids)  # each angle stands twice, side by side
        return torch.complex(cos[:, ::2].contiguous(), sin[:, ::2].contiguous())


def _in_order(row: FluxRow, tokens: Tensor) -> Tensor:
    """[N, ...] of the picture's tokens, those that the row computes first."""
    if row.inactive is None:
        return tokens
    return tokens[torch.cat((row.inactive.active, row.inactive.index))]
