"""Measure the processor time of encoding and decoding a photograph of assets/photos.

scripts/bench pictures

All encoders take turns, in one thread, and so do decoders; the medians count.
"""

from __future__ import annotations

import argparse
import io
from collections.abc import Callable
from unittest.mock import patch

import numpy as np
import torch
from PIL import Image

from maskserve_benchmarks.checkout import CHECKOUT
from maskserve_benchmarks.machine import machine
from maskserve_benchmarks.reports import table
from maskserve_benchmarks.timing import Timer
from maskserve_common.imaging import images
from maskserve_common.imaging.images import (
    NO_LIMITS,
    Pixels,
    decode_image,
    encode_image,
    encode_png,
    resize,
)

SIDE = 1024


def by_zlib(pixels: Pixels) -> bytes:
    """Encode as a platform without ISA-L does."""
    with patch.object(images, "_isal", None):
        return encode_png(pixels)


def by_pillow(pixels: Pixels) -> bytes:
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "PNG", compress_level=1)
    return out.getvalue()


ENCODERS: dict[str, Callable[[Pixels], bytes]] = {
    "PNG": encode_png,
    "PNG by zlib": by_zlib,
    "PNG by Pillow, level 1": by_pillow,
    "JPEG": lambda pixels: encode_image(pixels, "jpeg"),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--photo", default="astronaut", help="a name in assets/photos")
    parser.add_argument("--rounds", type=int, default=15)
    flags = parser.parse_args()
    image = Image.open(CHECKOUT / "assets" / "photos" / f"{flags.photo}.jpg").convert("RGB")
    pixels = np.asarray(resize(image, (SIDE, SIDE)))
    files = {name: encode(pixels) for name, encode in ENCODERS.items()}

    def encoding(name: str) -> Callable[[], object]:
        return lambda: ENCODERS[name](pixels)

    def decoding(name: str) -> Callable[[], object]:
        return lambda: decode_image(files[name], "IMAGE", NO_LIMITS)

    calls = [make(name) for name in ENCODERS for make in (encoding, decoding)]
    ms = Timer(torch.device("cpu"), "cpu").in_turn(calls, flags.rounds)
    print(f"{flags.photo}, {SIDE}x{SIDE}, {machine()}: milliseconds of processor time\n")
    rows = [
        (name, f"{encode:.1f}", f"{decode:.1f}", f"{len(files[name]):,}")
        for name, encode, decode in zip(ENCODERS, ms[::2], ms[1::2], strict=True)
    ]
    print(table(("file", "encode", "decode", "bytes"), rows))
    return 0
