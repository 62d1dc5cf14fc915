"""Time what one edit costs before and after the model: decode, masks, paste, encode.

    python scripts/bench codec --json

CPU time of this thread, so that other work on the machine weighs less on the figures.

Postprocess decodes the source a second time. Beside what that takes stands what it would take to
carry the decoded pixels there in place of the file: copies into and out of shared memory, once for
each process on the way (denoiser, decoder, postprocess).
"""

from __future__ import annotations

import argparse
import io
import json
import mmap
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
from PIL import Image

from maskserve_core.config import Config
from maskserve_core.contracts.settings import EditSettings
from maskserve_core.contracts.settings_rules import accept_edit
from maskserve_core.imaging.geometry import resize
from maskserve_core.imaging.images import NO_LIMITS, decode_raster, encode_image
from maskserve_core.imaging.postprocess import finish_edit
from maskserve_core.imaging.preprocess import prepare_edit
from maskserve_harness.benchmarks.machine import machine
from maskserve_harness.benchmarks.models import FLUX_DEV_FACTS
from maskserve_harness.checkout import CHECKOUT

PHOTO = CHECKOUT / "assets" / "photos" / "astronaut.jpg"


def median_ms(work: Callable[[], object], repeats: int) -> float:
    taken = []
    for _ in range(repeats):
        start = time.thread_time()
        work()
        taken.append((time.thread_time() - start) * 1e3)
    return round(float(np.median(taken)), 3)


def carried_ms(context: bytes, repeats: int, processes: int = 3) -> float:
    """Bytes on their way from preprocess to postprocess, through shared memory that is in use."""
    with mmap.mmap(-1, len(context)) as shared:

        def carry() -> None:
            held = context
            for _ in range(processes):
                shared[:] = held
                held = shared[:]

        carry()
        return median_ms(carry, repeats)


def second_decode(photo: Image.Image, repeats: int) -> dict[str, dict[str, float]]:
    """Per format of the source: its bytes, decoding them again, carrying them, carrying pixels."""
    raw = photo.tobytes()
    carried_pixels = carried_ms(raw, repeats)
    costs = {}
    for kind in ("PNG", "JPEG", "WEBP"):
        out = io.BytesIO()
        photo.save(out, kind)
        encoded = out.getvalue()
        costs[kind] = {
            "bytes": len(encoded),
            "decode_ms": median_ms(
                lambda e=encoded: decode_raster(e, "source", NO_LIMITS),  # type: ignore[misc]
                repeats,
            ),
            "carry_file_ms": carried_ms(encoded, repeats),
            "carry_pixels_ms": carried_pixels,
        }
    return costs


def pillow_png(image: Image.Image) -> bytes:
    out = io.BytesIO()
    image.save(out, "PNG", compress_level=1)
    return out.getvalue()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--side", type=int, default=256, help="side of the source in pixels")
    parser.add_argument("--native", type=int, default=256, help="native side of the model")
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()

    side = options.side
    photo = resize(Image.open(PHOTO).convert("RGB"), (side, side))
    rows, columns = np.mgrid[:side, :side] / side - 0.5
    blob = Image.fromarray(np.where(rows**2 + columns**2 < 0.03, 255, 0).astype(np.uint8))
    image, mask = pillow_png(photo), pillow_png(blob)
    facts = replace(FLUX_DEV_FACTS, semantics="fill", native_resolution=options.native)
    config = Config()

    accepted = accept_edit(EditSettings(), b"a red star", facts, config)
    prepared = prepare_edit(image, mask, accepted, facts, config)
    pixels = np.asarray(photo)
    answer = prepared.pixels
    report: dict[str, object] = {
        "side": side,
        "native": options.native,
        "repeats": options.repeats,
        "machine": machine(),
        "prepare_ms": median_ms(
            lambda: prepare_edit(image, mask, accepted, facts, config),
            options.repeats,
        ),
        "finish_ms": median_ms(
            lambda: finish_edit(answer, prepared.context),
            options.repeats,
        ),
        "encode_png_ms": median_ms(lambda: encode_image(pixels, "png"), options.repeats),
        "encode_png_bytes": len(encode_image(pixels, "png")),
        "pillow_png_ms": median_ms(lambda: pillow_png(photo), options.repeats),
        "pillow_png_bytes": len(image),
        "pixel_bytes": photo.width * photo.height * 3,
        "second_decode": second_decode(photo, options.repeats),
    }
    if options.json:
        print(json.dumps(report))
        return 0
    for name, value in report.items():
        print(f"{name:18} {value}")
    return 0
