"""Caches of whole steps: diffusers' own, and `step_interval` beside our cache.

`rivals` run diffusers' pipeline with its FirstBlockCache, TaylorSeer (of the last layer alone) and
SeaCache. Each is compared with the pipeline without a cache, in dB in the mask; `flops` is the
share of the transformer's FLOPs, by torch's counter.

`hits` are edits of ours that read a template, with their model in one step of `step_interval`.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from diffusers.hooks import (
    FirstBlockCacheConfig,
    SeaCacheConfig,
    TaylorSeerCacheConfig,
)
from PIL import Image
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from maskserve_benchmarks.demo_model.scenes import Edit
from maskserve_benchmarks.rivals.pipeline_model import Pipeline, PipelineEdit
from maskserve_engine.base.job import EditJob
from maskserve_studies.quality.choices import default
from maskserve_studies.quality.metrics import Picture, compare
from maskserve_studies.quality.systems import Rig, at_interval

_TAYLOR = {"disable_cache_before_step": 2, "use_lite_mode": True, "max_order": 1}
RIVALS: dict[str, Any] = {
    **{f"FirstBlockCache {x}": FirstBlockCacheConfig(threshold=x) for x in (0.03, 0.06, 0.12)},
    **{
        f"TaylorSeer, one of {n}": TaylorSeerCacheConfig(cache_interval=n, **_TAYLOR)
        for n in (2, 3, 4)
    },
    **{f"SeaCache {x}": SeaCacheConfig(threshold=x) for x in (0.05, 0.1, 0.2)},
}
"""Configurations of diffusers' caches, from careful to bold."""
INTERVALS = (1, 2, 3)


class CountedPipeline:
    """diffusers' pipeline of a folder, with a cache or without, whose transformer is counted.

    Args:
        folder: folder of the model.
        cache: configuration of diffusers' cache; None: all steps compute everything.
    """

    def __init__(self, folder: Path, cache: Any) -> None:
        self._pipeline = Pipeline(str(folder), "whole")
        self.flops, self._step, self._steps = 0, 0, 0
        transformer = self._transformer = self._pipeline.pipe.transformer
        self._forward = transformer.forward
        if isinstance(cache, SeaCacheConfig):
            cache = replace(cache, raw_vision_callback=self._noisy_picture)
        if cache is not None:
            transformer.enable_cache(cache)
            self._forward = transformer.forward
        transformer.forward = self._counted

    def edit(self, edit: Edit, seed: int, steps: int) -> Picture:
        """Return the edited picture, with the source outside the mask."""
        source, mask = Image.fromarray(edit.source), Image.fromarray(edit.mask * np.uint8(255))
        self._step, self._steps = 0, steps
        self._transformer._reset_stateful_cache()
        call = PipelineEdit(source, mask, edit.prompt, seed, steps, (0, 0, *source.size), ())
        [(png, _)] = self._pipeline.pictures([call])
        return np.asarray(Image.open(io.BytesIO(png)).convert("RGB"))

    def _counted(self, *args: Any, **kwargs: Any) -> Any:
        """Run a step in the context from which the caches learn where the schedule is."""
        [sigma] = kwargs["timestep"].tolist()
        place = {"step_index": self._step, "sigma": sigma, "num_inference_steps": self._steps}
        with (
            FlopCounterMode(display=False) as counter,
            self._transformer.cache_context("edit", **place),
        ):
            answer = self._forward(*args, **kwargs)
        self._step += 1
        self.flops += counter.get_total_flops()
        return answer

    def _noisy_picture(self, transformer: Any, args: Any, kwargs: Any) -> list[Tensor]:
        """Return the noisy latents, [C, 1, H, W]: all tokens' first channels, before references."""
        ids, tokens = kwargs["img_ids"], kwargs["hidden_states"]
        ids = ids[0] if ids.ndim == 3 else ids
        noisy = ids[:, 0] == ids[0, 0]
        rows, columns = (int(ids[noisy, axis].max()) + 1 for axis in (1, 2))
        picture = tokens[0, noisy, : transformer.config.out_channels or tokens.shape[2]]
        return [picture.T.reshape(-1, 1, rows, columns)]


def rivals(folder: Path, edits: Sequence[Edit], steps: int) -> dict[str, dict[str, Any]]:
    """Return the dB and FLOPs of the edits by each of `RIVALS`, or the error of one that does not
    fit the model.
    """
    whole = CountedPipeline(folder, None)
    dense = [whole.edit(edit, seed, steps) for seed, edit in enumerate(edits)]
    figures = dict[str, dict[str, Any]]()
    for name, cache in RIVALS.items():
        cached = CountedPipeline(folder, cache)
        try:
            pictures = [cached.edit(edit, seed, steps) for seed, edit in enumerate(edits)]
        except TypeError as error:  # of diffusers' FirstBlockCache in FLUX.2's blocks
            figures[name] = {"fails": str(error)}
            continue
        figures[name] = likeness(edits, pictures, dense, cached.flops / whole.flops)
    return figures


def likeness(
    edits: Sequence[Edit], pictures: Sequence[Picture], dense: Sequence[Picture], flops: float
) -> dict[str, float]:
    """Return the figures of edits beside their dense pictures; `flops` is their share of FLOPs."""
    db = np.array([quality.psnr_in_mask for quality in compare(edits, pictures, dense)])
    return {
        "mean": round(float(db.mean()), 2),
        "least": round(float(db.min()), 2),
        "flops": round(flops, 3),
    }


def hits(
    rig: Rig, edits: Sequence[Edit], jobs: Sequence[EditJob], dense: Sequence[Picture]
) -> dict[str, dict[str, Any]]:
    """Return the figures of edits that read a template, by `step_interval`; `flops` is the share
    of the same edits' that run the model in all steps.
    """
    figures, entries = dict[str, dict[str, Any]](), rig.entries(jobs)
    choice = default(rig.adapter.spec, rig.steps)
    for interval in INTERVALS:
        spaced = [at_interval(job, interval) for job in jobs]
        pictures = rig.cached(edits, spaced, entries, choice)
        share = rig.adapter.steps(spaced[0]) / rig.steps
        figures[f"hit, step_interval {interval}"] = likeness(edits, pictures, dense, share)
    return figures
