"""Our ways of making an edit: dense, cached in any form, masked tokens alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from demo_model.scenes import Edit
from maskserve_core.config import config_of
from maskserve_core.contracts.facts import load_facts
from maskserve_core.contracts.settings import EditSettings
from maskserve_core.planning.flops import RowTokens, flux_work
from maskserve_engine.cache.codec import Coded, encode
from maskserve_engine.cache.entries import AnchorEntry, BlockEntry
from maskserve_engine.families.flux.adapter import FluxAdapter
from maskserve_engine.families.flux.rows import FluxRow
from maskserve_engine.families.registry import load_decoder, load_encoder
from maskserve_engine.job import EditJob
from maskserve_harness.benchmarks.direct import job_of, request_of

Picture = NDArray[np.uint8]
BATCH = 8


@dataclass(frozen=True)
class CacheChoice:
    """One way of keeping entries."""

    kind: str
    """`kv` or `h`."""
    format: str
    stride: int

    @property
    def name(self) -> str:
        return f"{self.kind}-{self.format}-stride{self.stride}"


class Rig:
    """A model folder with everything that makes an edit of a prepared picture."""

    def __init__(self, folder: Path, steps: int) -> None:
        self.config = config_of({"model": {"path": str(folder)}})
        self.steps = steps
        self.encoder, self.decoder = load_encoder(self.config), load_decoder(self.config)
        self.adapter = FluxAdapter.load(load_facts(folder), self.config)
        self.prompt = self.encoder.encode_prompt("")

    def jobs(self, edits: Sequence[Edit]) -> list[EditJob]:
        """Encoded edits; the seed of edit i is i."""
        return [self._job(edit, seed) for seed, edit in enumerate(edits)]

    def _job(self, edit: Edit, seed: int) -> EditJob:
        mask = edit.mask * np.uint8(255)
        settings = EditSettings(num_inference_steps=self.steps, mask_ring=0)
        if self.adapter.facts.guidance == "embedded":
            settings = replace(settings, guidance_scale=self.config.model.guidance_scale)
        request = request_of(edit.source, edit.prompt, settings, seed, str(seed))
        return job_of(self.encoder, request, edit.source, mask)

    def finish(self, edit: Edit, latents: NDArray[np.float32]) -> Picture:
        """Decode and paste the source back outside the mask."""
        pixels = self.decoder.decode(latents)
        return np.where(edit.mask[..., None], pixels, edit.source)

    def run(self, rows: Sequence[FluxRow], kinds: Sequence[str]) -> None:
        """All steps of rows with equal step counts, in batches."""
        for first in range(0, len(rows), BATCH):
            some = list(rows[first : first + BATCH])
            while some[0].step < some[0].steps:
                for row in some:
                    row.load()
                self.adapter.step(some, kinds)

    def dense(self, edits: Sequence[Edit], jobs: Sequence[EditJob]) -> list[Picture]:
        rows = [self.adapter.dense_row(job) for job in jobs]
        self.run(rows, ())
        return self._finish_all(edits, rows)

    def entries(self, jobs: Sequence[EditJob]) -> list[tuple[AnchorEntry, ...]]:
        """Each template's entries at every step, both kinds, in model dtype."""
        rows = []
        for job in jobs:
            tokens = job.moments.shape[1] * job.moments.shape[2] // 4
            anchors = self.adapter.anchors(tokens, self.steps, 1)
            rows.append(
                self.adapter.priming_row(job, anchors, self.prompt, _seed(job), "both", "model")
            )
        for first in range(0, len(rows), BATCH):
            some = rows[first : first + BATCH]
            while some[0].step < some[0].steps:
                self.adapter.step(some, ())
        return [tuple(row.done) for row in rows]

    def cached(
        self,
        edits: Sequence[Edit],
        jobs: Sequence[EditJob],
        entries: Sequence[tuple[AnchorEntry, ...]],
        choice: CacheChoice,
    ) -> list[Picture]:
        rows = []
        for job, all_of_it in zip(jobs, entries, strict=True):
            kept = all_of_it[(choice.stride - 1) // 2 :: choice.stride] or all_of_it[-1:]
            coded = [_recode(entry, choice) for entry in kept]
            per_step = [
                min(coded, key=lambda e: (abs(e.anchor.sigma - sigma), -e.anchor.sigma))
                for sigma, _ in self.adapter.sigmas(job)
            ]
            rows.append(self.adapter.cached_row(job, per_step, _seed(job)))
        kind = "kv" if choice.kind == "kv" else "project"
        self.run(rows, (kind,) * self.adapter.blocks)
        return self._finish_all(edits, rows)

    def alone(self, edits: Sequence[Edit], jobs: Sequence[EditJob]) -> list[Picture]:
        """Masked tokens by themselves, as if the rest did not exist (FlashPS Fig. 1, right)."""
        whole = [self.adapter.cached_row(job, (), _seed(job)) for job in jobs]
        parts = [replace(row, inactive=None) for row in whole]
        self.run(parts, ())
        for row, part in zip(whole, parts, strict=True):
            row.latents = part.latents
        return self._finish_all(edits, whole)

    def template_bytes(self, choice: CacheChoice, entries: tuple[AnchorEntry, ...]) -> int:
        """Bytes that one template takes in the store."""
        kept = entries[(choice.stride - 1) // 2 :: choice.stride] or entries[-1:]
        return sum(_recode(entry, choice).nbytes for entry in kept)

    def flop_speedup(self, jobs: Sequence[EditJob], kind: str) -> float:
        """Dense FLOPs over cached FLOPs of all edits' steps."""
        model = self.adapter.model
        dense = cached = 0.0
        for job in jobs:
            _, h, w = job.moments.shape
            work = flux_work(dict(model.config), h, w)
            active = len(np.flatnonzero(_token_mask(job, self.adapter.facts.token_pixels)))
            row = RowTokens((float(active),), float(len(job.conditioning["prompt_embeds"])))
            dense += work.step_flops([row], "dense")
            cached += work.step_flops([row], kind)
        return dense / cached

    def _finish_all(self, edits: Sequence[Edit], rows: Sequence[FluxRow]) -> list[Picture]:
        return [self.finish(edit, row.result()) for edit, row in zip(edits, rows, strict=True)]


def _recode(entry: AnchorEntry, choice: CacheChoice) -> AnchorEntry:
    """An entry as this choice would have kept it."""

    def keep(coded: Coded | None, wanted: bool) -> Coded | None:
        return encode(coded.data, choice.format) if coded is not None and wanted else None

    kv = choice.kind == "kv"
    blocks = tuple(
        BlockEntry(keep(b.hidden, not kv), keep(b.keys, kv), keep(b.values, kv))
        for b in entry.blocks
    )
    return AnchorEntry(entry.anchor, blocks)


def _seed(job: EditJob) -> int:
    return int(job.request.pixels_id[:12], 16)


def _token_mask(job: EditJob, side: int) -> NDArray[np.bool_]:
    h, w = job.edit_mask.shape
    cells = job.edit_mask.reshape(h // side, side, w // side, side)
    return np.asarray(cells.max(axis=(1, 3)) > 127)
