"""Measure instruction edits that find their own regions: how well these cover what changes, and how
near the edits are to dense ones.

    python scripts/bench regions --n 8 --json regions.json

The demo edit model makes `--n` held-out edits of each class without a mask. A row computes all
tokens for its first steps, then those of its region (`planning.regions`), with refresh steps.

- `recall`, `precision`, `iou`: of the region, against the tokens whose pixels the dense edit
  changes by more than `--changed` levels (root mean square); the source is decoded from its
  latents. Over all edits.
- `mean`, `least`, `inside`: dB against the dense edit, of the whole picture; the mean, the least,
  and the mean over the changed tokens' pixels alone; `inside_least` is the least of these.
- `flops`: FLOPs as a share of a dense edit's, with klein 4B's sizes at 1024x1024.

Rivals: `random` has a region of the same shape at a random place, `one` only one token of it.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from maskserve_benchmarks.checkout import DEMO_EDIT
from maskserve_benchmarks.published_models import KLEIN_4B
from maskserve_benchmarks.reports import about, write_json
from maskserve_benchmarks.steps.replay import plan_of_kinds
from maskserve_benchmarks.timing import hardware
from maskserve_engine.base.job import EditJob
from maskserve_engine.batch.step_cache import RefreshSchedule, StepCacheReader
from maskserve_engine.families.flux2 import spec as flux2
from maskserve_engine.families.mmdit.preparation import unpack_latents
from maskserve_engine.families.mmdit.rows import FlowRow
from maskserve_engine.planning.flops import RowTokens
from maskserve_engine.planning.refresh_steps import RefreshRule
from maskserve_engine.planning.regions import Bools, RegionRule
from maskserve_engine.spec.family import StepPicture
from maskserve_studies.demo_model.reference_edits import (
    NAMED_CLASSES,
    named_class,
    package_photographs,
)
from maskserve_studies.quality.choices import FLUX_TEXT
from maskserve_studies.quality.systems import BATCH, Picture, Rig

RULE = flux2.REGION
_REFRESH = RefreshRule()
_TOKEN = 8
"""Pixels along one side of a token of the demo model."""

FindRegion = Callable[[int, Bools], Bools]
"""Returns the region of an edit, from its number and the region that its rule finds."""


@dataclass(frozen=True, slots=True)
class RegionEdit:
    """An edit that has found its region."""

    picture: Picture
    region: Bools
    """Its last region, [rows, columns]."""
    joined: int
    """Tokens that have joined at refresh steps."""
    whole: int
    """Passes over all tokens: dense steps and lookaheads."""
    between: int
    """Steps that computed the region's tokens alone beside a lookahead, if they had one."""


class Trial:
    """Dense edits, and the regions that they change.

    Args:
        n: edits of each class.
        steps: steps of each edit.
        photographs: whether objects stand on photographs that training never used.
        changed: levels from which a token has changed.
    """

    def __init__(self, n: int, steps: int, changed: float, *, photographs: bool = False) -> None:
        self.rig = rig = Rig(DEMO_EDIT, steps)
        pictures = package_photographs() if photographs else ()
        self.edits = [
            edit for name in NAMED_CLASSES for edit in named_class(name, n, photographs=pictures)
        ]
        self.jobs = [without_mask(job) for job in rig.jobs(self.edits)]
        rows = [rig.adapter.dense_row(job) for job in self.jobs]
        for first in range(0, len(rows), BATCH):
            batch = rows[first : first + BATCH]
            for _ in range(steps):
                rig.adapter.step(batch, None, [None] * len(batch))
        self.dense = self._pictures(rows)
        self.grid = rows[0].image.grid
        sources = [rows[i].image.masked.context for i in range(len(rows))]
        decoded = [
            rig.decoder.decode(unpack_latents(source.float(), self.grid).numpy())[..., :3]
            for source in sources
            if source is not None
        ]
        self.levels = [
            token_levels(dense, source) for dense, source in zip(self.dense, decoded, strict=True)
        ]
        self.changed = [levels > changed for levels in self.levels]

    def _pictures(self, rows: Sequence[FlowRow]) -> list[Picture]:
        return [self.rig.decoder.decode(row.result().array())[..., :3] for row in rows]

    def schedule(self, rule: RegionRule, begin: int) -> RefreshSchedule:
        """Return the schedule of a row whose region is chosen before step `begin`."""
        spec = self.rig.adapter.spec
        sigmas = [sigma for sigma, _ in self.rig.adapter.sigmas(self.jobs[0])][begin:]
        plan = RefreshSchedule.of(spec, _REFRESH, rule.count(len(sigmas)), sigmas)
        return plan.begun_at(begin, len(sigmas), rule.last)

    def run(self, rule: RegionRule, find: FindRegion | None = None) -> list[RegionEdit]:
        """Make the edits by rows that find their regions."""
        return [
            edit
            for first in range(0, len(self.jobs), BATCH)
            for edit in self._batch(range(first, min(first + BATCH, len(self.jobs))), rule, find)
        ]

    def _batch(
        self,
        numbers: Sequence[int],
        rule: RegionRule,
        find: FindRegion | None,
    ) -> list[RegionEdit]:
        adapter, steps = self.rig.adapter, self.rig.steps
        rows = [adapter.dense_row(self.jobs[number]) for number in numbers]
        regions: list[Bools] = [np.ones(self.grid, np.bool_)] * len(rows)
        joined, whole, between = [0] * len(rows), [0] * len(rows), [0] * len(rows)
        readers: list[StepCacheReader | None] = [None] * len(rows)
        kinds = plan_of_kinds(("kv",) * adapter.blocks)
        for step in range(steps):
            reads: list[Any] = []
            for i, row in enumerate(rows):
                reader = readers[i]
                plan = None if row.step_cache is None else row.step_cache.schedule
                dense = reader is None or plan is None or step in plan.dense
                reads.append(None if dense or reader is None else reader.entry_at(step))
                whole[i] += dense or (plan is not None and step in plan.lookahead_steps)
                between[i] += not dense
            adapter.step(rows, kinds if any(read is not None for read in reads) else None, reads)
            if step == steps - 1:
                break
            for i, row in enumerate(rows):
                plan = None if row.step_cache is None else row.step_cache.schedule
                if plan is None and step + 1 == rule.after:
                    regions[i] = region = rule.region(row.change().array().reshape(self.grid))
                    if find is not None:
                        regions[i] = region = find(numbers[i], region)
                elif find is None and plan and row.lookahead is not None:
                    region = rule.region(row.change().array().reshape(self.grid), regions[i])
                    if not (region & ~regions[i]).any():
                        continue
                    joined[i] += int((region & ~regions[i]).sum())
                    regions[i] = region
                else:
                    continue
                if region.all() or not region.any():
                    continue
                adapter.release()
                row.narrow(torch.from_numpy(np.flatnonzero(region)), self.schedule(rule, step + 1))
                readers[i] = StepCacheReader(row, adapter.entry_blocks)
        pictures = self._pictures(rows)
        return [
            RegionEdit(*parts)
            for parts in zip(pictures, regions, joined, whole, between, strict=True)
        ]

    def figures(self, edits: Sequence[RegionEdit]) -> dict[str, Any]:
        hit = sum(int((e.region & c).sum()) for e, c in zip(edits, self.changed, strict=True))
        covered = sum(int(edit.region.sum()) for edit in edits)
        real = sum(int(changed.sum()) for changed in self.changed)
        db = np.array([psnr(e.picture, d) for e, d in zip(edits, self.dense, strict=True)])
        inside = np.array(
            [
                psnr(edit.picture, dense, in_pixels(changed))
                for edit, dense, changed in zip(edits, self.dense, self.changed, strict=True)
                if changed.any()
            ]
        )
        return {
            "edits": len(edits),
            "recall": round(hit / max(real, 1), 3),
            "precision": round(hit / max(covered, 1), 3),
            "iou": round(hit / max(covered + real - hit, 1), 3),
            "share": round(covered / sum(edit.region.size for edit in edits), 3),
            "mean": round(float(db.mean()), 1),
            "least": round(float(db.min()), 1),
            "under_30": round(float((db < 30).mean()), 3),
            "inside": round(float(inside.mean()), 1),
            "inside_least": round(float(inside.min()), 1),
            "joined": int(np.count_nonzero([edit.joined for edit in edits])),
            "flops": round(float(np.mean([self._flops(edit) for edit in edits])), 3),
        }

    def _flops(self, edit: RegionEdit) -> float:
        work = flux2.count(KLEIN_4B, StepPicture(128, 128, references=1))
        active = float(edit.region.mean() * (work.tokens[0] - work.context))
        whole = work.step_flops([work.row_at(1.0, FLUX_TEXT)], "dense")
        between = work.step_flops([RowTokens((active,), 0.0, text_read=FLUX_TEXT)], "kv")
        return (edit.whole * whole + edit.between * between) / (self.rig.steps * whole)


def without_mask(job: EditJob) -> EditJob:
    """Return the same edit without its mask."""
    request = replace(job.request, kind="edit")
    return replace(job, request=request, edit_mask=np.full_like(job.edit_mask, 255))


def token_levels(picture: Picture, source: Picture) -> NDArray[np.float64]:
    """Return [rows, columns] root mean square differences of the pixels of each token."""
    height, width = picture.shape[:2]
    squares = (picture.astype(np.float64) - source) ** 2
    tokens = squares.reshape(height // _TOKEN, _TOKEN, width // _TOKEN, _TOKEN, -1)
    levels: NDArray[np.float64] = np.sqrt(tokens.mean(axis=(1, 3, 4)))
    return levels


def in_pixels(tokens: Bools) -> Bools:
    return np.kron(tokens, np.ones((_TOKEN, _TOKEN), np.bool_)).astype(np.bool_)


def psnr(picture: Picture, reference: Picture, pixels: Bools | None = None) -> float:
    squares = (picture.astype(np.float64) - reference) ** 2
    error = squares.mean() if pixels is None else squares[pixels].mean()
    return float(10.0 * np.log10(255.0**2 / max(float(error), 1e-2)))


def at_random(seed: int) -> FindRegion:
    """Return the rival that puts the region at a random place."""

    def find(number: int, region: Bools) -> Bools:
        rng = np.random.default_rng([seed, number])
        shift = [int(rng.integers(side)) for side in region.shape]
        return np.roll(region, shift, (0, 1))

    return find


def one_token(number: int, region: Bools) -> Bools:
    """Return the rival that computes one token of the region."""
    one = np.zeros_like(region)
    one.flat[np.flatnonzero(region)[:1]] = True
    return one


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    add = parser.add_argument
    add("--n", type=int, default=8, help="edits of each class (default 8)")
    add("--steps", type=int, default=20)
    add("--after", type=int, nargs="+", default=[RULE.after], help="steps before the region")
    add("--threshold", type=float, nargs="+", default=[RULE.threshold], help="change of a token")
    add("--refreshes", type=int, nargs="+", default=[RULE.refreshes])
    add("--last", type=int, nargs="+", default=[RULE.last], help="last steps of all tokens")
    add("--changed", type=float, default=12.0, help="levels from which a token has changed")
    add("--photographs", action="store_true", help="objects on photographs outside the training")
    add("--no-rivals", action="store_true")
    add("--seed", type=int, default=0, help="of the rival's places")
    add("--json", type=Path)
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    trial = Trial(args.n, args.steps, args.changed, photographs=args.photographs)
    rows = []
    for numbers in product(args.after, args.threshold, args.refreshes, args.last):
        rule = RegionRule(*numbers)
        rivals: dict[str, FindRegion | None] = {"found": None}
        if not args.no_rivals:
            rivals |= {"random": at_random(args.seed), "one": one_token}
        for name, find in rivals.items():
            row = {"region": name, **rule._asdict(), **trial.figures(trial.run(rule, find))}
            print(row, flush=True)
            rows.append(row)
    write_json({**about(hardware(torch.device("cpu"))), "rows": rows}, args.json)
    return 0
