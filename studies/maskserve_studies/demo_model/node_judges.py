"""Judges of the node models: `find` and `segment` on scenes, `enlarge` on a photograph, none of
which training sees.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from PIL import Image
from transformers import (
    CLIPSegForImageSegmentation,
    CLIPSegProcessor,
    SamModel,
    SamProcessor,
    Swin2SRForImageSuperResolution,
)

from maskserve_benchmarks.demo_model.scenes import HELD_OUT_PHOTO, PHOTOS, Picture
from maskserve_studies.demo_model.named_scenes import disc, held_out_clicks, held_out_scenes, iou

SIDE: Final = 128
_RIM: Final = 4
"""Pixels at the edge that PSNR leaves out, as is usual."""


@torch.inference_mode()
def find_iou(folder: Path, scenes: int) -> float:
    """Return the mean IoU, over held-out scenes, of the masks that the folder's CLIPSeg finds."""
    model: Any = CLIPSegForImageSegmentation.from_pretrained(folder).eval()
    processor = CLIPSegProcessor.from_pretrained(folder)
    scores = []
    for scene, thing in held_out_scenes(scenes, (SIDE, SIDE)):
        name = f"a {thing.colour} {thing.shape}"
        inputs = processor(text=[name], images=[scene.picture], return_tensors="pt")
        predicted = model(**inputs).logits.reshape(SIDE, SIDE).numpy() > 0
        scores.append(iou(predicted, scene.mask(thing.colour, thing.shape)))
    return float(np.mean(scores))


@torch.inference_mode()
def click_iou(folder: Path, clicks: int) -> tuple[float, float]:
    """Return the mean IoU over held-out clicks, of the folder's SAM and of discs around the clicks.
    The discs have the one radius that is best in the mean.
    """
    model: Any = SamModel.from_pretrained(folder).eval()
    processor: Any = SamProcessor.from_pretrained(folder)
    radii = range(4, SIDE // 2, 2)
    model_scores, discs = [], []
    for scene, thing, click in held_out_clicks(clicks, (SIDE, SIDE)):
        inputs = processor(
            images=[scene.picture], input_points=[[[list(click)]]], return_tensors="pt"
        )
        sizes = inputs.pop("original_sizes"), inputs.pop("reshaped_input_sizes")
        answer = model(**inputs)
        best = int(answer.iou_scores[0, 0].argmax())
        masks = processor.post_process_masks(answer.pred_masks, *sizes)[0][0, best]
        model_scores.append(iou(masks.numpy().astype(np.bool_), thing.covers))
        discs.append([iou(disc(click, r, (SIDE, SIDE)), thing.covers) for r in radii])
    return float(np.mean(model_scores)), float(np.mean(discs, axis=0).max())


def halved(picture: Picture) -> Picture:
    """Return the picture (H, W, 3) at half its sides, which are even."""
    height, width = picture.shape[:2]
    return np.asarray(
        Image.fromarray(picture).resize((width // 2, height // 2), Image.Resampling.BICUBIC)
    )


@torch.inference_mode()
def enlarge_db(folder: Path) -> tuple[float, float]:
    """Return the PSNR in dB of the folder's Swin2SR and of Lanczos on the held-out photograph."""
    model: Any = Swin2SRForImageSuperResolution.from_pretrained(folder).eval()
    with Image.open(PHOTOS / HELD_OUT_PHOTO) as photo:
        right = np.asarray(photo.convert("RGB"))
    right = right[: right.shape[0] // 16 * 16, : right.shape[1] // 16 * 16]
    small = halved(right)
    pixels = torch.from_numpy(small.copy()).permute(2, 0, 1)[None].float() / 255
    enlarged = model(pixels).reconstruction[0].clamp(0, 1)
    model_picture = (255 * enlarged).round().permute(1, 2, 0).numpy().astype(np.uint8)
    size = (right.shape[1], right.shape[0])
    lanczos = np.asarray(Image.fromarray(small).resize(size, Image.Resampling.LANCZOS))
    return _psnr(model_picture, right), _psnr(lanczos, right)


def _psnr(picture: Picture, right: Picture) -> float:
    inner = (slice(_RIM, -_RIM), slice(_RIM, -_RIM))
    wrong = picture[inner].astype(np.float64) - right[inner]
    return float(10 * np.log10(255**2 / np.mean(wrong**2)))
