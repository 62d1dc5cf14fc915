"""The ways in which the engine makes an edit: dense, cached in any form, or with a part of the
tokens alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from msgspec import structs
from numpy.typing import NDArray
from PIL import Image

from maskserve_benchmarks.demo_model.scenes import Edit
from maskserve_benchmarks.edits.direct import job_of, request_of
from maskserve_benchmarks.steps.replay import Replay
from maskserve_common.config_file import config_of
from maskserve_common.contracts.keys import anchor_steps
from maskserve_common.contracts.request import model_steps
from maskserve_common.contracts.settings import EditSettings
from maskserve_common.imaging.masks import active_tokens, cover_a_side
from maskserve_engine.base.job import Conditioning, EditJob
from maskserve_engine.batch.step_cache import RefreshSchedule
from maskserve_engine.cache.entries import AnchorEntry, BlockEntry, Coded, encode
from maskserve_engine.control_link.services import ControlServices
from maskserve_engine.families.flux.adapter import FluxAdapter
from maskserve_engine.families.mmdit.rows import FlowPrimingRow, FlowRow
from maskserve_engine.families.mmdit.spans import MaskedTokens
from maskserve_engine.families.registry import load_adapter, load_decoder, load_encoder
from maskserve_engine.families.specs import load_spec
from maskserve_engine.stages.loader import device_of
from maskserve_studies.quality.choices import CacheChoice, schedule
from maskserve_studies.quality.thinning import references_alone, references_computed, thinned
from maskserve_triton.preprocess import mask_for_model

Picture = NDArray[np.uint8]
TokenIds = NDArray[np.int64]
BATCH = 8
_NEGATIVE = "a blue circle"
"""Negative prompt of edits with true classifier-free guidance."""
ENTRY_KINDS = (frozenset({"h", "kv"}),)


class Rig:
    """A model folder with everything that makes an edit of a prepared picture.

    Args:
        folder: folder of a model; most methods are for FLUX only.
        steps: number of steps of every edit.
        weights: `[model] weights`.
        own_anchors: `[cache] own_anchors`; None: the default.
        halo: `[cache] conv_halo`.
        wordless: whether to prime templates with an empty prompt, whatever the model.
        true_cfg: `true_cfg_scale` of every edit, beside a negative prompt; 0: none.

    Raises:
        SystemExit: the model's schedule has a different number of steps.
    """

    def __init__(
        self,
        folder: Path,
        steps: int,
        *,
        weights: str = "bf16",
        own_anchors: float | None = None,
        halo: int = 0,
        wordless: bool = False,
        true_cfg: float = 0.0,
    ) -> None:
        sigma_count = len(load_spec(folder).sigmas)
        if sigma_count and steps != sigma_count:
            raise SystemExit(f"--steps: this model has {sigma_count} of its own")
        tables: dict[str, Any] = {"model": {"path": str(folder), "weights": weights}}
        tables["cache"] = {"conv_halo": halo}
        if own_anchors is not None:
            tables["cache"]["own_anchors"] = own_anchors
        self.config = config_of(tables)
        self.folder, self.steps, self._true_cfg = folder, steps, true_cfg
        self.encoder, self.decoder = load_encoder(self.config), load_decoder(self.config)
        self.adapter = cast(FluxAdapter, load_adapter(self.config))
        self.schedule = schedule(self.adapter.spec, steps)
        self._by_prompt = self.adapter.spec.primed_by_prompt and not wordless
        self.replay = Replay(self.adapter)
        self.prompt = self.encoder.priming_prompt()
        self.served: ControlServices | None = None
        """Runs the rows' ControlNets, for edits with `adapters: fast`; None: they run in the rig's
        rows."""

    def jobs(self, edits: Sequence[Edit]) -> list[EditJob]:
        """Encode the edits; the seed of edit i is i."""
        return [self._job(edit, seed) for seed, edit in enumerate(edits)]

    def _job(self, edit: Edit, seed: int) -> EditJob:
        mask = mask_for_model(edit.mask * np.uint8(255), self.adapter.spec)
        settings = EditSettings(num_inference_steps=self.steps, mask_ring=0)
        if self.adapter.spec.guidance != "none":
            scale = self.adapter.spec.guidance_default(self.config.model.guidance_scale)
            settings = structs.replace(settings, guidance_scale=scale)
        if self._true_cfg:
            settings = structs.replace(
                settings, true_cfg_scale=self._true_cfg, negative_prompt=_NEGATIVE
            )
        request = request_of(edit.source, edit.prompt, settings, seed, str(seed))
        return job_of(self.encoder, request, edit.source, mask)

    def finish(self, edit: Edit, latents: NDArray[np.float32]) -> Picture:
        """Decode, and paste the source back outside the mask."""
        pixels = self.decoder.decode(latents)
        alpha = pixels[..., 3] if pixels.shape[2] > 3 else np.uint8(255)
        out, weights = Image.fromarray(edit.source), np.where(edit.mask, alpha, np.uint8(0))
        out.paste(Image.fromarray(pixels[..., :3]), mask=Image.fromarray(weights))
        return np.asarray(out)

    def run(self, rows: Sequence[FlowRow], kinds: Sequence[str], until: int | None = None) -> None:
        """Step rows with equal step counts, in batches: all steps, or up to step `until`."""
        for first in range(0, len(rows), BATCH):
            batch = list(rows[first : first + BATCH])
            while batch[0].step < (batch[0].steps if until is None else until):
                self.replay.step(batch, kinds)

    def attach(self, row: FlowRow | FlowPrimingRow, job: EditJob) -> None:
        """Give a new row the adapters of its edit; this rig has none."""

    def _dense_rows(self, jobs: Sequence[EditJob]) -> list[FlowRow]:
        rows = [self.adapter.dense_row(job) for job in jobs]
        for row, job in zip(rows, jobs, strict=True):
            self.attach(row, job)
        return rows

    def dense(self, edits: Sequence[Edit], jobs: Sequence[EditJob]) -> list[Picture]:
        rows = self._dense_rows(jobs)
        self.run(rows, ())
        return self._finish_all(edits, rows)

    def entries(self, jobs: Sequence[EditJob]) -> list[tuple[AnchorEntry, ...]]:
        """Return each template's entries at every step, of both kinds, in model dtype."""
        rows = []
        for job in jobs:
            tokens = job.moments.shape[1] * job.moments.shape[2] // 4
            anchors = self.adapter.anchors(tokens, self.schedule, 1)
            rows.append(
                self.adapter.priming_row(
                    job,
                    anchors,
                    self._priming_prompt(job),
                    job.request.template_noise_seed,
                    ENTRY_KINDS * self.adapter.blocks,
                    "model",
                )
            )
            self.attach(rows[-1], job)
        for first in range(0, len(rows), BATCH):
            batch = rows[first : first + BATCH]
            while batch[0].step < batch[0].steps:
                self.adapter.step(batch, None)
        return [tuple(row.done) for row in rows]

    def _priming_prompt(self, job: EditJob) -> Conditioning:
        if self._by_prompt:
            return job.conditioning
        image_tokens = self.adapter.spec.encoder_picture_tokens(*job.moments.shape[1:])
        image_prompt = {"prompt_embeds": job.conditioning["prompt_embeds"][:image_tokens]}
        return image_prompt if image_tokens else self.prompt

    def cached(
        self,
        edits: Sequence[Edit],
        jobs: Sequence[EditJob],
        entries: Sequence[tuple[AnchorEntry, ...]],
        choice: CacheChoice,
    ) -> list[Picture]:
        """Make the edits by cached rows, or by dense rows if the choice caches nothing."""
        jobs = [at_interval(job, choice.step_interval) for job in jobs]
        rows = self._dense_rows(jobs) if choice.dense else self.cached_rows(jobs, entries, choice)
        parts = [self._with_fewer_tokens(row, choice) for row in rows]
        self.run(parts, (choice.block_kind,) * self.adapter.blocks)
        for row, part in zip(rows, parts, strict=True):
            row.image.masked.latents, row.step = part.latents, part.step
        return self._finish_all(edits, rows)

    def cached_rows(
        self,
        jobs: Sequence[EditJob],
        entries: Sequence[tuple[AnchorEntry, ...]],
        choice: CacheChoice,
        schedule: RefreshSchedule | None = None,
    ) -> list[FlowRow]:
        """Return new cached rows; `schedule` says what they keep besides the entries."""
        coded = [_stored_entries(entry_list, choice) for entry_list in entries]
        return [
            self._row(job, entry_list, choice, schedule)
            for job, entry_list in zip(jobs, coded, strict=True)
        ]

    def predicted(self, choice: CacheChoice) -> float:
        """Return the share of the choice's steps in which the model does not run."""
        return 1.0 - len(model_steps(self.steps, choice.step_interval)) / self.steps

    def _row(
        self,
        job: EditJob,
        coded: Sequence[AnchorEntry],
        choice: CacheChoice,
        schedule: RefreshSchedule | None,
    ) -> FlowRow:
        settings = structs.replace(job.request.settings, mask_ring=choice.ring)
        job = replace(job, request=replace(job.request, settings=settings))
        # As in the engine, a step without an entry also computes the fixed tokens.
        per_step = [
            None if step < choice.dense_steps else _nearest(coded, sigma)
            for step, (sigma, _) in enumerate(self.adapter.sigmas(job))
        ]
        if schedule is None and choice.dense_steps and self.adapter.spec.corrects_residuals:
            format = self.config.cache.refresh_format_on(device_of(self.config).type)
            schedule = RefreshSchedule(frozenset(), format, text=False, corrects_residuals=True)
        seed = job.request.template_noise_seed
        row = cast(FlowRow, self.replay.cached_row(job, per_step, seed, schedule))
        self.attach(row, job)
        return row

    def _with_fewer_tokens(self, row: FlowRow, choice: CacheChoice) -> FlowRow:
        """Return a row that reads only the tokens that the choice keeps."""
        if choice.thin:
            part = thinned(row, choice.thin)
        elif choice.references_alone:
            part = references_alone(row)
        elif choice.references_computed:
            part = references_computed(row)
        else:
            return row
        self.replay.follow(part, row)
        return part

    def tokens_of(self, job: EditJob, ring: int = 0) -> TokenIds:
        """Return the computed tokens of the edit."""
        return active_tokens(job.edit_mask, self.adapter.spec.token_pixels, ring)

    def too_large(self, job: EditJob, ring: int) -> bool:
        """Return whether a worker runs the edit dense because of its mask's size."""
        total = job.edit_mask.size // self.adapter.spec.token_pixels**2
        return len(self.tokens_of(job, ring)) >= self.config.cache.dense_above_ratio * total

    def dense_steps(self, job: EditJob, ring: int) -> int:
        """Return the number of first steps for which a worker computes all tokens of the edit."""
        down, across = (side // self.adapter.spec.token_pixels for side in job.edit_mask.shape)
        side = cover_a_side(self.tokens_of(job, ring), down, across)
        return self.adapter.spec.dense_steps.of(
            self.steps, prompt=job.request.prompt != "", side=side
        )

    def window_of(self, job: EditJob, margin: int) -> TokenIds:
        """Return the tokens of the mask's bounding box, grown by `margin` tokens."""
        down, across = (side // self.adapter.spec.token_pixels for side in job.edit_mask.shape)
        ys, xs = np.divmod(self.tokens_of(job), across)
        window = np.zeros((down, across), np.bool_)
        window[
            max(0, ys.min() - margin) : ys.max() + margin + 1,
            max(0, xs.min() - margin) : xs.max() + margin + 1,
        ] = True
        return np.flatnonzero(window)

    def edit_from_tokens(
        self, edits: Sequence[Edit], jobs: Sequence[EditJob], tokens: Sequence[TokenIds]
    ) -> list[Picture]:
        """Make edits from some of their tokens as if no others existed: the masked tokens (FlashPS
        Fig. 1, right) or a crop. The noise is that of the whole picture.
        """
        dense_rows = [self.adapter.dense_row(job) for job in jobs]
        parts = []
        for row, ids in zip(dense_rows, tokens, strict=True):
            index, masked = torch.from_numpy(ids), row.image.masked
            condition = None if masked.condition is None else masked.condition[index]
            blend = None if masked.blend is None else masked.blend.take(index)
            tokens_alone = MaskedTokens(
                None, masked.cis[index], masked.latents[index], condition, blend
            )
            parts.append(
                replace(
                    row,
                    image=replace(row.image, masked=tokens_alone),
                    # A prompt that has seen its reference brings that reference along.
                    references=None if row.prompt.words is None else row.references,
                )
            )
        self.run(parts, ())
        # Cached rows take all other latents from the template.
        finished_rows = [
            self.adapter.cached_row(job, job.request.template_noise_seed) for job in jobs
        ]
        for row, part, ids in zip(finished_rows, parts, tokens, strict=True):
            assert row.image.masked.ids is not None
            row.image.masked.latents = part.latents[
                np.searchsorted(ids, row.image.masked.ids.numpy())
            ]
        return self._finish_all(edits, finished_rows)

    def template_bytes(self, choice: CacheChoice, entries: tuple[AnchorEntry, ...]) -> int:
        """Return the bytes of one template in the store, with its whole context."""
        return sum(entry.nbytes for entry in _stored_entries(entries, choice))

    def _finish_all(self, edits: Sequence[Edit], rows: Sequence[FlowRow]) -> list[Picture]:
        return [
            self.finish(edit, row.result().array()) for edit, row in zip(edits, rows, strict=True)
        ]


def at_interval(job: EditJob, interval: int) -> EditJob:
    """Return the job with a `step_interval`."""
    settings = structs.replace(job.request.settings, step_interval=interval)
    return replace(job, request=replace(job.request, settings=settings), prepared=None)


def _stored_entries(entries: tuple[AnchorEntry, ...], choice: CacheChoice) -> list[AnchorEntry]:
    """Return the entries that this choice keeps of a template's, in its storage format. `entries`
    has one entry per step.
    """
    steps = [entry.anchor.sigma for entry in entries]
    return [_recode(entries[i], choice) for i in anchor_steps(steps, choice.stride)]


def _recode(entry: AnchorEntry, choice: CacheChoice) -> AnchorEntry:
    """Return an entry in the form in which this choice stores it."""

    def keep(coded: Coded | None, is_stored: bool) -> Coded | None:
        return encode(coded.data, choice.format) if coded is not None and is_stored else None

    kv = choice.kind == "kv"
    blocks = tuple(
        BlockEntry(keep(b.hidden, not kv), keep(b.keys, kv), keep(b.values, kv))
        for b in entry.blocks
    )
    return AnchorEntry(entry.anchor, blocks)


def _nearest(entries: Sequence[AnchorEntry], sigma: float) -> AnchorEntry:
    return min(entries, key=lambda e: (abs(e.anchor.sigma - sigma), -e.anchor.sigma))
