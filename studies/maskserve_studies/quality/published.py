"""The paper's metrics (FlashPS Table 2) for users who have their weights: CLIP score and FID.

Both come from torchmetrics, which is not among the dependencies; without it or without weights
they are left out and the report says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from maskserve_benchmarks.demo_model.scenes import Edit
from maskserve_studies.quality.metrics import Picture


def published(
    edits: Sequence[Edit],
    pictures: Sequence[Picture],
    references: Sequence[Picture],
    clip: Path | None,
    fid: Path | None,
) -> dict[str, Any]:
    """Return `clip_score` of the pictures and `fid` against the references; None if not computed.

    Args:
        edits: the edits, for their prompts.
        pictures: pictures of the edits, [H, W, 3].
        references: diffusers' pictures of the same edits.
        clip: folder of a CLIP model in transformers format.
        fid: weights file of torch-fidelity's Inception.
    """
    out: dict[str, Any] = {"clip_score": None, "fid": None}
    if clip is not None:
        from torchmetrics.multimodal.clip_score import CLIPScore

        score = CLIPScore(model_name_or_path=str(clip))
        score.update(list(_tensors(pictures)), [edit.prompt for edit in edits])
        out["clip_score"] = round(float(score.compute()), 4)
    if fid is not None:
        from torchmetrics.image.fid import FrechetInceptionDistance

        distance = FrechetInceptionDistance(feature=2048, feature_extractor_weights_path=str(fid))
        distance.update(_tensors(references), real=True)
        distance.update(_tensors(pictures), real=False)
        out["fid"] = round(float(distance.compute()), 4)
    return out


def missing(clip: Path | None, fid: Path | None) -> str:
    """Return one sentence on the missing figures and how to get them; empty if none is missing."""
    absent = [
        name for name, path in (("CLIP score (--clip)", clip), ("FID (--fid)", fid)) if not path
    ]
    if not absent:
        return ""
    return f"not computed, for want of weights: {', '.join(absent)}; they need torchmetrics too"


def _tensors(pictures: Sequence[Picture]) -> torch.Tensor:
    """Return the pictures as [N, 3, H, W] uint8."""
    return torch.from_numpy(np.stack(pictures)).permute(0, 3, 1, 2)
