"""The loss of quality when steps add a ControlNet service's residuals for other latents than their
own (`adapters: fast`), against steps that wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from maskserve_benchmarks.demo_model.scenes import Edit
from maskserve_engine.base.job import EditJob
from maskserve_engine.cache.entries import AnchorEntry
from maskserve_studies.adapters.service_process import LocalService
from maskserve_studies.quality.choices import CacheChoice
from maskserve_studies.quality.metrics import Picture, compare, summary
from maskserve_studies.quality.systems import Rig

SSIM: Final = 0.95
"""Least SSIM in the mask; Katz reports 0.77 over the picture (§9.3)."""


def fast_figures(
    rig: Rig,
    net: Path,
    edits: Sequence[Edit],
    jobs: Sequence[EditJob],
    exact_pictures: tuple[Sequence[Picture], Sequence[Picture]],
    cache_options: tuple[Sequence[tuple[AnchorEntry, ...]], CacheChoice],
) -> dict[str, Any]:
    """Return figures of dense and cached edits with a ControlNet service in this process.

    Args:
        rig: its rows have the ControlNet; if `served` is not None, that service runs it.
        net: folder of the ControlNet.
        edits: the edits to make.
        jobs: the jobs of the edits.
        exact_pictures: pictures of the edits, dense and cached, with steps that wait for the
            ControlNet.
        cache_options: the templates' entries, and the choice by which cached rows read them.
    """
    service = LocalService(rig.config, net)
    served_jobs = [
        replace(job, controls=tuple([replace(c, net=service.version) for c in job.controls]))
        for job in jobs
    ]
    try:
        rig.served = service.denoiser()
        pictures = rig.dense(edits, served_jobs), rig.cached(edits, served_jobs, *cache_options)
        rig.served.close()
        rig.served = None
    finally:
        service.close()
    return {
        kind: _figures(edits, fast, exact)
        for kind, fast, exact in zip(("dense", "cached"), pictures, exact_pictures, strict=True)
    }


def bar_results(figures_by_kind: dict[str, Any]) -> dict[str, bool]:
    """Return which bars hold for the result of `fast_figures`."""
    return {
        "ahead_ssim": all(figure["ssim_in_mask"] >= SSIM for figure in figures_by_kind.values())
    }


def _figures(
    edits: Sequence[Edit], pictures: Sequence[Picture], exact: Sequence[Picture]
) -> dict[str, Any]:
    names = ("ssim_in_mask", "worst_ssim_in_mask", "psnr_in_mask", "worst_psnr_in_mask")
    figures = summary(compare(edits, pictures, exact)).as_dict()
    return {name: figures[name] for name in names}
