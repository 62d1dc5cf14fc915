"""Metrics of edited pictures: likeness, class by class, and whether the edit follows the prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.ndimage import distance_transform_cdt
from skimage.metrics import structural_similarity

from maskserve_benchmarks.demo_model.scenes import Edit
from maskserve_studies.demo_model.judge import judge

Picture = NDArray[np.uint8]

RIM = 24
"""Largest distance in pixels from the mask's rim at which the error is reported."""
VISIBLE_BELOW = 30.0
"""dB inside the mask below which the eye sees a difference between an edit and its reference."""


@dataclass(frozen=True)
class EditQuality:
    """One edit against the reference picture of the same edit."""

    ssim: float
    """SSIM over the image (Gaussian window, as in Wang et al. 2004)."""
    ssim_in_mask: float
    """Mean of the SSIM map over the mask's pixels."""
    psnr_in_mask: float
    """dB, from the mean squared error over the mask's pixels; equal pictures count as 68 dB."""
    outside_max_abs_diff: int
    """Largest difference to the *source* outside the mask."""
    right: bool | None
    """Whether the judge finds the requested colour and shape; None if the prompt asks for
    nothing."""


@dataclass(frozen=True)
class Quality:
    """Means over some edits, and the worst edit."""

    ssim: float
    ssim_in_mask: float
    psnr_in_mask: float
    pooled_psnr_in_mask: float
    """dB of the mean of the edits' squared errors. A mean of dB hides one bad edit behind good
    ones; this figure does not."""
    share_below_30: float
    """Share of the edits below SEEN_BELOW."""
    outside_max_abs_diff: int
    """The largest value of all edits."""
    prompt_followed: float | None
    """Share of right edits among those whose prompt asks for something; None if there are none."""
    worst_ssim_in_mask: float
    worst_psnr_in_mask: float

    def as_dict(self) -> dict[str, Any]:
        return {key: v if v is None else round(v, 4) for key, v in asdict(self).items()}


def compare(
    edits: Sequence[Edit], pictures: Sequence[Picture], references: Sequence[Picture]
) -> list[EditQuality]:
    """Compare `pictures` with `references`, edit by edit."""
    return [_compare_edit(e, p, r) for e, p, r in zip(edits, pictures, references, strict=True)]


def summary(qualities: Sequence[EditQuality]) -> Quality:
    """Return the means and the worst edit."""
    verdicts = [quality.right for quality in qualities if quality.right is not None]
    psnr = np.array([quality.psnr_in_mask for quality in qualities])
    return Quality(
        ssim=float(np.mean([quality.ssim for quality in qualities])),
        ssim_in_mask=float(np.mean([quality.ssim_in_mask for quality in qualities])),
        psnr_in_mask=float(psnr.mean()),
        pooled_psnr_in_mask=float(-10.0 * np.log10(np.mean(10.0 ** (-psnr / 10.0)))),
        share_below_30=float(np.mean(psnr < VISIBLE_BELOW)),
        outside_max_abs_diff=max(quality.outside_max_abs_diff for quality in qualities),
        prompt_followed=float(np.mean(verdicts)) if verdicts else None,
        worst_ssim_in_mask=min(quality.ssim_in_mask for quality in qualities),
        worst_psnr_in_mask=float(psnr.min()),
    )


def by_class(qualities_by_class: Mapping[str, Sequence[EditQuality]]) -> dict[str, Any]:
    """Return a system's figures: over all edits, per class in `classes`, and for the class with the
    lowest mean PSNR.
    """
    classes = {
        name: summary(class_qualities) for name, class_qualities in qualities_by_class.items()
    }
    worst = min(classes, key=lambda name: classes[name].psnr_in_mask)
    return {
        **summary(
            [
                quality
                for class_qualities in qualities_by_class.values()
                for quality in class_qualities
            ]
        ).as_dict(),
        "worst_class": worst,
        "worst_class_psnr_in_mask": round(classes[worst].psnr_in_mask, 4),
        "classes": {name: quality.as_dict() for name, quality in classes.items()},
    }


def _compare_edit(edit: Edit, picture: Picture, reference: Picture) -> EditQuality:
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
    mse = max(float((difference**2).mean()), 1e-2)
    outside = np.abs(picture.astype(int) - edit.source)[~edit.mask]
    right = None
    if edit.colour is not None:
        verdict = judge(picture, edit.source, edit.mask)
        right = verdict.matches(edit.colour, edit.shape)
    return EditQuality(
        float(ssim),
        float(ssim_map[edit.mask].mean()),
        10.0 * np.log10(255.0**2 / mse),
        int(outside.max(initial=0)),
        right,
    )


def rim_errors(
    edits: Sequence[Edit], pictures: Sequence[Picture], references: Sequence[Picture]
) -> list[float]:
    """Return the root mean squared error (0..255) of the masked pixels 1, 2, ... RIM rows and
    columns inside the mask's rim, over all edits. A side of the picture does not count as rim.
    """
    squares, counts = np.zeros(RIM + 1), np.zeros(RIM + 1)
    for edit, picture, reference in zip(edits, pictures, references, strict=True):
        if edit.mask.all():
            continue
        distance = np.minimum(distance_transform_cdt(edit.mask, "chessboard"), RIM)
        errors = ((picture.astype(np.float64) - reference) ** 2).mean(axis=2)
        squares += np.bincount(distance.ravel(), errors.ravel(), RIM + 1)
        counts += np.bincount(distance.ravel(), minlength=RIM + 1)
    return [round(float(v), 4) for v in np.sqrt(squares[1:] / np.maximum(counts[1:], 1))]
