"""Calls to a worker from a plain Triton client, without maskserve's own client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
from tritonclient.utils import InferenceServerException

from maskserve_benchmarks.triton_calls import (
    TIMEOUT_S,
    Answer,
    Grpc,
    Http,
    Pending,
    Stream,
    tensors,
    texts,
)
from maskserve_benchmarks.triton_calls import decode as pixels
from tests.fakes.pictures import blob_mask, encode, scene
from tests.support.eventually import eventually

Pixels = npt.NDArray[np.uint8]
LONG = {"num_inference_steps": 1000}
"""Settings of an edit with as many steps as there may be."""
WHOLE = {"crop_to_mask": "off"}
"""Setting of an edit that computes its whole picture: with `LONG` and 128 pixels it takes a second,
with 512 pixels many, also on a fast machine."""


def edit_inputs(
    image: bytes | Pixels, mask: bytes | Pixels, prompt: str = "a red star", **settings: Any
) -> dict[str, bytes]:
    """The four tensors of an edit; arrays are encoded as PNG.

    The second edit of a picture primes its template, and cached edits are approximate. So the cache
    is off unless a test turns it on, and equal edits give equal pictures.
    """
    settings = {"num_inference_steps": 2, "seed": 1, "cache": "off", **settings}
    return {
        "IMAGE": image if isinstance(image, bytes) else encode(image),
        "MASK": mask if isinstance(mask, bytes) else encode(mask),
        "PROMPT": prompt.encode(),
        "SETTINGS": json.dumps(settings).encode(),
    }


def plain_edit(height: int = 64, width: int = 64, **settings: Any) -> dict[str, bytes]:
    return edit_inputs(scene(height, width), blob_mask(height, width), **settings)


@contextmanager
def stream(url: str) -> Iterator[Stream]:
    with closing(Stream(url)) as opened:
        yield opened


__all__ = [
    "LONG",
    "TIMEOUT_S",
    "WHOLE",
    "Answer",
    "Grpc",
    "Http",
    "InferenceServerException",
    "Pending",
    "Stream",
    "edit_inputs",
    "eventually",
    "pixels",
    "plain_edit",
    "stream",
    "tensors",
    "texts",
]
