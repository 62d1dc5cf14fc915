"""Check whether edits with a demo LoRA or ControlNet show its effect, dense and cached.

Each is judged by its own held-out edits: a look by `looks.py`, drawn outlines by `outlines.py`.
Beside the shares that follow it stand those of the model alone, and how far cached edits are from
dense ones, shape by shape. Of a ControlNet also what `adapters: fast` costs (`late_control`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from diffusers import ControlNetModel, FluxControlNetModel
from numpy.typing import NDArray

from maskserve_studies.demo_model import looks, outlines
from maskserve_benchmarks.demo_model.scenes import Edit
from maskserve_studies.quality.choices import default
from maskserve_studies.quality.late_control import held as late_held
from maskserve_studies.quality.late_control import late
from maskserve_studies.quality.metrics import EditQuality, by_class, compare
from maskserve_studies.quality.systems import Rig
from maskserve_engine.adapters.lora_file import read_lora
from maskserve_engine.base.job import ControlInput, EditJob
from maskserve_engine.families.mmdit.control import FluxControlNet
from maskserve_engine.families.mmdit.rows import FlowPrimingRow, FlowRow
from maskserve_engine.layers.low_rank import LowRankSet
from maskserve_lora.base_layers import BaseLayers

Picture = NDArray[np.uint8]
FOLLOWED: Final = {"lora": 0.90, "control": 0.85}
"""Least share of dense edits that must follow the adapter."""
WITHOUT: Final = 0.20
"""Largest share of edits of the model alone that may seem to follow it."""
POINTS: Final = 0.03
"""Largest loss of cached edits against dense edits in that share."""
MEAN_DB: Final = 40.0
WORST_DB: Final = 30.0
"""Least PSNR in the mask of cached edits against dense ones, over all edits and for the worst
shape."""


@dataclass(frozen=True)
class Asked:
    """Edits to judge an adapter by."""

    edits: list[Edit]
    follows: Callable[[Picture, int], bool]
    """Returns whether a picture of edit `i` shows the effect of the adapter."""
    controls: list[Picture] | None = None
    """Control pictures of the edits; None: the adapter is a LoRA."""


def asked_of(name: str, n: int) -> Asked:
    """Return the first `n` edits that judge the adapter `name`.

    Raises:
        ValueError: no judge knows this adapter.
    """
    if name in looks.LOOKS:
        edits = looks.edits_with(name, n)
        return Asked(edits, lambda picture, i: looks.followed(name, picture, edits[i]))
    if name == "outline":
        drawn = outlines.outlined_edits(n)
        return Asked(
            [outlined.edit for outlined in drawn],
            lambda picture, i: outlines.followed(picture, drawn[i]) >= outlines.ENOUGH_IOU,
            [outlined.control for outlined in drawn],
        )
    names = ", ".join((*looks.LOOKS, "outline"))
    raise ValueError(f"adapters: nobody can judge {name!r}; accepted: files named {names}")


class AdapterRig(Rig):
    """A rig of the FLUX model in `folder` whose rows have one adapter.

    Args:
        path: file of a LoRA, or folder of a ControlNet in diffusers' format.
        own_anchors: `[cache] own_anchors`; None: the default.
    """

    def __init__(
        self, folder: Path, steps: int, path: Path, own_anchors: float | None = None
    ) -> None:
        super().__init__(folder, steps, own_anchors=own_anchors)
        self.own_entries = True
        """Whether templates are primed with the LoRA (`[adapters] entries`)."""
        self.lora: LowRankSet | None = None
        self.net: FluxControlNet | None = None
        self.path = path
        if path.is_dir():
            unet = self.adapter.spec.family == "unet"
            kind = ControlNetModel if unet else FluxControlNetModel
            self.net = self.adapter.control_net(kind.from_pretrained(path).eval())
        else:
            base = BaseLayers.of_folder(folder)
            parts = read_lora(path, base, str(folder))
            self.lora = self.adapter.low_rank(parts.get("denoiser", {}))

    def given(self, job: EditJob, control: Picture | None) -> EditJob:
        """Return the job with its control picture, if there is one."""
        if control is None:
            return job
        takes = self.adapter.spec.control
        latents = takes is not None and takes.latents
        moments = self.encoder.moments(control) if latents else None
        return replace(job, controls=(ControlInput("net", control, moments=moments),))

    def attach(self, row: FlowRow | FlowPrimingRow, job: EditJob) -> None:
        if self.lora is not None:
            if self.own_entries or isinstance(row, FlowRow):
                self.adapter.attach(row, job, ((self.lora, 1.0),))
        elif isinstance(row, FlowPrimingRow):
            return
        elif self.served is None:
            self.adapter.control(row, job, {"net": self.net})
        elif (opening := self.adapter.opening(row, job)) is not None:
            self.adapter.serve_control(row, self.served.open(opening, "fast"))


def judged(rig: AdapterRig, without: Rig, asked: Asked) -> dict[str, Any]:
    """Return the shares of edits that follow the adapter, cached and dense, and which bars hold.

    Args:
        rig: the model with the adapter.
        without: the model alone.
        asked: the edits.
    """
    edits = asked.edits
    plain = without.jobs(edits)
    controls: Sequence[Picture | None] = asked.controls or [None] * len(edits)
    jobs = [rig.given(job, control) for job, control in zip(plain, controls, strict=True)]
    dense = rig.dense(edits, jobs)
    choice = default(rig.adapter.spec, rig.steps)
    entries = rig.entries(jobs)
    cached = rig.cached(edits, jobs, entries, choice)
    pictures = {"dense": dense, "cached": cached, "without": without.dense(edits, plain)}
    if rig.lora is not None:
        rig.own_entries = False
        pictures["cached, base entries"] = rig.cached(edits, jobs, rig.entries(jobs), choice)
        rig.own_entries = True
    share = {
        system: float(
            np.mean([asked.follows(picture, i) for i, picture in enumerate(system_pictures)])
        )
        for system, system_pictures in pictures.items()
    }
    like = {
        system: _by_shape(edits, compare(edits, system_pictures, dense))
        for system, system_pictures in pictures.items()
        if system.startswith("cached")
    }
    likeness = like["cached"]
    fast = {}
    if rig.net is not None:
        waited = dense, cached
        fast = {"fast": late(rig, rig.path.resolve(), edits, jobs, waited, (entries, choice))}
    least = FOLLOWED["lora" if asked.controls is None else "control"]
    return {
        "edits": len(edits),
        "followed": {system: round(value, 4) for system, value in share.items()},
        "cached_against_dense": likeness,
        "base_entries_against_dense": like.get("cached, base entries"),
        **fast,
        "held": {
            "followed": share["dense"] >= least and share["without"] <= WITHOUT,
            "cached_follows": share["cached"] >= share["dense"] - POINTS,
            "mean_db": likeness["psnr_in_mask"] >= MEAN_DB,
            "worst_class_db": likeness["worst_class_psnr_in_mask"] >= WORST_DB,
            **(late_held(fast["fast"]) if fast else {}),
        },
    }


def _by_shape(edits: Sequence[Edit], found: Sequence[EditQuality]) -> dict[str, Any]:
    shapes: dict[str, list[EditQuality]] = {}
    for edit, quality in zip(edits, found, strict=True):
        shapes.setdefault(str(edit.shape), []).append(quality)
    return by_class(shapes)
