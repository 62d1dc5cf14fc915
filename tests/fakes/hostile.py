"""Requests that must be refused.

Unit tests call preprocess with them, end-to-end tests a server.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from maskserve_benchmarks.soak import bad_input
from maskserve_benchmarks.soak.pictures import png_chunk, png_file
from tests.fakes.corpus.encoding import webp_canvas, webp_of
from tests.fakes.pictures import blob_mask, encode, scene

SIZE = (40, 56)
"""(height, width) of the ordinary image that the cases start from."""


@dataclass(frozen=True)
class HostileCase:
    """One request that must be answered with one error."""

    name: str
    inputs: dict[str, bytes]
    """Bytes of IMAGE, MASK, PROMPT and SETTINGS."""
    code: str
    field: str
    """The name in the message, right after the code."""


def good_inputs() -> dict[str, bytes]:
    """A valid request."""
    return {
        "IMAGE": encode(scene(*SIZE)),
        "MASK": encode(blob_mask(*SIZE)),
        "PROMPT": b"a red star",
        "SETTINGS": b'{"num_inference_steps": 2, "seed": 1}',
    }


def hostile_cases() -> Iterator[HostileCase]:
    """All cases. They assume default limits and test nothing about a model's abilities."""
    for name, data in bad_images().items():
        for field in ("IMAGE", "MASK"):
            if name == "empty" and field == "MASK":
                yield _case("MASK empty", "MASK", MASK=b"")
                continue
            yield _case(f"{field} {name}", field, **{field: data})
    yield from _bad_masks()
    for name, prompt in _bad_prompts().items():
        yield _case(f"PROMPT {name}", "PROMPT", PROMPT=prompt)
    for name, (text, field) in _bad_settings().items():
        yield _case(f"SETTINGS {name}", field, SETTINGS=text)
    unknown = json.dumps({"template_id": "0" * 32}).encode()
    yield HostileCase(
        "template unknown",
        {**good_inputs(), "IMAGE": b"", "SETTINGS": unknown},
        "TEMPLATE_NOT_FOUND",
        "SETTINGS.template_id",
    )


def bad_images() -> dict[str, bytes]:
    """Bytes that are not a usable picture."""
    picture = scene(*SIZE)
    png, jpeg = encode(picture), encode(picture, "JPEG")
    webp = encode(picture, "WEBP", lossless=True)
    frame = jpeg.index(b"\xff\xc0") + 5
    bomb = jpeg[:frame] + struct.pack(">HH", 60_000, 60_000) + jpeg[frame + 4 :]
    return {
        **bad_input.bad_images(png),
        "empty": b"",
        "base64 of text": b"bm90IGFuIGltYWdl",
        "signature only": png[:8],
        "data URI of percent text": b"data:image/png,%89PNG",
        "data URI without data": b"data:image/png;base64,",
        "PNG without its last byte": png[:-1],
        "truncated PNG header": png[:20],
        "truncated JPEG": jpeg[: len(jpeg) // 2],
        "truncated JPEG header": jpeg[:10],
        "truncated WebP": webp[: len(webp) // 2],
        "truncated WebP header": webp[:18],
        "bomb one-bit PNG": png_file(2**31 - 1, 2**31 - 1, 1, 0, bytes(100)),
        "bomb JPEG": bomb,
        "bomb WebP": webp_of(webp_canvas(16_383, 16_383)),
        "PNG of no pixels": png_file(0, 0, 8, 2, b""),
        "PNG of many chunks": _many_chunks(70_000),
        **_cut("GIF", encode(picture, "GIF")),
        **_cut("TIFF", encode(picture, "TIFF", compression="tiff_lzw")),
        **_cut("AVIF", encode(picture, "AVIF")),
        "BigTIFF": encode(picture, "TIFF", big_tiff=True),
        "BMP": encode(picture, "BMP"),
        "PDF": b"%PDF-1.7 and so on",
    }


def _cut(name: str, encoded: bytes) -> dict[str, bytes]:
    cuts = (6, 20, len(encoded) // 2)
    return {f"{name} of its first {cut} bytes": encoded[:cut] for cut in cuts}


def _bad_masks() -> Iterator[HostileCase]:
    height, width = SIZE
    clear = np.full((height, width, 4), 255, np.uint8)
    clear[..., 3] = 128
    yield _case("MASK of another size", "MASK", MASK=encode(blob_mask(height + 1, width)))
    yield _case("MASK turned", "MASK", MASK=encode(blob_mask(width, height)))
    yield _case("MASK all black", "MASK", MASK=encode(np.zeros(SIZE, np.uint8)))
    yield _case("MASK dark grey", "MASK", MASK=encode(blob_mask(*SIZE, value=127)))
    yield _case("MASK half transparent", "MASK", MASK=encode(clear))


def _bad_prompts() -> dict[str, bytes]:
    return {
        "not UTF-8": b"a red \xff\xfe star",
        "cut inside a character": "é".encode()[:1],
        "NUL": b"a red\x00star",
        "too long": b"a" * 32_001,
    }


def _bad_settings() -> dict[str, tuple[bytes, str]]:
    """Name → (SETTINGS, field in the error)."""
    values: dict[str, tuple[object, str]] = {
        "boolean steps": ({"num_inference_steps": True}, "SETTINGS.num_inference_steps"),
        "0 steps": ({"num_inference_steps": 0}, "SETTINGS.num_inference_steps"),
        "steps over the limit": ({"num_inference_steps": 1001}, "SETTINGS.num_inference_steps"),
        "zero strength": ({"strength": 0}, "SETTINGS.strength"),
        "strength of no step": ({"strength": 1e-17}, "SETTINGS.strength"),
        "infinite strength": ({"strength": float("inf")}, "SETTINGS.strength"),
        "NaN guidance": ({"guidance_scale": float("nan")}, "SETTINGS.guidance_scale"),
        "negative seed": ({"seed": -1}, "SETTINGS.seed"),
        "mask mode": ({"mask_mode": "black"}, "SETTINGS.mask_mode"),
    }
    return {
        **bad_input.bad_settings(),
        **bad_input.with_json(values),
        "twice": (b'{"seed": 1, "seed": 2}', "SETTINGS.seed"),
    }


def _case(name: str, field: str, **changed: bytes) -> HostileCase:
    return HostileCase(name, {**good_inputs(), **changed}, "INVALID_REQUEST", field)


def _many_chunks(count: int) -> bytes:
    whole = png_file(1, 1, 8, 0, b"\0\0")
    return whole[:33] + png_chunk(b"tEXt", b"") * count + whole[33:]


__all__ = ["HostileCase", "bad_images", "good_inputs", "hostile_cases"]
