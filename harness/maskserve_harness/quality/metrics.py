"""How alike two edited pictures are, and whether the prompt was followed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from skimage.metrics import structural_similarity

from demo_model.judge import judge
from demo_model.scenes import Edit

Picture = NDArray[np.uint8]


@dataclass(frozen=True)
class Quality:
    """Means over the edits, against the reference pictures of the same edits."""

    ssim: float
    """Over the image (Gaussian window, as in Wang et al. 2004)."""
    ssim_in_mask: float
    """Mean of the SSIM map over the mask's pixels."""
    psnr_in_mask: float
    """dB, from the mean squared error over all masks' pixels of an edit; mean of the edits'."""
    outside_max_abs_diff: int
    """Largest difference to the *source* outside the mask."""
    prompt_followed: float
    """Share of edits whose colour and shape the judge finds right."""

    def as_dict(self) -> dict[str, Any]:
        return {key: round(value, 4) for key, value in asdict(self).items()}


def compare(
    edits: Sequence[Edit], pictures: Sequence[Picture], references: Sequence[Picture]
) -> Quality:
    """Judge `pictures` against `references`, edit by edit."""
    rows = [_one(e, p, r) for e, p, r in zip(edits, pictures, references, strict=True)]
    ssim, inside, psnr, outside, right = (np.array(column) for column in zip(*rows, strict=True))
    return Quality(
        ssim=float(ssim.mean()),
        ssim_in_mask=float(inside.mean()),
        psnr_in_mask=float(psnr.mean()),
        outside_max_abs_diff=int(outside.max()),
        prompt_followed=float(right.mean()),
    )


def _one(edit: Edit, picture: Picture, reference: Picture) -> tuple[float, float, float, int, bool]:
    ssim, ssim_map = structural_similarity(
        picture,
        reference,
        channel_axis=2,
        data_range=255,
        gaussian_weights=True,
        sigma=1.5,
        use_sample_covariance=False,
        full=True,
    )
    difference = picture[edit.mask].astype(np.float64) - reference[edit.mask]
    mse = max(float((difference**2).mean()), 1e-2)  # equal pictures count as 68 dB
    outside = np.abs(picture.astype(int) - edit.source)[~edit.mask]
    verdict = judge(picture, edit.source, edit.mask)
    right = verdict.colour == edit.colour and verdict.shape == edit.shape
    return (
        float(ssim),
        float(ssim_map[edit.mask].mean()),
        10.0 * np.log10(255.0**2 / mse),
        int(outside.max(initial=0)),
        right,
    )
