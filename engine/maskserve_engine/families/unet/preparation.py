"""Initial tensors of an edit's rows, as far as they depend on its job alone, in host memory."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from maskserve_engine.base.job import Conditioning, EditJob
from maskserve_engine.batch.picture_tokens import packed_keys_of
from maskserve_engine.families.unet.conditioning import (
    UnetInputs,
    UnetStart,
    start_row,
    start_whole,
    template_inputs,
)
from maskserve_engine.families.unet.rows import UnetInactive
from maskserve_engine.families.unet.sampler import NoiseLevels, UnetSchedule
from maskserve_engine.families.unet.tokens import ActiveTokens
from maskserve_engine.planning.flops import ModelWork
from maskserve_engine.spec.model_spec import ModelSpec
from maskserve_engine.stages.latents import Posterior, outside_seed


@dataclass(frozen=True, slots=True)
class UnetPrepared:
    inputs: UnetInputs
    active: ActiveTokens
    inactive: UnetInactive | None
    """Cached tokens and template inputs; set for edits whose rows may read or make entries."""


class UnetPreparation:
    """Prepares jobs; thread-safe."""

    def __init__(
        self,
        spec: ModelSpec,
        sampler: Any,
        *,
        vae_dtype: torch.dtype,
        dtype: torch.dtype,
        levels: int,
        halo: int,
        outside_noise: str,
        buckets: bool = False,
    ) -> None:
        self._spec = spec
        self._vae_dtype, self._dtype = vae_dtype, dtype
        self._levels, self._halo, self._buckets = levels, halo, buckets
        self._outside_noise = outside_noise
        self.noise_levels = NoiseLevels(sampler)
        self.schedule_of = lru_cache(maxsize=256)(partial(UnetSchedule, sampler, self.noise_levels))

    def prepared(self, job: EditJob) -> UnetPrepared:
        """Return the job's prepared tensors; if missing, prepare them without `inactive`."""
        if isinstance(job.prepared, UnetPrepared):
            return job.prepared
        negative = None if job.negative is None else self.texts(job.negative, job)
        picture_keys = (
            packed_keys_of(job.conditioning, self._dtype),
            packed_keys_of(job.negative, self._dtype),
        )
        text = self.texts(job.conditioning, job)
        inputs = UnetInputs(self._start(job), text, negative, picture_keys)
        return UnetPrepared(inputs, self.active(job), None)

    def inactive(self, job: EditJob, noise_seed: int, work: ModelWork, halves: int) -> UnetInactive:
        """Return the job's prepared cached tokens; if missing, draw the template's noise."""
        prepared_cached = job.prepared.inactive if isinstance(job.prepared, UnetPrepared) else None
        if prepared_cached is not None:
            return prepared_cached
        active, (_, height, width) = self.active(job), job.moments.shape
        mask = np.zeros(height * width, np.bool_)
        mask[active.levels[0]] = True
        image = self._posterior(job.moments)
        return UnetInactive(
            active=active.levels,
            mask=torch.from_numpy(mask.reshape(1, height, width)),
            template=template_inputs(
                image, noise_seed, self.noise_levels, self._dtype, fill=self._fill
            ),
            selection=active.selection(work, halves),
            halves=halves,
            tile=active.tile,
            maps=range(len(work.blocks), len(work.blocks) + len(work.maps)),
            feature_maps=work.maps,
        )

    def active(self, job: EditJob) -> ActiveTokens:
        if isinstance(job.prepared, UnetPrepared):
            return job.prepared.active
        return ActiveTokens.of(
            job.edit_mask,
            self._spec.token_pixels,
            self._levels,
            ring=job.mask_ring,
            halo=self._halo,
            buckets=self._buckets,
        )

    def schedule(self, job: EditJob) -> UnetSchedule:
        settings = job.request.settings
        assert settings.num_inference_steps is not None
        return self.schedule_of(settings.num_inference_steps, settings.strength)

    def texts(self, conditioning: Conditioning, job: EditJob) -> tuple[Tensor, ...]:
        """Return the text encoders' output in the model's dtype; for SDXL also the sizes."""
        texts = [conditioning["prompt_embeds"]]
        if self._spec.micro_conditioning:
            # diffusers' defaults: the picture as if it were original, whole, wanted at this size.
            height, width = job.edit_mask.shape
            sizes = np.array([height, width, 0, 0, height, width], np.float32)
            texts += [conditioning["pooled"], sizes]
        return tuple([torch.from_numpy(array).to(self._dtype) for array in texts])

    def _start(self, job: EditJob) -> UnetStart:
        generator = torch.Generator("cpu").manual_seed(job.request.seed)
        image, schedule = self._posterior(job.moments), self.schedule(job)
        if job.request.kind != "inpaint":
            source = image if job.request.kind == "edit" else None
            return start_whole(source, image.mean.shape, schedule, generator, self._dtype)
        masked = self._posterior(job.masked_moments) if self._fill else None
        blends = self._spec.semantics.blends
        seed = outside_seed(job, self._outside_noise) if blends else None
        return start_row(image, masked, job.edit_mask, schedule, generator, self._dtype, seed)

    @property
    def _fill(self) -> bool:
        return self._spec.semantics.masked_picture

    def _posterior(self, moments: NDArray[np.float32]) -> Posterior:
        return Posterior(moments, self._spec.latents, self._vae_dtype)
