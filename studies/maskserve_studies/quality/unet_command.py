"""Measure what cached activations cost a UNet in quality: held-out edits, class by class.

Every system is compared with dense rows of the same edits and seeds; tests compare those with
diffusers' pipeline. `served` is a worker's default: edits with large masks run dense. Guided edits
read one set of entries, primed without a prompt, in both passes. With `own prompts` each pass reads
entries primed with its own prompt: the difference is the cost of sharing. The naive rival reads the
entries of another picture.

    python scripts/bench eval_unet_quality --n 8 --json docs/benchmarks/unet_quality.json

--frontier compares kinds, formats, strides, rings and tiles.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from maskserve_benchmarks.checkout import DEMO_MODEL
from maskserve_benchmarks.demo_model.scenes import Edit
from maskserve_benchmarks.edits.direct import job_of, request_of
from maskserve_benchmarks.machine import processor
from maskserve_benchmarks.steps.replay import Replay
from maskserve_common.config_file import config_of
from maskserve_common.contracts.keys import anchor_steps
from maskserve_common.contracts.settings import EditSettings
from maskserve_engine.base.job import EditJob
from maskserve_engine.cache.entries import AnchorEntry, Coded, encode
from maskserve_engine.families.registry import load_decoder, load_encoder
from maskserve_engine.families.specs import load_spec
from maskserve_engine.families.unet.adapter import UnetAdapter
from maskserve_engine.families.unet.rows import UnetPrimingRow
from maskserve_engine.spec.model_spec import ALL_STEPS
from maskserve_studies.demo_model.edit_classes import CLASSES, edits_of
from maskserve_studies.quality.metrics import EditQuality, Picture, by_class, compare
from maskserve_studies.quality.report import table
from maskserve_triton.preprocess import mask_for_model

BATCH = 8
EDITS_IN_MEMORY = 8
"""Number of edits whose entries are in memory at a time."""
ENTRY_KINDS = frozenset({"h", "kv"})


@dataclass(frozen=True)
class Choice:
    """One way to run cached rows."""

    kind: str
    """Kind of all blocks: `kv` or `project`."""
    format: str
    stride: int
    """Steps per anchor."""
    ring: int = 0
    own_prompts: bool = False
    """Whether each pass reads entries that were primed with its own prompt."""
    shift: int = 0
    """The entries are those of the edit so many places later; 0: the edit's own."""
    halo: int = 0
    """`[cache] conv_halo`."""
    dense: int = 0
    """Number of first steps that compute every token."""

    @property
    def name(self) -> str:
        anchors = "one anchor" if self.stride >= ALL_STEPS else f"stride {self.stride}"
        suffix = ", own prompts" * self.own_prompts + ", another picture's" * bool(self.shift)
        suffix += f", halo {self.halo}" if self.halo else ""
        suffix += f", {self.dense} dense" if self.dense else ""
        return f"{self.kind}, {self.format}, {anchors}, ring {self.ring}{suffix}"


DEFAULT = Choice("kv", "int4", 7, ring=1)
DEFAULT_CHOICES = (
    DEFAULT,
    Choice("kv", "int4", 7),
    Choice("kv", "int4", 7, ring=2),
    Choice("kv", "int4", ALL_STEPS, ring=1),
    Choice("project", "model", 1, ring=1),
    Choice("kv", "int4", 7, ring=1, shift=1),
)
FRONTIER = (
    *DEFAULT_CHOICES,
    Choice("kv", "model", 1),
    Choice("project", "model", 1),
    Choice("kv", "model", 1, own_prompts=True),
    Choice("kv", "model", 7),
    Choice("kv", "int8", 7),
    Choice("kv", "model", 1, halo=4),
    Choice("kv", "model", 1, halo=1),
    *(Choice("kv", "int4", 7, ring=1, halo=halo) for halo in (8, 4, 2, 1)),
)


class Rig:
    """The demo UNet with everything that makes an edit of a prepared picture."""

    def __init__(self, folder: Path, steps: int, guidance: float, halo: int = 0) -> None:
        sections = {"model": {"path": str(folder)}, "cache": {"conv_halo": halo}}
        self.config = config_of(sections)
        self.steps = steps
        self.encoder, self.decoder = load_encoder(self.config), load_decoder(self.config)
        self.adapter = UnetAdapter.load(load_spec(folder), self.config)
        self.replay = Replay(self.adapter)
        self.prompt = self.encoder.encode_prompt("")
        default_guidance = self.adapter.spec.guidance_default(self.config.model.guidance_scale)
        self.guidance = guidance or default_guidance

    def job(self, edit: Edit, seed: int, ring: int = 0) -> EditJob:
        settings = EditSettings(
            num_inference_steps=self.steps,
            guidance_scale=self.guidance,
            negative_prompt="" if self.guidance > 1 else None,
            mask_ring=ring,
        )
        request = request_of(edit.source, edit.prompt, settings, seed, str(seed))
        mask = mask_for_model(edit.mask * np.uint8(255), self.adapter.spec)
        return job_of(self.encoder, request, edit.source, mask)

    def runs_dense(self, edit: Edit) -> bool:
        """Return whether a worker computes all tokens of such an edit because of its mask."""
        tokens = self.adapter.tokens(self.job(edit, 0, DEFAULT.ring))
        limit = self.config.cache.dense_above_ratio
        return tokens.cover_a_side or tokens.active / tokens.total >= limit

    def run(self, rows: Sequence[Any], kinds: Sequence[str]) -> list[NDArray[np.float32]]:
        """Step rows to their ends, `BATCH` at a time, and return their latents.

        Args:
            rows: rows of equal numbers of steps.
            kinds: kind of each block; empty: dense rows.
        """
        for first in range(0, len(rows), BATCH):
            batch = list(rows[first : first + BATCH])
            while batch[0].step < batch[0].steps:
                self.replay.step(batch, kinds)
        return [row.result().array() for row in rows]

    def dense(self, edits: Sequence[Edit]) -> list[Picture]:
        rows = [self.adapter.dense_row(self.job(edit, i)) for i, edit in enumerate(edits)]
        return self._finish(edits, self.run(rows, ()))

    def entries(
        self,
        edits: Sequence[Edit],
        *,
        own_prompts: bool = False,
        stride: int = 1,
        format: str = "model",
    ) -> list[list[AnchorEntry]]:
        """Return each template's entries; with `own_prompts` for both passes."""
        template_entries = []
        self.adapter.entry_halves = 2 if own_prompts else 1
        for i, edit in enumerate(edits):
            job = self.job(edit, i)
            row = self._priming_row(job, stride, format)
            if own_prompts and job.negative is not None:
                conditionings = (job.conditioning, job.negative)
                row.prompts = tuple(
                    self.adapter.prompt(conditioning, job) for conditioning in conditionings
                )
            row_entries = []
            while row.step < row.steps:
                self.adapter.step([row], None)
                row_entries.append(row.take_entry())
            template_entries.append(row_entries)
        return template_entries

    def cached(
        self, edits: Sequence[Edit], entries: Sequence[list[AnchorEntry]], choice: Choice
    ) -> list[Picture]:
        """Make the edits by cached rows.

        Args:
            edits: the edits to make.
            entries: each template's entries at every step in model dtype; with a halo, in the
                choice's stride and format.
            choice: the way to run the rows.
        """
        rows = []
        self.adapter.entry_halves = 2 if choice.own_prompts else 1
        for i, edit in enumerate(edits):
            job, row_entries = (
                self.job(edit, i, choice.ring),
                entries[(i + choice.shift) % len(edits)],
            )
            if not choice.halo:
                steps = anchor_steps([entry.anchor.sigma for entry in row_entries], choice.stride)
                row_entries = [_recode(row_entries[step], choice.format) for step in steps]
            per_step = [
                None
                if step < choice.dense
                else min(row_entries, key=lambda entry: abs(entry.anchor.sigma - sigma))
                for step, (sigma, _) in enumerate(self.adapter.sigmas(job))
            ]
            seed = job.request.template_noise_seed
            rows.append(self.replay.cached_row(job, per_step, seed))
        return self._finish(edits, self.run(rows, (choice.kind,) * self.adapter.blocks))

    def _priming_row(self, job: EditJob, stride: int, format: str) -> UnetPrimingRow:
        anchors = self.adapter.anchors(self.adapter.tokens(job).total, self.steps, stride)
        kinds, seed = (ENTRY_KINDS,) * self.adapter.blocks, job.request.template_noise_seed
        return self.adapter.priming_row(job, anchors, self.prompt, seed, kinds, format)

    def _finish(
        self, edits: Sequence[Edit], latents: Sequence[NDArray[np.float32]]
    ) -> list[Picture]:
        return [
            np.where(edit.mask[..., None], self.decoder.decode(edit_latents), edit.source)
            for edit, edit_latents in zip(edits, latents, strict=True)
        ]


def _recode(entry: AnchorEntry, format: str) -> AnchorEntry:
    def coded(part: Coded) -> Coded:
        return encode(part.data, format)

    return AnchorEntry(entry.anchor, tuple(block.map_coded(coded) for block in entry.blocks))


def measure(
    args: argparse.Namespace, edits: Sequence[Edit], choices: Sequence[Choice]
) -> dict[str, list[EditQuality]]:
    """Return the quality of each system's edits, by name; `dense` comes first, `served` last."""
    rig = Rig(args.model, args.steps, args.guidance)
    dense = rig.dense(edits)
    qualities = {"dense": compare(edits, dense, dense)}
    per_pass_values = {choice.own_prompts for choice in choices if not choice.halo}
    entries = {per_pass: rig.entries(edits, own_prompts=per_pass) for per_pass in per_pass_values}
    for choice in choices:
        choice_rig = rig
        if choice.halo:  # the meaning of feature maps depends on their storage format
            choice_rig = Rig(args.model, args.steps, args.guidance, choice.halo)
            template_entries = choice_rig.entries(edits, stride=choice.stride, format=choice.format)
        else:
            template_entries = entries[choice.own_prompts]
        qualities[choice.name] = compare(
            edits, choice_rig.cached(edits, template_entries, choice), dense
        )
    if DEFAULT in choices:
        triples = zip(edits, qualities["dense"], qualities[DEFAULT.name], strict=True)
        qualities["served"] = [
            dense_quality if rig.runs_dense(edit) else cached_quality
            for edit, dense_quality, cached_quality in triples
        ]
    return qualities


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    add = parser.add_argument
    add("--model", type=Path, default=DEMO_MODEL.with_name("demo-unet"))
    add("--n", type=int, default=8, help="edits of each class (default 8)")
    add("--classes", nargs="+", choices=CLASSES, default=list(CLASSES))
    add("--steps", type=int, default=20)
    add("--guidance", type=float, default=0.0, help="0: the model's own")
    add("--frontier", action="store_true", help="compare ways of caching")
    add("--dense", action="store_true", help="judge dense rows only")
    add("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    choices = () if args.dense else FRONTIER if args.frontier else DEFAULT_CHOICES
    systems: dict[str, dict[str, list[EditQuality]]] = {}
    with torch.inference_mode():
        for name in args.classes:
            edits = edits_of(name, args.n)
            for first in range(0, len(edits), EDITS_IN_MEMORY):
                for system, system_qualities in measure(
                    args, edits[first : first + EDITS_IN_MEMORY], choices
                ).items():
                    systems.setdefault(system, {}).setdefault(name, []).extend(system_qualities)
            print(f"{time.strftime('%H:%M:%S')}  {name}: {len(edits)} edits", flush=True)
    figures = {
        system: by_class(qualities_by_class) for system, qualities_by_class in systems.items()
    }
    print(table(figures))
    if args.json:
        report = {
            "command": " ".join(sys.argv),
            "hardware": processor(),
            "date": time.strftime("%Y-%m-%d"),
            "steps": args.steps,
            "default": DEFAULT.name,
            "systems": figures,
        }
        args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0
