"""Measure edits whose rows have refresh steps: how near they are to dense edits, and what they
cost.

    python scripts/bench refresh_steps --json own.json

`summary` compares them with our dense rows (`--n` edits of each of 12 classes, 20 steps, dB in the
mask):

- `fill_mean`, `fill_worst_class`, `fill_under_30`: edits of the demo model with three refresh
  steps, as served. `base_mean` and its companions: edits of `--base`, a folder with Inpaint
  semantics (`train_inpaint_model`), with four refresh steps. `unet_mean` and its companions: edits
  of the demo UNet with three.
- `hit_loss_db`: the loss of edits that read a template and leave their text and ring out between
  three refresh steps, compared with edits that compute a ring of one token at each step.
- `hit_first_anchor_mean`, `hit_first_anchor_under_30`: the same edits with a dense first step that
  corrects the entries. The template has an entry for every seven steps.
- `hits` also has these edits with their ring computed (`hit_text`) and with wider rings
  (`mask_ring`).

Further figures are for FLUX.1's width at 1024 pixels with random weights; on a CPU with one double
and one single block:

- `no_text_of_limit`: the speed-up of a step that computes only the computed tokens over a dense
  step, as a share of the speed-up that the FLOPs allow; the least of the mask ratios .05 to .35.
- `first_edit_11`, `first_edit_35`: the time of 28 dense steps over the time of an edit whose
  picture is new: three passes over all tokens and 27 cached steps.

`loras_edits_ratio`: edits per second of eight pictures, each with another LoRA, eight in flight,
with refresh steps over dense edits. Such edits were dense before.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import torch

from maskserve_benchmarks.checkout import DEMO_MODEL, DEMO_UNET
from maskserve_benchmarks.edits.direct import Direct
from maskserve_benchmarks.edits.lora_edits import LORAS, demo_edits, write_loras
from maskserve_benchmarks.reports import about, write_json
from maskserve_benchmarks.steps.step import cached_step, packed_steps
from maskserve_benchmarks.steps.step_rig import NO_TEXT, Bench
from maskserve_benchmarks.timing import Timer, hardware
from maskserve_common.config import CacheConfig
from maskserve_common.config_file import config_of
from maskserve_common.contracts.reuse_levels import refresh_count
from maskserve_common.contracts.semantics import FILL
from maskserve_engine.batch.step_cache import RefreshSchedule
from maskserve_engine.families.flux.spec import REFRESH_STRIDES
from maskserve_studies.demo_model.edit_classes import CLASSES, edits_of
from maskserve_studies.gpu_run.machine_parts import as_served
from maskserve_studies.quality.choices import default
from maskserve_studies.quality.metrics import EditQuality, by_class, compare
from maskserve_studies.quality.refresh_steps import (
    edit_from_template,
    edit_with_refreshes,
    served_choice,
)
from maskserve_studies.quality.systems import Rig

RATIOS = (0.05, 0.11, 0.2, 0.35)
_STEPS = 28
_ANCHORS = refresh_count(_STEPS, REFRESH_STRIDES[FILL])


def fidelity(
    folder: Path,
    n: int,
    *,
    count: int = 0,
    ring: int = 1,
    straight: bool = False,
    hits: bool = False,
) -> dict[str, Any]:
    """Figures over all classes, of one of two sorts of edits. The first sort has refresh steps:
    `count` of them, or the model's default number, with this ring where steps compute one; with
    `straight` the lines between them do not bend. The second sort (`hits`) reads a template: with
    the text computed, with the text left out, and also with a dense first step.
    """
    rig = Rig(folder, 20)
    [job] = rig.jobs(edits_of(next(iter(CLASSES)), 1))
    choice = replace(served_choice(rig, job, count), ring=ring, bends=False if straight else None)
    cached = default(rig.adapter.spec, 20)
    dense_start = replace(cached, dense_steps=1, stride=7)
    text = served_choice(rig, job)
    power = rig.adapter.spec.refresh.evenly_over
    plan = RefreshSchedule(frozenset(text.dense), choice.format, True, text.leaves_ring, power)
    variants = {
        "hit": (cached, None),
        "hit_text": (cached, replace(plan, ring=False)),
        "hit_frozen": (cached, plan),
        **{f"hit_ring_{n}": (replace(cached, ring=n), plan) for n in (4, 6)},
        "hit_first_anchor": (dense_start, replace(plan, corrects_residuals=True)),
    }
    qualities: dict[str, dict[str, list[EditQuality]]] = {
        w: {} for w in (variants if hits else ("own",))
    }
    for name in CLASSES:
        edits = edits_of(name, n)
        jobs = rig.jobs(edits)
        dense = rig.dense(edits, jobs)
        entries = rig.entries(jobs) if hits else []
        for variant, class_qualities in qualities.items():
            if variant == "own":
                pictures = edit_with_refreshes(rig, edits, jobs, choice)
            else:
                pictures = edit_from_template(rig, edits, jobs, entries, *variants[variant])
            class_qualities[name] = compare(edits, pictures, dense)
        print(
            name,
            {
                variant: by_class(variant_qualities)["psnr_in_mask"]
                for variant, variant_qualities in qualities.items()
            },
        )
    return {
        variant: by_class(variant_qualities) for variant, variant_qualities in qualities.items()
    }


def speed(args: argparse.Namespace) -> dict[str, Any]:
    """Time steps: medians of rounds in turn."""
    device = torch.device(args.device)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    blocks = (1, 1) if device.type == "cpu" else None  # a GPU would wait for the host
    bench = Bench("flux-1024", blocks, dtype, device, CacheConfig().refresh_format_on(device.type))
    bench.weights = as_served(bench)
    bench.fill_entry("kv")
    timer = Timer(device, args.clock)
    dense, rows = bench.row(None, 0), [bench.refreshing_row(m, i) for i, m in enumerate(RATIOS)]
    for row in rows:
        row.recorded = True
    # A row of its own, because `rows` stay between their refresh steps.
    refresh_row, turns = bench.refreshing_row(RATIOS[1], len(RATIOS)), count()
    calls: list[Callable[[], object]] = [
        packed_steps(bench, 1, partial(bench.step, [dense], "kv")),
        lambda: bench.refresh_step(refresh_row, 2 * (next(turns) % 2)),
        *[packed_steps(bench, 1, cached_step(bench, [row], NO_TEXT)) for row in rows],
    ]
    for call in calls * 2:  # recording happens at the second call
        call()
    dense_ms, refresh_ms, *times = timer.in_turn(calls, args.repeat)
    result: dict[str, Any] = {"dense_ms": round(dense_ms, 2), "anchor_ms": round(refresh_ms, 2)}
    limit_shares = {}
    for ratio, ms in zip(RATIOS, times, strict=True):
        limit = bench.limit([ratio], NO_TEXT)
        limit_shares[ratio] = dense_ms / ms / limit
        # All refresh steps but the first also take a step that reads.
        edit = _STEPS * dense_ms / (_ANCHORS * refresh_ms + (_STEPS - 1) * ms)
        result[f"at_{ratio}"] = {"ms": round(ms, 2), "limit": round(limit, 2)}
        result[f"first_edit_{round(100 * ratio)}"] = round(edit, 3)
    result["no_text_of_limit"] = round(min(limit_shares.values()), 3)
    return result


def loras(args: argparse.Namespace) -> dict[str, float]:
    """Time eight edits of eight pictures, each with another LoRA: with refresh steps, and dense."""
    with tempfile.TemporaryDirectory() as folder:
        names = write_loras(Path(folder))
        config = config_of(
            {
                "model": {"path": str(DEMO_MODEL), "torch_threads": 1},
                "adapters": {"store": folder},
            }
        )
        worker = Direct(config)
        try:
            edits = demo_edits(LORAS)

            def jobs(cache: str) -> list[Any]:
                settings = {"seed": 1, "cache": cache, "num_inference_steps": 20}
                return [
                    worker.jobs(
                        [edit],
                        {**settings, "request_id": str(n), "loras": [{"name": names[n]}]},
                    )[0]
                    for n, edit in enumerate(edits)
                ]

            job_lists = [jobs("own"), jobs("off")]
            for job_list in job_lists:
                worker.run(job_list)
            calls = [partial(worker.run, job_list) for job_list in job_lists]
            refresh_ms, dense = Timer(torch.device("cpu"), args.clock).in_turn(calls, args.repeat)
        finally:
            worker.engine.close(grace_s=1.0)
    return {"loras_edits_ratio": round(dense / refresh_ms, 3)}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    add = parser.add_argument
    parts = ("fill", "hits", "base", "unet", "speed", "loras")
    add("--only", nargs="+", choices=parts, default=parts)
    add("--n", type=int, default=16, help="edits of each class (default 16)")
    add("--base", type=Path, help="folder of a model with Inpaint semantics")
    add("--anchors", type=int, default=4, help="of the base model's 20 steps (default 4)")
    add("--ring", type=int, default=1, help="of the base model's edits (default 1)")
    add("--straight", action="store_true", help="have the base model's lines not bend")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--clock", choices=("wall", "cpu"), default="wall")
    add("--repeat", type=int, default=3, help="rounds of what is timed")
    add("--json", type=Path)
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    summary: dict[str, Any] = {}
    details: dict[str, Any] = {}
    folders = {"fill": DEMO_MODEL, "base": args.base, "unet": DEMO_UNET}
    for name, folder in folders.items():
        if name in args.only and folder is not None:
            # A small base model has no guidance, so it counts as a model of few steps.
            options = {"count": args.anchors, "ring": args.ring, "straight": args.straight}
            options = options if name == "base" else {}
            details[name] = fidelity(folder, args.n, **options)["own"]
            summary |= _summary(name, details[name])
    if "hits" in args.only:
        hits = details["hits"] = fidelity(DEMO_MODEL, args.n, hits=True)
        loss = hits["hit"]["psnr_in_mask"] - hits["hit_frozen"]["psnr_in_mask"]
        summary["hit_loss_db"] = round(loss, 3)
        summary |= _summary("hit_first_anchor", hits["hit_first_anchor"])
    if "speed" in args.only:
        speeds = details["speed"] = speed(args)
        keys = ("first_edit_11", "first_edit_35", "no_text_of_limit")
        summary |= {name: speeds[name] for name in keys}
    if "loras" in args.only:
        summary |= loras(args)
    for name, value in summary.items():
        print(f"{name:20} {value}")
    report = {**about(hardware(torch.device(args.device))), "summary": summary, **details}
    write_json(report, args.json)
    return 0


def _summary(name: str, figures: dict[str, Any]) -> dict[str, Any]:
    return {
        f"{name}_mean": figures["psnr_in_mask"],
        f"{name}_worst_class": figures["worst_class_psnr_in_mask"],
        f"{name}_under_30": figures["share_below_30"],
    }
