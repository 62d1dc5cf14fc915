"""Whether a dense step tells how near an edit that reads a template is to the dense edit.

At a probed step a dense pass starts from the row's present latents. The error is the relative
difference between its answer and the row's, over the computed tokens: the most that any measure at
that step can know. Such errors are compared with the edits' dB.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from maskserve_benchmarks.checkout import DEMO_MODEL
from maskserve_engine.base.job import EditJob
from maskserve_engine.batch.step_cache import RefreshSchedule
from maskserve_engine.families.mmdit.rows import FlowRow
from maskserve_engine.families.mmdit.spans import ExtrapolatedLatents
from maskserve_studies.demo_model.edit_classes import CLASSES, edits_of
from maskserve_studies.quality.choices import default
from maskserve_studies.quality.metrics import VISIBLE_BELOW, compare
from maskserve_studies.quality.refresh_steps import served_choice
from maskserve_studies.quality.systems import BATCH, Rig

_STEPS, _PROBES = 20, (0, 2, 10)
_KEPT_DB = 37.0
"""dB from which an edit keeps a promise of 40."""
_ACCEPTED = 0.04
"""Error at the first step up to which hits are listed on their own."""


def hit_figures(n: int) -> dict[str, dict[str, Any]]:
    """Return the figures of Fill's hits, `n` of each class: as served; with a dense first step that
    corrects the entries; and so with an entry for every seven steps.
    """
    rig = Rig(DEMO_MODEL, _STEPS)
    [job] = rig.jobs(edits_of(CLASSES[0], 1))
    served, refreshing = default(rig.adapter.spec, _STEPS), served_choice(rig, job)
    power = rig.adapter.spec.refresh.evenly_over
    plan = RefreshSchedule(
        frozenset(refreshing.dense), refreshing.format, True, refreshing.leaves_ring, power
    )
    corrected, begun = replace(plan, corrects_residuals=True), replace(served, dense_steps=1)
    variants = {
        "hit": (served, plan),
        "dense_first": (begun, corrected),
        "dense_first_stride_7": (replace(begun, stride=7), corrected),
    }
    results = {name: _HitResults() for name in variants}
    for name in CLASSES:
        edits = edits_of(name, n)
        jobs = rig.jobs(edits)
        dense, entries = rig.dense(edits, jobs), rig.entries(jobs)
        for variant, (choice, schedule) in variants.items():
            rows = rig.cached_rows(jobs, entries, choice, schedule)
            errors = _run(rig, rows, jobs, schedule)
            pictures = [
                rig.finish(edit, row.result().array())
                for edit, row in zip(edits, rows, strict=True)
            ]
            db = [quality.psnr_in_mask for quality in compare(edits, pictures, dense)]
            results[variant].add(name, db, errors)
    return {variant: class_results.figures() for variant, class_results in results.items()}


class _HitResults:
    def __init__(self) -> None:
        self._classes: list[str] = []
        self._db: list[float] = []
        self._errors: list[list[float]] = []

    def add(self, name: str, db: Sequence[float], errors: Sequence[list[float]]) -> None:
        self._classes += [name] * len(db)
        self._db += db
        self._errors += errors

    def figures(self) -> dict[str, Any]:
        db, errors, names = np.array(self._db), np.array(self._errors), np.array(self._classes)
        means = [db[names == name].mean() for name in dict.fromkeys(self._classes)]
        figures: dict[str, Any] = {**_figures(db), "worst_class": round(float(min(means)), 1)}
        for number, probe in enumerate(_PROBES):
            figures[f"rank_correlation_{probe}"] = rank_correlation(errors[:, number], db)
        accepted = errors[:, 0] <= _ACCEPTED
        for label, edits in (("accepted", accepted), ("refused", ~accepted)):
            if edits.any():
                figures[label] = _figures(db[edits])
        return figures


def _figures(db: NDArray[np.float64]) -> dict[str, Any]:
    return {
        "edits": len(db),
        "mean": round(float(db.mean()), 1),
        "least": round(float(db.min()), 1),
        "under_30": round(float(np.mean(db < VISIBLE_BELOW)), 3),
        "kept": round(float(np.mean(db >= _KEPT_DB)), 3),
    }


def rank_correlation(a: NDArray[np.float64], b: NDArray[np.float64]) -> float:
    """Return Spearman's rank correlation of two samples without ties."""
    ranks_a, ranks_b = (np.argsort(np.argsort(values)) for values in (a, b))
    return round(float(np.corrcoef(ranks_a, ranks_b)[0, 1]), 2)


def _run(
    rig: Rig, rows: Sequence[FlowRow], jobs: Sequence[EditJob], schedule: RefreshSchedule
) -> list[list[float]]:
    """Take all steps, and return each row's errors at the probed ones."""
    errors: list[list[float]] = [[] for _ in rows]
    for first in range(0, len(rows), BATCH):
        batch, numbers = rows[first : first + BATCH], range(first, min(first + BATCH, len(rows)))
        for step in range(_STEPS):
            dense = [_dense_at(rig, jobs[i], rows[i]) for i in numbers if step in _PROBES]
            for row in batch:
                row.leaves_out_text = step not in schedule.dense
            rig.replay.step(batch, ("kv",) * rig.adapter.blocks)
            if dense:
                rig.replay.step(dense, ())
            for i, probe in zip(numbers, dense, strict=False):
                answer, right = _answer(rows[i]), _answer(probe)[rows[i].image.masked.ids]
                errors[i].append(float((answer - right).norm() / right.norm()))
    return errors


def _dense_at(rig: Rig, job: EditJob, row: FlowRow) -> FlowRow:
    """Return a dense row with the latents of `row` at its next step."""
    dense, image = rig.adapter.dense_row(job), row.image
    latents = dense.image.masked.latents.clone()
    assert image.unmasked is not None
    around = image.unmasked.latents.at(row.sigma)[:, : row.channels]
    latents[image.unmasked.ids[: len(around)]] = around
    if image.ring is not None:
        assert isinstance(image.ring.latents, ExtrapolatedLatents)
        latents[image.ring.ids] = image.ring.latents.latents_now
    latents[image.masked.ids] = image.masked.latents
    dense.image.masked.latents, dense.step = latents, row.step
    return dense


def _answer(row: FlowRow) -> Tensor:
    """Return the model's answer in the last step, [n, 4C]."""
    assert row.sampler.moved is not None
    moved: Tensor = row.sampler.moved
    return torch.div(moved, row.schedule.walk[row.step - 1].change)
