"""Check whether edits with a demo LoRA or ControlNet show its effect, dense and cached.

Each adapter has held-out edits and a judge: `looks.py` for LoRAs, `outlines.py` for outlines. The
report has the shares of edits that follow the adapter, with it and without it, and the distance of
cached edits from dense ones, shape by shape. For a ControlNet it also has the loss of
`adapters: fast` (`late_control`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from diffusers import ControlNetModel, FluxControlNetModel
from numpy.typing import NDArray

from maskserve_benchmarks.demo_model.scenes import Edit
from maskserve_engine.adapters.lora_file import read_lora
from maskserve_engine.base.job import ControlInput, EditJob
from maskserve_engine.families.mmdit.control import FluxControlNet
from maskserve_engine.families.mmdit.rows import FlowPrimingRow, FlowRow
from maskserve_engine.layers.low_rank import LowRankSet
from maskserve_lora.base_layers import BaseLayers
from maskserve_studies.demo_model import looks, outlines
from maskserve_studies.quality.choices import default
from maskserve_studies.quality.late_control import bar_results as late_bar_results
from maskserve_studies.quality.late_control import fast_figures
from maskserve_studies.quality.metrics import EditQuality, by_class, compare
from maskserve_studies.quality.systems import Rig

Picture = NDArray[np.uint8]
LEAST_SHARE: Final = {"lora": 0.90, "control": 0.85}
"""Least share of dense edits that must follow the adapter."""
LARGEST_BASE_SHARE: Final = 0.20
"""Largest share of edits of the model alone that may seem to follow it."""
LARGEST_LOSS: Final = 0.03
"""Largest loss of cached edits against dense edits in that share."""
MEAN_DB: Final = 40.0
WORST_DB: Final = 30.0
"""Least PSNR in the mask of cached edits against dense ones, over all edits and for the worst
shape."""


@dataclass(frozen=True)
class AdapterEdits:
    """Edits to judge an adapter by."""

    edits: list[Edit]
    follows: Callable[[Picture, int], bool]
    """Returns whether a picture of edit `i` shows the effect of the adapter."""
    controls: list[Picture] | None = None
    """Control pictures of the edits; None: the adapter is a LoRA."""


def adapter_edits(name: str, n: int) -> AdapterEdits:
    """Return the first `n` edits that judge the adapter `name`.

    Raises:
        ValueError: no judge knows this adapter.
    """
    if name in looks.LOOKS:
        edits = looks.edits_with(name, n)
        return AdapterEdits(edits, lambda picture, i: looks.shows_look(name, picture, edits[i]))
    if name == "outline":
        drawn = outlines.outlined_edits(n)
        return AdapterEdits(
            [outlined.edit for outlined in drawn],
            lambda picture, i: outlines.outline_iou(picture, drawn[i]) >= outlines.ENOUGH_IOU,
            [outlined.control for outlined in drawn],
        )
    names = ", ".join((*looks.LOOKS, "outline"))
    raise ValueError(f"adapters: no judge for {name!r}; accepted: files named {names}")


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

    def with_control(self, job: EditJob, control: Picture | None) -> EditJob:
        """Return the job with its control picture, if there is one."""
        if control is None:
            return job
        control_spec = self.adapter.spec.control
        latents = control_spec is not None and control_spec.latents
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


def judge_adapter(
    rig: AdapterRig, plain_rig: Rig, adapter_edit_set: AdapterEdits
) -> dict[str, Any]:
    """Return the shares of edits that follow the adapter, cached and dense, and which bars hold.

    Args:
        rig: the model with the adapter.
        plain_rig: the model alone.
        adapter_edit_set: the edits.
    """
    edits = adapter_edit_set.edits
    plain = plain_rig.jobs(edits)
    controls: Sequence[Picture | None] = adapter_edit_set.controls or [None] * len(edits)
    jobs = [rig.with_control(job, control) for job, control in zip(plain, controls, strict=True)]
    dense = rig.dense(edits, jobs)
    choice = default(rig.adapter.spec, rig.steps)
    entries = rig.entries(jobs)
    cached = rig.cached(edits, jobs, entries, choice)
    pictures = {"dense": dense, "cached": cached, "without": plain_rig.dense(edits, plain)}
    if rig.lora is not None:
        rig.own_entries = False
        pictures["cached, base entries"] = rig.cached(edits, jobs, rig.entries(jobs), choice)
        rig.own_entries = True
    share = {
        system: float(
            np.mean(
                [adapter_edit_set.follows(picture, i) for i, picture in enumerate(system_pictures)]
            )
        )
        for system, system_pictures in pictures.items()
    }
    likeness_by_system = {
        system: _by_shape(edits, compare(edits, system_pictures, dense))
        for system, system_pictures in pictures.items()
        if system.startswith("cached")
    }
    likeness = likeness_by_system["cached"]
    fast = {}
    if rig.net is not None:
        exact_pictures = dense, cached
        fast = {
            "fast": fast_figures(
                rig, rig.path.resolve(), edits, jobs, exact_pictures, (entries, choice)
            )
        }
    least = LEAST_SHARE["lora" if adapter_edit_set.controls is None else "control"]
    return {
        "edits": len(edits),
        "followed": {system: round(value, 4) for system, value in share.items()},
        "cached_against_dense": likeness,
        "base_entries_against_dense": likeness_by_system.get("cached, base entries"),
        **fast,
        "held": {
            "followed": share["dense"] >= least and share["without"] <= LARGEST_BASE_SHARE,
            "cached_follows": share["cached"] >= share["dense"] - LARGEST_LOSS,
            "mean_db": likeness["psnr_in_mask"] >= MEAN_DB,
            "worst_class_db": likeness["worst_class_psnr_in_mask"] >= WORST_DB,
            **(late_bar_results(fast["fast"]) if fast else {}),
        },
    }


def _by_shape(edits: Sequence[Edit], qualities: Sequence[EditQuality]) -> dict[str, Any]:
    shapes: dict[str, list[EditQuality]] = {}
    for edit, quality in zip(edits, qualities, strict=True):
        shapes.setdefault(str(edit.shape), []).append(quality)
    return by_class(shapes)
