"""Masks: those that select something, and those that cannot be used."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
from PIL import Image

from tests.fakes.corpus.case import Bools, Case, Pixels, refused, works
from tests.fakes.corpus.encoding import GREY, PALETTE, RGB, png
from tests.fakes.hostile import SIZE
from tests.fakes.pictures import blob_mask, encode, scene

_HEIGHT, _WIDTH = SIZE


def mask_cases() -> Iterator[Case]:
    source = scene(*SIZE)
    for name, (encoded, edited, settings) in _usable().items():
        changed = {"MASK": encoded, "SETTINGS": json.dumps({**_SETTINGS, **settings}).encode()}
        yield works("mask", name, source, ~edited, **changed)
    for name, (encoded, field, settings) in _useless().items():
        changed = {"MASK": encoded, "SETTINGS": json.dumps({**_SETTINGS, **settings}).encode()}
        yield refused("mask", name, field, **changed)


_SETTINGS = {"num_inference_steps": 1, "seed": 1}
Usable = tuple[bytes, Bools, dict[str, Any]]


def _usable() -> dict[str, Usable]:
    blob = blob_mask(*SIZE)
    masks: dict[str, Usable] = {}
    for name, (y, x) in {
        "first": (0, 0),
        "last": (_HEIGHT - 1, _WIDTH - 1),
        "lower left": (_HEIGHT - 1, 0),
        "middle": (21, 33),
    }.items():
        dot = np.zeros(SIZE, np.uint8)
        dot[y, x] = 255
        masks[f"of the {name} pixel alone"] = encode(dot), dot > 0, {}
    lines = np.zeros(SIZE, np.uint8)
    lines[::7], lines[:, ::11] = 255, 255
    noise = (np.random.default_rng(5).random(SIZE) > 0.9).astype(np.uint8) * 255
    for name, mask in {
        "all white": np.full(SIZE, 255, np.uint8),
        "of thin lines": lines,
        "of scattered pixels": noise,
        "of all but one pixel": np.where(np.arange(_HEIGHT * _WIDTH).reshape(SIZE) == 99, 0, 255),
    }.items():
        masks[name] = encode(mask.astype(np.uint8)), mask > 0, {}
    masks |= {f"as {name}": (data, blob > 0, {}) for name, data in _spellings(blob).items()}
    grey = np.full(SIZE, 127, np.uint8)
    grey[blob > 0] = 128
    masks["of light grey on darker grey"] = encode(grey), blob > 0, {}
    masks |= _by_alpha(blob)
    for dilate, feather in ((1, 0), (3, 2), (0, 5), (512, 0), (0, 512), (512, 512)):
        name = f"grown by {dilate}, faded over {feather}"
        settings = {"mask_dilate": dilate, "mask_feather": feather}
        masks[name] = encode(blob), _grown(blob > 0, dilate + feather), settings
    return masks


def _spellings(mask: Pixels) -> dict[str, bytes]:
    """The same mask in other encodings."""
    picture = Image.fromarray(mask)
    text = base64.b64encode(encode(mask))
    rgb = np.repeat(mask[..., None], 3, axis=2)
    table = ((b"PLTE", bytes([0, 0, 0, 255, 255, 255])),)
    return {
        "one bit": encode(picture.convert("1")),
        "a palette": encode(picture.convert("P")),
        "a two-colour palette": png(mask // 255, PALETTE, 1, before=table),
        "RGB": encode(rgb),
        "opaque RGBA": encode(picture.convert("RGBA")),
        "opaque grey with alpha": encode(picture.convert("LA")),
        "16-bit grey": png(mask.astype(np.uint16) * 257, GREY, 16),
        "interlaced grey": png(mask, GREY, interlaced=True),
        "interlaced RGB": png(rgb, RGB, interlaced=True),
        "JPEG": encode(picture, "JPEG", quality=100),
        "lossless WebP": encode(picture.convert("RGB"), "WEBP", lossless=True),
        "base64": text,
        "a data: URI": b"data:image/png;base64," + text,
    }


def _by_alpha(mask: Pixels) -> dict[str, Usable]:
    rgb = np.zeros((*SIZE, 3), np.uint8)
    clear = np.dstack([rgb, np.where(mask > 0, 0, 255).astype(np.uint8)])
    half = np.dstack([rgb + 255, np.where(mask > 0, 0, 200).astype(np.uint8)])
    white = np.dstack([np.repeat(mask[..., None], 3, axis=2), np.full(SIZE, 9, np.uint8)])
    levels = np.where(mask > 0, 3, 7).astype(np.uint8)
    key = ((b"PLTE", bytes(range(24))), (b"tRNS", b"\xff\xff\xff\0"))
    colour = np.repeat(np.where(mask > 0, 20, 30).astype(np.uint8)[..., None], 3, axis=2)
    edited = mask > 0
    return {
        "clear where to edit": (encode(clear), edited, {}),
        "clear where to edit, half clear elsewhere": (encode(half), edited, {}),
        "clear, asked for by alpha": (encode(clear), edited, {"mask_mode": "alpha"}),
        "white under alpha, asked for by white": (encode(white), edited, {"mask_mode": "white"}),
        "of a clear palette entry": (png(levels, PALETTE, before=key), edited, {}),
        "of a clear grey": (png(levels, GREY, before=((b"tRNS", b"\0\3"),)), edited, {}),
        "of a clear colour": (png(colour, RGB, before=((b"tRNS", b"\0\x14" * 3),)), edited, {}),
        "as WebP with alpha": (encode(clear, "WEBP", lossless=True), edited, {}),
        "of RGBA with a stray tRNS": (
            png(clear, 6, before=((b"tRNS", b"\0\1\0\2\0\3"),)),
            edited,
            {},
        ),
    }


def _grown(selection: Bools, reach: int) -> Bools:
    """Every pixel within `reach` rows and columns of the selection."""
    rows, columns = np.nonzero(selection)
    grown = np.zeros_like(selection)
    grown[
        max(0, rows.min() - reach) : rows.max() + reach + 1,
        max(0, columns.min() - reach) : columns.max() + reach + 1,
    ] = True
    return grown


def _useless() -> dict[str, tuple[bytes, str, dict[str, Any]]]:
    blob = blob_mask(*SIZE)
    turned = Image.Exif()
    turned[0x0112] = 6
    masks: dict[str, tuple[bytes, str, dict[str, Any]]] = {}
    for height, width in ((_HEIGHT - 1, _WIDTH), (_HEIGHT, _WIDTH + 1), (1, 1), (80, 112)):
        masks[f"of {width}x{height} pixels"] = encode(blob_mask(height, width)), "MASK", {}
    masks["turned by its EXIF"] = encode(blob, exif=turned), "MASK", {}
    black = np.zeros(SIZE, np.uint8)
    for mode in ("auto", "white"):
        masks[f"all black, {mode}"] = encode(black), "MASK", {"mask_mode": mode}
    masks["all black, grown"] = encode(black), "MASK", {"mask_dilate": 512, "mask_feather": 512}
    for alpha in (1, 128, 254):
        veil = np.dstack([np.full((*SIZE, 3), 255, np.uint8), np.full(SIZE, alpha, np.uint8)])
        masks[f"nowhere clear, alpha {alpha}"] = encode(veil), "MASK", {}
    opaque = encode(Image.fromarray(blob).convert("RGBA"))
    masks["opaque, asked for by alpha"] = opaque, "MASK", {"mask_mode": "alpha"}
    for kind, data in {
        "grey PNG": encode(blob),
        "JPEG": encode(blob, "JPEG"),
        "WebP": encode(Image.fromarray(blob).convert("RGB"), "WEBP", lossless=True),
    }.items():
        name = f"{kind} without alpha, asked for by alpha"
        masks[name] = data, "SETTINGS.mask_mode", {"mask_mode": "alpha"}
    return masks
