"""Measure the loss of quality of cached edits of the demo UNet with a LoRA, a ControlNet or both,
compared with its dense edits.

96 held-out edits by class are made dense and cached: with neither, with the LoRA
`unet-ninth-colour`, with the net `unet-outline`, and with both. The classes are those that are
cached by default, and edits with their own outline. Edits with the LoRA or the net also run with
refresh steps, as the first edit of a picture does. In every second edit that names a colour, the
colour is the LoRA's. Control pictures are outlines inside the mask.

    OMP_NUM_THREADS=1 python scripts/bench unet_adapters --json unet_adapters.json
    OMP_NUM_THREADS=1 python scripts/bench unet_adapters --only stripes bar    # these classes
"""

from __future__ import annotations

import argparse
import json
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from maskserve_benchmarks.checkout import CHECKOUT
from maskserve_benchmarks.demo_model.scenes import Edit, place
from maskserve_benchmarks.edits.direct import Direct
from maskserve_benchmarks.recording.edits import encode
from maskserve_benchmarks.reports import about, write_json
from maskserve_benchmarks.timing import hardware
from maskserve_common.config_file import config_of
from maskserve_common.contracts.request import ResolvedControl
from maskserve_engine.base.job import ControlInput, EngineEvent, Failed, FinalEvent
from maskserve_engine.spec.control_nets import ControlNets
from maskserve_studies.demo_model import looks, outlines
from maskserve_studies.demo_model.edit_classes import CLASSES, edits_of
from maskserve_studies.quality.metrics import by_class, compare

OUTLINED: Final = "outlined"
CLASS_NAMES: Final = (OUTLINED, *(name for name in CLASSES if name not in ("strip", "most")))
"""Classes to measure, without those that run dense by default."""
VARIANTS: Final = {
    "neither": (False, False, "require"),
    "LoRA": (True, False, "require"),
    "LoRA, own anchors": (True, False, "own"),
    "control": (False, True, "require"),
    "control, own anchors": (False, True, "own"),
    "both": (True, True, "require"),
}
"""For each way: with the LoRA or not, with the net or not, and the setting `cache`."""
EDITS_PER_CLASS: Final = 8

Picture = NDArray[np.uint8]


@dataclass(frozen=True)
class ControlledEdit:
    """One edit with its control picture."""

    edit: Edit
    control: Picture


def class_edits_of(name: str, count: int) -> list[ControlledEdit]:
    """The first edits of a class; twice as many of the class with outlines of their own."""
    if name == OUTLINED:
        class_edits = [
            ControlledEdit(d.edit, d.control) for d in outlines.outlined_edits(2 * count)
        ]
    else:
        class_edits = [ControlledEdit(edit, _outline(edit)) for edit in edits_of(name, count)]
    return [
        _with_new_colour(controlled_edit) if i % 2 else controlled_edit
        for i, controlled_edit in enumerate(class_edits)
    ]


def _outline(edit: Edit) -> Picture:
    centre, radius = place(edit.mask)
    return outlines.Drawn(edit.shape or "circle", centre, 0.8 * radius, 0.3).picture(
        edit.mask.shape
    )


def _with_new_colour(controlled_edit: ControlledEdit) -> ControlledEdit:
    """The same edit in the colour that the LoRA teaches. No judge knows that colour."""
    edit = controlled_edit.edit
    if edit.colour is None or edit.colour not in edit.prompt:
        return controlled_edit
    prompt = edit.prompt.replace(edit.colour, looks.NINTH)
    return replace(controlled_edit, edit=replace(edit, prompt=prompt, colour=None, shape=None))


class Worker:
    """The demo UNet in this process; all its edits may be cached."""

    def __init__(self, steps: int) -> None:
        assets = CHECKOUT / "assets"
        config = config_of(
            {
                "model": {"path": str(assets / "models" / "demo-unet"), "torch_threads": 1},
                "adapters": {"store": str(assets / "adapters")},
                "controls": {"folder": str(assets / "controlnets")},
                "cache": {"dense_above_ratio": 1.0},
                "engine": {"max_rows": 8},
            }
        )
        self.steps = steps
        self.direct = Direct(config)
        self.net = ControlNets(config, self.direct.spec).find("unet-outline", "controls").version

    def pictures(
        self, controlled_edits: Sequence[ControlledEdit], *, lora: bool, control: bool, cache: str
    ) -> list[Picture]:
        """The edits' pictures, pasted into their sources."""
        jobs = []
        for seed, controlled_edit in enumerate(controlled_edits):
            settings: dict[str, Any] = {
                "seed": seed, "num_inference_steps": self.steps, "cache": cache, "strength": 1.0,
                "request_id": f"{cache}-{lora}-{control}-{seed}",
            }  # fmt: skip
            if lora:
                settings["loras"] = [{"name": "unet-ninth-colour"}]
            edit = controlled_edit.edit
            mask = edit.mask.astype(np.uint8) * np.uint8(255)
            [job] = self.direct.jobs(
                [(encode(edit.source, "PNG"), encode(mask, "PNG"), edit.prompt)], settings
            )
            if control:
                net = ResolvedControl(name="unet-outline", version=self.net, image=0)
                job = replace(
                    job,
                    request=replace(job.request, controls=(net,)),
                    controls=(ControlInput(self.net, controlled_edit.control),),
                )
            jobs.append(job)
        finals: list[FinalEvent | None] = [None] * len(jobs)
        finished_jobs = threading.Semaphore(0)
        for i, job in enumerate(jobs):

            def sink(event: EngineEvent, i: int = i) -> None:
                if isinstance(event, Failed):
                    print(event.error)
                elif isinstance(event, FinalEvent):
                    finals[i] = event
                if isinstance(event, FinalEvent | Failed):
                    finished_jobs.release()

            self.direct.engine.submit(job, sink)
        for _ in jobs:
            finished_jobs.acquire()
        pictures = []
        for controlled_edit, final in zip(controlled_edits, finals, strict=True):
            assert final is not None
            pixels = self.direct.decoder.decode(final.latents)
            pictures.append(
                np.where(controlled_edit.edit.mask[..., None], pixels, controlled_edit.edit.source)
            )
        return pictures


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--each", type=int, default=EDITS_PER_CLASS, help="edits of a class")
    parser.add_argument(
        "--only", nargs="+", choices=CLASS_NAMES, default=CLASS_NAMES, help="classes"
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    classes = {name: class_edits_of(name, args.each) for name in args.only}
    worker = Worker(args.steps)
    qualities: dict[str, dict[str, Any]] = {variant: {} for variant in VARIANTS}
    edit_psnr: dict[str, dict[str, list[float]]] = {variant: {} for variant in VARIANTS}
    for name, group in classes.items():
        dense: dict[tuple[bool, bool], list[Picture]] = {}
        for variant, (lora, control, cache) in VARIANTS.items():
            if (lora, control) not in dense:
                dense[lora, control] = worker.pictures(
                    group, lora=lora, control=control, cache="off"
                )
            cached = worker.pictures(group, lora=lora, control=control, cache=cache)
            class_qualities = qualities[variant][name] = compare(
                [item.edit for item in group], cached, dense[lora, control]
            )
            edit_psnr[variant][name] = [round(item.psnr_in_mask, 1) for item in class_qualities]
            print(name, variant, json.dumps(edit_psnr[variant][name]), flush=True)
    report = {
        **about(hardware(torch.device("cpu"))),
        "steps": args.steps,
        "ways": {variant: by_class(group) for variant, group in qualities.items()},
        "edits": edit_psnr,
    }
    for variant, figures in report["ways"].items():
        print(variant, {k: v for k, v in figures.items() if k != "classes"})
    write_json(report, args.json)
    worker.direct.engine.close(grace_s=1.0)
    return 0
