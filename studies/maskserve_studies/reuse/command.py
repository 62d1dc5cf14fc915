"""Measure edits whose errors place their refresh steps: how near they are to dense edits, and what
they cost.

    python scripts/bench reuse --json reuse.json

Edits of the demo models, as many of each class as `--n` says, are compared with our dense rows, in
dB in the mask, for each fidelity that they promise:

- `mean`, `worst_class`, `least`, `under_30`: the edits' dB, and the share under 30.
- `kept`: the share within 3 dB of the promise or above.
- `refresh_steps`: mean number of steps that compute all tokens, in their own pass or ahead.
- `flops`: FLOPs as a share of a dense edit's, with FLUX.1's sizes at a mask ratio of 0.11.

`rivals` ignore the errors; on some model each must miss a limit, where controlled edits miss none.
`first` has the first refresh step alone; `once` one more, where controlled edits have it; `far` has
that one twice as far; `fitted` has the places that are known for some models; `late`, of models
that see the picture round the mask as noisy as the rest, begins as others do; `held` keeps the
values of the last refresh step, where others follow a line.
`line` is fitted through edits with two to five refresh steps at fixed places: dB over log10 of
their mean error.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from msgspec import structs
from numpy.typing import NDArray

from maskserve_benchmarks.checkout import DEMO_MODEL, DEMO_UNET
from maskserve_benchmarks.demo_model.scenes import Edit
from maskserve_benchmarks.reports import about, write_json
from maskserve_benchmarks.steps.replay import plan_of_kinds
from maskserve_benchmarks.timing import hardware
from maskserve_engine.base.job import EditJob
from maskserve_engine.batch.step_cache import RefreshSchedule, StepCacheReader
from maskserve_engine.planning.refresh_control import RefreshControl
from maskserve_studies.quality.classes import SCENES, Scenes, scene_classes
from maskserve_studies.quality.metrics import VISIBLE_BELOW, compare
from maskserve_studies.quality.refresh_steps import (
    flux_step_flops,
    scaled_extrapolation,
    served_choice,
)
from maskserve_studies.quality.systems import BATCH, Picture, Rig, at_interval
from maskserve_studies.reuse.coarse import coarse_flops, coarse_refreshes
from maskserve_studies.reuse.hits import hit_figures
from maskserve_studies.reuse.step_caches import INTERVALS, hits, rivals

MODELS: dict[str, tuple[Path, int]] = {
    "fill": (DEMO_MODEL, 20),
    "klein": (DEMO_MODEL.with_name("demo-edit"), 20),
    "klein8": (DEMO_MODEL.with_name("demo-edit"), 8),
    "klein4": (DEMO_MODEL.with_name("demo-edit"), 4),
    "unet": (DEMO_UNET, 20),
}
FIDELITIES = (36.0, 40.0, 44.0, 48.0)
RIVALS = ("once", "far", "first", "fitted", "late", "held")
_RIVALS_AT = 40.0
_MARGINS = (1, 2)
_SHORT_DB = 3.0
"""dB below the promise from which an edit has broken it."""


@dataclass(frozen=True, slots=True)
class ControlledEdit:
    picture: Picture
    schedule: RefreshSchedule
    """Schedule that its row has followed."""
    errors: tuple[float, ...]


def controlled(
    rig: Rig, edits: Sequence[Edit], jobs: Sequence[EditJob], plan: RefreshSchedule, ring: int
) -> list[ControlledEdit]:
    """Make the edits by rows that begin with a schedule, and follow their errors if it has a
    control.
    """
    kinds, out = plan_of_kinds(("kv",) * rig.adapter.blocks), list[ControlledEdit]()
    for first in range(0, len(jobs), BATCH):
        rows: list[Any] = []
        for job in jobs[first : first + BATCH]:
            settings = structs.replace(job.request.settings, mask_ring=ring)
            ringed = replace(job, request=replace(job.request, settings=settings))
            rows.append(rig.adapter.refreshing_row(ringed, plan))
            rig.attach(rows[-1], ringed)
        readers = [StepCacheReader(row, rig.adapter.entry_blocks) for row in rows]
        plans, refreshed_at = [plan] * len(rows), [0] * len(rows)
        for step in range(rig.steps):
            reads: Any = [
                None if step in row_plan.dense else reader.entry_at(step)
                for row_plan, reader in zip(plans, readers, strict=True)
            ]
            rig.adapter.step(rows, kinds if any(reads) else None, reads)
            for number, reader in enumerate(readers):
                error, control = reader.controlling_error(step), plan.control
                if error is None or control is None:
                    continue
                remainder = control.after(refreshed_at[number], step, error)
                plans[number], refreshed_at[number] = (
                    plans[number].controlled(step, remainder),
                    step,
                )
                reader.refresh_at(plans[number])
        for edit, row, row_plan, reader in zip(
            edits[first : first + BATCH], rows, plans, readers, strict=True
        ):
            picture = rig.finish(edit, row.result().array())
            out.append(ControlledEdit(picture, row_plan, tuple(reader.refresh_errors.values())))
    return out


class Trial:
    """The edits of one model, and their dense pictures.

    Args:
        folder: folder of the model.
        steps: steps of each edit.
        n: edits of each class.
        scenes: see `scene_classes`.
        true_cfg: see `Rig`.
    """

    def __init__(
        self, folder: Path, steps: int, n: int, scenes: Scenes = "drawn", true_cfg: float = 0.0
    ) -> None:
        self.rig = rig = Rig(folder, steps, true_cfg=true_cfg)
        classes = scene_classes(rig.adapter.spec, n, scenes)
        self.classes = [name for name, edits in classes.items() for _ in edits]
        self.edits = [edit for edits in classes.values() for edit in edits]
        self.jobs = rig.jobs(self.edits)
        self.dense = rig.dense(self.edits, self.jobs)
        self.choice = served_choice(rig, self.jobs[0], 2)
        self._all_steps = steps

    def at_interval(self, interval: int) -> Trial:
        """Return a trial of the same edits with a `step_interval`, beside the same dense
        pictures.
        """
        trial = copy(self)
        trial.rig, trial.jobs = copy(self.rig), [at_interval(job, interval) for job in self.jobs]
        trial.rig.steps = self.rig.adapter.steps(trial.jobs[0])
        return trial

    def points(self) -> list[tuple[float, float]]:
        """Return mean error and dB of edits with refresh steps at fixed places."""
        points = list[tuple[float, float]]()
        for count in range(2, 2 + max(1, min(4, self.rig.steps // 3))):
            anchors = frozenset(served_choice(self.rig, self.jobs[0], count).dense)
            fixed = replace(self.schedule(_RIVALS_AT), refresh_steps=anchors, control=None)
            results, db = self._run(fixed)
            points += [
                (float(np.mean(edit.errors)), float(value))
                for edit, value in zip(results, db, strict=True)
            ]
        return points

    def schedule(self, fidelity: float) -> RefreshSchedule:
        """Return the schedule with which edits begin that promise a fidelity."""
        spec, semantics = self.rig.adapter.spec.refresh, self.rig.adapter.spec.semantics
        sigmas = [sigma for sigma, _ in self.rig.adapter.sigmas(self.jobs[0])]
        control = RefreshControl.of(fidelity, sigmas, spec.evenly_over, semantics)
        return RefreshSchedule(
            control.begin().refresh_steps | {0},
            self.choice.format,
            self.choice.text,
            self.choice.leaves_ring,
            spec.evenly_over,
            second_order=semantics.noisy_around,
            control=control,
        )

    def figures(self, fidelity: float, plan: RefreshSchedule | None = None) -> dict[str, Any]:
        """Return the figures of edits that promise a fidelity.

        Args:
            fidelity: dB.
            plan: schedule of a rival; None: their errors place refresh steps.
        """
        chosen = self.schedule(fidelity) if plan is None else plan
        results, db = self._run(chosen)
        means = [db[np.array(self.classes) == name].mean() for name in dict.fromkeys(self.classes)]
        return {
            "fidelity": fidelity,
            "edits": len(results),
            "mean": round(float(db.mean()), 2),
            "worst_class": round(float(min(means)), 2),
            "least": round(float(db.min()), 2),
            "under_30": round(float(np.mean(db < VISIBLE_BELOW)), 4),
            "kept": round(float(np.mean(db >= fidelity - _SHORT_DB)), 4),
            "refresh_steps": round(
                float(np.mean([len(e.schedule.refresh_steps) for e in results])), 2
            ),
            "flops": round(float(np.mean([self._flops(e.schedule) for e in results])), 3),
        }

    def _run(self, plan: RefreshSchedule) -> tuple[list[ControlledEdit], NDArray[np.float64]]:
        """Return the edits of a schedule, and their dB."""
        results = controlled(self.rig, self.edits, self.jobs, plan, self.choice.ring)
        qualities = compare(self.edits, [edit.picture for edit in results], self.dense)
        return results, np.array([quality.psnr_in_mask for quality in qualities])

    def _flops(self, plan: RefreshSchedule) -> float:
        whole, between = flux_step_flops(self.choice)
        steps, refreshes = self.rig.steps, len(plan.refresh_steps)
        computed = refreshes * whole + (steps - len(plan.dense)) * between
        return computed / (self._all_steps * whole)

    def coarse(self) -> dict[str, dict[str, Any]]:
        """Return the figures of edits whose refresh steps compute fewer tokens far from the mask,
        by the margin round it that is computed whole.
        """
        figures = dict[str, dict[str, Any]]()
        for margin, first in itertools.product(_MARGINS, (False, True)):
            with coarse_refreshes(margin, first=first):
                one = self.figures(_RIVALS_AT)
            flops = coarse_flops(
                self.choice, self.rig.steps, one["refresh_steps"], margin, first=first
            )
            label = f"coarse {margin}" + (", first too" if first else "")
            figures[label] = {**one, "flops": round(flops, 3)}
        return figures

    def rivals(self, names: Sequence[str]) -> dict[str, dict[str, Any]]:
        plan = self.schedule(_RIVALS_AT)
        assert plan.control is not None
        distances, first = np.array(plan.control.distances), sorted(plan.refresh_steps)[1]
        twice = distances[0] - 2.0 * (distances[0] - distances[first])
        places = {"once": first, "far": int(np.abs(distances - twice).argmin()), "first": 0}
        anchors = {name: frozenset({0, place}) for name, place in places.items()}
        if self.rig.adapter.spec.refresh.stride:
            anchors["fitted"] = frozenset(served_choice(self.rig, self.jobs[0]).dense)
        plans = {
            name: replace(plan, refresh_steps=at, control=None) for name, at in anchors.items()
        }
        if self.rig.adapter.spec.semantics.noisy_around:
            late = RefreshControl(plan.control.tolerance, plan.control.distances)
            begun = late.begin().refresh_steps | {0}
            plans["late"] = replace(plan, refresh_steps=begun, control=late)
        rivals = {name: self.figures(_RIVALS_AT, plans[name]) for name in plans if name in names}
        if "held" in names:
            with scaled_extrapolation(0.0):
                rivals["held"] = self.figures(_RIVALS_AT)
        return rivals


def step_caches(folder: Path, steps: int, n: int, scenes: Scenes) -> dict[str, dict[str, Any]]:
    """Return the figures of diffusers' caches of whole steps, and of ours by `step_interval`."""
    trial = Trial(folder, steps, n, scenes)
    figures = {
        f"refresh steps, step_interval {interval}": trial.at_interval(interval).figures(_RIVALS_AT)
        for interval in INTERVALS
    }
    if not trial.rig.adapter.spec.semantics.reference:
        figures |= hits(trial.rig, trial.edits, trial.jobs, trial.dense)
    figures |= rivals(folder, trial.edits, steps)
    for label, row in figures.items():
        print(folder.name, label, row, flush=True)
    return figures


def passes(figures: dict[str, Any]) -> bool:
    """Whether figures are within the limits."""
    promise, least_mean, worst_class = figures["fidelity"], 40.0, 34.0
    return bool(
        figures["mean"] >= min(least_mean, promise)
        and figures["worst_class"] >= worst_class
        and figures["under_30"] <= 0.005
        and figures["kept"] >= 0.95
    )


def fitted(points: Sequence[tuple[float, float]]) -> dict[str, float]:
    """Return the line of dB over log10 of the mean error."""
    errors, db = np.array(points).T
    slope, intercept = np.polyfit(np.log10(errors), db, 1)
    missed = db - (intercept + slope * np.log10(errors))
    return {
        "intercept": round(float(intercept), 1),
        "slope": round(float(-slope), 1),
        "rms": round(float(np.sqrt(np.mean(missed**2))), 1),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    add = parser.add_argument
    add("--only", nargs="+", choices=(*MODELS, "base"), default=tuple(MODELS))
    add("--base", type=Path, help="folder of another model, as train_inpaint_model makes it")
    add("--n", type=int, default=16, help="edits of each class (default 16)")
    add("--scenes", choices=SCENES, default="drawn", help="see eval_quality")
    add("--steps", type=int, help="steps of each edit (default 20, klein8 8, klein4 4)")
    add("--true-cfg", type=float, default=0.0, help="true_cfg_scale of the edits (default none)")
    add("--fidelity", type=float, nargs="+", default=FIDELITIES, help="dB that edits promise")
    add("--rivals", nargs="*", choices=RIVALS, default=RIVALS)
    add("--coarse", action="store_true", help="and refresh steps of fewer tokens (`coarse`)")
    add("--step-caches", action="store_true", help="caches of whole steps instead (`step_caches`)")
    add("--hits", action="store_true", help="edits that read a template instead (`hits`)")
    add("--json", type=Path)
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    if args.hits:
        hits = hit_figures(args.n)
        for label, figures in hits.items():
            print(label, figures)
        write_json({**about(hardware(torch.device("cpu"))), "hits": hits}, args.json)
        return 0
    models, points = dict[str, Any](), list[tuple[float, float]]()
    for name in args.only:
        if name == "base" and args.base is None:
            raise SystemExit("--only base needs --base")
        folder, steps = (args.base, 20) if name == "base" else MODELS[name]
        steps = args.steps or steps
        if args.step_caches:
            models[name] = step_caches(folder, steps, args.n, args.scenes)
            continue
        trial = Trial(folder, steps, args.n, args.scenes, args.true_cfg)
        promised = [trial.figures(fidelity) for fidelity in args.fidelity]
        rivals = trial.rivals(args.rivals) | (trial.coarse() if args.coarse else {})
        for label, figures in (*zip(args.fidelity, promised, strict=True), *rivals.items()):
            print(name, label, "passes" if passes(figures) else "MISSES", figures, flush=True)
        models[name] = {"promised": promised, "rivals": rivals}
        points += trial.points()
    report = {**about(hardware(torch.device("cpu"))), "models": models}
    if points:
        report["line"] = fitted(points)
        print("line", report["line"])
    write_json(report, args.json)
    return 0
