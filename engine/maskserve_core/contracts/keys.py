"""Digests that name things."""

from __future__ import annotations

import hashlib
import re

import numpy as np
import numpy.typing as npt

TEMPLATE_ID = re.compile(r"[0-9a-f]{16,64}")
"""The form of a template's name."""


def template_id(pixels: npt.NDArray[np.uint8]) -> str:
    """Name of a template: 32 hexadecimal digits over its size and decoded RGB pixels.

    Two files of the same picture (PNG and lossless WebP, say) are the same template.

    Args:
        pixels: uint8 [H, W, 3], the decoded, upright source.
    """
    digest = hashlib.blake2b(digest_size=16, person=b"maskserve.templ")
    digest.update(f"{pixels.shape[0]}x{pixels.shape[1]}:".encode())
    digest.update(np.ascontiguousarray(pixels).data)
    return digest.hexdigest()
