"""Measure what cached activations cost in quality, against diffusers' own output.

The systems are diffusers' FluxFillPipeline, our dense rows, cached rows, the masked tokens alone
(FlashPS Fig. 1), a crop, and diffusers' FirstBlockCache at an equal saving. Each system makes the
demo model's held-out edits, class by class (demo_model/edit_classes.py). The command writes JSON, a
table, the error over the distance from the mask's rim, and a sheet of each class's worst edit.

    python scripts/bench eval_quality --n 16 --json quality.json --sheet worst.png --rim rim.png

--frontier compares kinds, formats, strides and rings of cached rows with our dense rows, and plots
fidelity over bytes and FLOPs on FLUX.1-dev's grid. A model with Inpaint semantics
(train_inpaint_model) is also compared with our dense rows; tests compare these with
FluxInpaintPipeline.

    python scripts/bench eval_quality --frontier --n 6 --steps 12 --json frontier.json --plots .

--own compares refresh schedules, with rivals that must be worse.

    python scripts/bench eval_quality --own --n 2 --json own.json
    python scripts/bench eval_quality --own --model assets/models/demo-unet

A model that sees the source as reference (train_demo_edit) gets edits that name the object to
change (demo_model/reference_edits.py), and is compared with its dense rows: one anchor or more,
dense first steps, the reference alone. At 20 steps, at its default of four, and with refresh steps:

    python scripts/bench eval_quality --model assets/models/demo-edit --n 40 --json edit-20.json
    python scripts/bench eval_quality --model assets/models/demo-edit --n 40 --steps 4
    python scripts/bench eval_quality --model assets/models/demo-edit --own --n 8 --steps 4

`--scenes photographs` puts the objects on photographs that its training never used, and `bare`
takes such photographs alone.

--adapters judges demo LoRAs and ControlNets (quality/adapters.py). The exit code is 1 if a bar is
missed, for example because edits ignore the adapter.

    python scripts/bench eval_quality --adapters assets/adapters/hollow.safetensors --n 96
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from maskserve_benchmarks.checkout import DEMO_MODEL
from maskserve_benchmarks.demo_model.scenes import Edit
from maskserve_benchmarks.reports import about, write_json
from maskserve_benchmarks.timing import hardware
from maskserve_engine.base.job import EditJob
from maskserve_engine.planning.flops import ModelWork
from maskserve_engine.spec.model_spec import ModelSpec
from maskserve_studies.demo_model.edit_classes import CLASSES
from maskserve_studies.demo_model.evaluation import run_edits
from maskserve_studies.demo_model.reference_edits import NAMED_CLASSES
from maskserve_studies.quality.adapters import AdapterRig, adapter_edits, judge_adapter
from maskserve_studies.quality.choices import CacheChoice, default, default_choices, frontier
from maskserve_studies.quality.choices import published as published_work
from maskserve_studies.quality.classes import SCENES, scene_classes
from maskserve_studies.quality.metrics import Picture, by_class, compare, rim_errors
from maskserve_studies.quality.published import missing, published
from maskserve_studies.quality.refresh_steps import table as refresh_table
from maskserve_studies.quality.report import draw_worst, plot_frontier, plot_rim, table
from maskserve_studies.quality.rivals import first_block_cache
from maskserve_studies.quality.systems import Rig

CROP_MARGIN = 2
"""Tokens around the mask's bounding box that a crop keeps."""

ByClass = dict[str, list[Picture]]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    add = parser.add_argument
    add("--n", type=int, default=16, help="edits of each class (default 16)")
    add("--classes", nargs="+", choices=(*CLASSES, *NAMED_CLASSES), help="default: all")
    add(
        "--scenes",
        choices=SCENES,
        default="drawn",
        help="of a model that takes references: drawn as in its training, objects on "
        "photographs outside its training, or these photographs alone",
    )
    add("--steps", type=int, default=20)
    add("--model", type=Path, default=DEMO_MODEL)
    add("--frontier", action="store_true", help="compare ways of caching, not systems")
    add("--own", action="store_true", help="compare refresh schedules, not systems")
    add("--choices", nargs="+", help="by the names that are printed; default: all")
    add("--wordless", action="store_true", help="prime templates without a word")
    add("--adapters", type=Path, nargs="+", help="LoRA files, ControlNet folders: judge these")
    add("--stride", type=float, help="`[cache] own_anchors` of rows with a ControlNet")
    add("--no-fbcache", action="store_true", help="leave FirstBlockCache out")
    add("--threads", type=int, default=1, help="of torch; more do not help a model so small")
    add("--json", type=Path)
    add("--plots", type=Path, help="folder for fidelity over bytes and over FLOPs (--frontier)")
    add("--rim", type=Path, help="PNG of the error over the distance from the mask's rim")
    add("--sheet", type=Path, help="PNG of the worst edit of each class, by system")
    add("--clip", type=Path, help="folder of a CLIP model, for the CLIP score")
    add("--fid", type=Path, help="Inception weights of torch-fidelity, for FID")
    return parser.parse_args()


def log(line: str) -> None:
    print(f"{time.strftime('%H:%M:%S')}  {line}", flush=True)


class Run:
    """All systems' pictures of all classes, and further figures of the systems."""

    def __init__(self, rig: Rig, classes: dict[str, list[Edit]]) -> None:
        self.rig, self.classes = rig, classes
        self.default = default(rig.adapter.spec, rig.steps)
        self.work = published_work(rig.adapter.spec)
        self.pictures: dict[str, ByClass] = {}
        self.system_figures: dict[str, dict[str, Any]] = {}

    def add(self, system: str, name: str, pictures: list[Picture]) -> None:
        self.pictures.setdefault(system, {})[name] = pictures

    def make(self, choices: list[CacheChoice]) -> None:
        """Make every class with maskserve's rows."""
        rig = self.rig
        for name, edits in self.classes.items():
            jobs = rig.jobs(edits)
            dense = rig.dense(edits, jobs)
            self.add("dense", name, dense)
            masked = [rig.tokens_of(job) for job in jobs]
            self.add("masked_tokens_alone", name, rig.edit_from_tokens(edits, jobs, masked))
            ringed = [rig.tokens_of(job, self.default.ring) for job in jobs]
            self.add(
                "masked_tokens_and_ring_alone", name, rig.edit_from_tokens(edits, jobs, ringed)
            )
            crops = [rig.window_of(job, CROP_MARGIN) for job in jobs]
            self.add("crop_and_stitch", name, rig.edit_from_tokens(edits, jobs, crops))
            entries = rig.entries(jobs)
            for choice in choices:
                self.add(choice.name, name, rig.cached(edits, jobs, entries, choice))
                self.system_figures[choice.name] = {
                    "bytes_per_template": rig.template_bytes(choice, entries[0]),
                    "default": choice == self.default,
                    "flux_gib_per_template": round(
                        choice.flux_bytes(rig.schedule, self.work) / 2**30, 3
                    ),
                    **flux_costs(choice, self.work, rig.predicted(choice)),
                }
            self.add("served", name, [self._served(name, i, job) for i, job in enumerate(jobs)])
            self.system_figures["served"] = self.system_figures[self.default.name]
            log(f"{name}: {len(edits)} edits by {len(choices)} caches")

    def _served(self, name: str, number: int, job: EditJob) -> Picture:
        """Return the picture of a worker with default settings. If nearly all of the picture is
        masked, the edit runs dense. If the model needs it, the first steps are dense.
        """
        if self.rig.too_large(job, self.default.ring):
            return self.pictures["dense"][name][number]
        dense_steps = self.rig.dense_steps(job, self.default.ring)
        choice = replace(self.default, dense_steps=dense_steps)
        return self.pictures[choice.name][name][number]

    def diffusers(self, pipe: Any, *, fbcache: bool) -> None:
        """Make every class with diffusers' pipeline or with its FirstBlockCache."""
        for name, edits in self.classes.items():
            self.add("diffusers", name, self._piped(pipe, edits, 8))
        log("diffusers")
        if not fbcache:
            return
        # The work of as many dense steps as the default takes on FLUX's grid.
        self.pictures["first_block_cache"], threshold, saving = first_block_cache(
            pipe,
            lambda n: {name: self._piped(pipe, e[:n], 1) for name, e in self.classes.items()},
            max(map(len, self.classes.values())),
            flux_costs(self.default, self.work)["flux_flop_speedup"],
        )
        self.system_figures["first_block_cache"] = {
            "threshold": threshold,
            "block_call_saving": round(saving, 3),
        }
        log("first_block_cache")

    def _piped(self, pipe: Any, edits: list[Edit], batch: int) -> list[Picture]:
        return run_edits(pipe, edits, self.rig.steps, batch)

    def figures(self, reference: str, args: argparse.Namespace) -> dict[str, dict[str, Any]]:
        """Return the figures of every system against the pictures of the `reference` system."""
        truth = self.pictures[reference]
        everything = [edit for edits in self.classes.values() for edit in edits]

        def flat(pictures: ByClass) -> list[Picture]:
            return [picture for name in self.classes for picture in pictures[name]]

        return {
            system: {
                **published(everything, flat(system_pictures), flat(truth), args.clip, args.fid),
                **by_class(
                    {
                        name: compare(edits, system_pictures[name], truth[name])
                        for name, edits in self.classes.items()
                    }
                ),
                "rim_errors": rim_errors(everything, flat(system_pictures), flat(truth)),
                **self.system_figures.get(system, {}),
            }
            for system, system_pictures in self.pictures.items()
        }


def flux_costs(choice: CacheChoice, work: ModelWork, predicted: float = 0.0) -> dict[str, float]:
    """Return the cost of a choice on a published model at 1024x1024 with a square mask of 0.11.

    Args:
        choice: the choice of cache.
        work: work of the model.
        predicted: share of the steps in which the model does not run.
    """
    flops = choice.flux_flops(predicted=predicted, work=work)
    dense, no_ring = (
        reference_choice.flux_flops(work=work)
        for reference_choice in (CacheChoice(dense_steps=1000), CacheChoice())
    )
    return {
        "flux_flop_speedup": round(dense / flops, 3),
        "flux_flops_of_no_ring": round(flops / no_ring, 3),
    }


def requested_classes(spec: ModelSpec, args: argparse.Namespace) -> dict[str, list[Edit]]:
    """Return the edits of the requested classes; without a request, of all classes that the model
    knows.

    Raises:
        SystemExit: the model does not have such scenes.
    """
    if args.scenes != "drawn" and not spec.semantics.reference:
        raise SystemExit("eval_quality: --scenes: of models that see the source as reference")
    return scene_classes(spec, args.n, args.scenes, args.classes)


def judge_adapters(args: argparse.Namespace) -> int:
    plain_rig = Rig(args.model, args.steps)
    results = {}
    for path in args.adapters:
        edit_set = adapter_edits(path.stem, args.n)
        results[path.stem] = judge_adapter(
            AdapterRig(args.model, args.steps, path, args.stride), plain_rig, edit_set
        )
        log(f"{path.stem}: {json.dumps(results[path.stem], indent=1)}")
    report = {**about(hardware(torch.device("cpu"))), "steps": args.steps, "adapters": results}
    write_json(report, args.json)
    return 0 if all(all(result["held"].values()) for result in results.values()) else 1


def compare_refresh_schedules(folder: Path, args: argparse.Namespace) -> int:
    """Compare refresh schedules, one after the other. With `--adapters` the edits have that
    ControlNet, and the shapes of their outlines are the classes.
    """
    if args.adapters:
        [path] = args.adapters
        controlled = AdapterRig(folder, args.steps, path)
        rig: Rig = controlled
        edit_set = adapter_edits("outline", args.n)
        classes: dict[str, list[Edit]] = {}
        jobs: dict[str, list[EditJob]] = {}
        encoded = zip(
            edit_set.edits, rig.jobs(edit_set.edits), edit_set.controls or (), strict=True
        )
        for edit, job, control in encoded:
            classes.setdefault(str(edit.shape), []).append(edit)
            jobs.setdefault(str(edit.shape), []).append(controlled.with_control(job, control))
    else:
        rig = Rig(folder, args.steps)
        classes = requested_classes(rig.adapter.spec, args)
        jobs = {name: rig.jobs(edits) for name, edits in classes.items()}
    rows = []
    for row in refresh_table(rig, classes, jobs, args.choices):
        rows.append(row)
        mean, worst = row["psnr_in_mask"], row["worst_class_psnr_in_mask"]
        low, under = row["worst_psnr_in_mask"], row["share_below_30"]
        log(
            f"{row['choice']}: mean {mean:.1f} dB, worst class {worst:.1f} ({row['worst_class']}), "
            f"worst edit {low:.1f}, under 30 dB {under:.1%}"
        )
    edits = sum(map(len, classes.values()))
    report = {**about(hardware(torch.device("cpu"))), "steps": args.steps, "edits": edits}
    write_json({**report, "choices": rows}, args.json)
    return 0


def main() -> int:
    args = parse()
    torch.set_num_threads(args.threads)
    if args.adapters and not args.own:
        return judge_adapters(args)
    if args.own:
        return compare_refresh_schedules(args.model, args)
    rig = Rig(args.model, args.steps, wordless=args.wordless)
    classes = requested_classes(rig.adapter.spec, args)
    if args.frontier and rig.adapter.spec.semantics.reference:
        raise SystemExit("eval_quality: --frontier: not of models that see the source as reference")
    run = Run(rig, classes)
    defaults = default_choices(run.default, rig.adapter.spec, args.steps)
    choices = frontier(run.default, args.steps) if args.frontier else defaults
    if args.choices:  # also compare the pictures of a worker
        served = [choice for choice in choices if replace(choice, dense_steps=0) == run.default]
        choices = served + [
            choice for choice in choices if choice.name in args.choices and choice not in served
        ]
    run.make(choices)
    semantics = rig.adapter.spec.semantics
    reference = "dense" if args.frontier or semantics.blends else "diffusers"
    if reference == "diffusers":
        from diffusers import FluxFillPipeline

        pipe = FluxFillPipeline.from_pretrained(str(args.model))
        pipe.set_progress_bar_config(disable=True)
        run.diffusers(pipe, fbcache=not args.no_fbcache)
    systems = run.figures(reference, args)
    ratios = [float(np.mean(edit.mask)) for edits in classes.values() for edit in edits]
    report = {
        **about(hardware(torch.device("cpu"))),
        "steps": args.steps,
        "edits": len(ratios),
        "semantics": semantics.name,
        "mean_mask_ratio": round(float(np.mean(ratios)), 4),
        "reference": reference,
        "default": run.default.name,
        "note": missing(args.clip, args.fid),
        "systems": systems,
    }
    print(table(systems))
    print(report["note"])
    write_json(report, args.json)
    if args.plots and args.frontier:
        plot_frontier(systems, args.plots, semantics.name)
    sheet_pictures = {name: run.pictures[name] for name in run.pictures if "-" not in name}
    sheet_pictures[run.default.name] = run.pictures[run.default.name]
    if args.rim:
        plot_rim({name: systems[name]["rim_errors"] for name in sheet_pictures}, args.rim)
    if args.sheet:
        draw_worst(classes, sheet_pictures, reference, run.default.name, args.sheet)
    return 0
