"""Run held-out edits through diffusers' pipeline, and judge them."""

from __future__ import annotations

import numpy as np
import torch
from diffusers import FluxFillPipeline, StableDiffusionInpaintPipeline
from PIL import Image

from maskserve_benchmarks.demo_model.prompts import MAX_SEQUENCE_LENGTH
from maskserve_benchmarks.demo_model.scenes import Edit, Picture
from maskserve_studies.demo_model.judge import Verdict, judge


def run_edits(
    pipe: FluxFillPipeline | StableDiffusionInpaintPipeline,
    edits: list[Edit],
    steps: int,
    batch: int,
    **arguments: float,
) -> list[Picture]:
    """Return the edited pictures with the source pasted back outside each mask.

    The noise of edit i is drawn from seed i, whatever the batch size. Further `arguments` go to the
    pipeline's call.
    """
    if isinstance(pipe, FluxFillPipeline):
        arguments = {"max_sequence_length": MAX_SEQUENCE_LENGTH, **arguments}
    pictures: list[Picture] = []
    for first in range(0, len(edits), batch):
        batch_edits = edits[first : first + batch]
        output = pipe(
            prompt=[edit.prompt for edit in batch_edits],
            image=[Image.fromarray(edit.source) for edit in batch_edits],
            mask_image=[Image.fromarray(edit.mask.astype(np.uint8) * 255) for edit in batch_edits],
            height=batch_edits[0].source.shape[0],
            width=batch_edits[0].source.shape[1],
            num_inference_steps=steps,
            generator=[
                torch.Generator("cpu").manual_seed(first + i) for i in range(len(batch_edits))
            ],
            output_type="np",
            **arguments,
        ).images
        for edit, image in zip(batch_edits, output, strict=True):
            edited = np.rint(image * 255).astype(np.uint8)
            pictures.append(np.where(edit.mask[..., None], edited, edit.source))
    return pictures


def verdicts_of(edits: list[Edit], pictures: list[Picture]) -> list[Verdict]:
    """Return the judge's verdict on every picture."""
    return [
        judge(picture, edit.source, edit.mask)
        for edit, picture in zip(edits, pictures, strict=True)
    ]
