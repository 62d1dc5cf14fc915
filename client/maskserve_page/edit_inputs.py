"""The users' input to the page, converted to the parts of an edit."""

from __future__ import annotations

import base64
import binascii
import json
import secrets
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from maskserve_common.contracts.request import EditKind
from maskserve_common.errors import InvalidRequest
from maskserve_page.pictures import PagePicture, PagePictures

_PREVIEWS = 6
"""Most previews of one edit."""
_SEED_BITS = 32
_SHAPES = ((1, 1), (3, 2), (2, 3), (16, 9), (9, 16))
"""Ratios of width and height."""


class InputMissing(InvalidRequest):
    """The user has not chosen a picture or painted a mask yet; the message is a whole sentence."""

    def __init__(self, sentence: str) -> None:
        super().__init__("page", sentence)
        self.sentence = sentence


def decode_picture(text: str) -> bytes:
    """Return the bytes of a picture in base64.

    Raises:
        InvalidRequest: the text is not base64.
    """
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError, TypeError):
        raise InvalidRequest(
            "picture", "is damaged", "a PNG, JPEG, WebP, AVIF or GIF file"
        ) from None


class Painted(NamedTuple):
    """The canvas's part of an edit, as far as its kind has one."""

    source: PagePicture | None = None
    mask: Image.Image | None = None
    """White where the user painted; None: nowhere, or the kind has no mask."""
    expand: tuple[int, ...] = ()
    """`SETTINGS.expand`; empty: the picture keeps its size."""


def painted_of(
    painted: str | None, pictures_on_disk: PagePictures, kind: EditKind = "inpaint"
) -> Painted:
    """Return the picture, the mask and the growth of an edit.

    Args:
        painted: the canvas's JSON; see `painter.js`.
        pictures_on_disk: pictures of the page.
        kind: kind of the edit.

    Raises:
        InputMissing: there is no picture, or nothing was painted.
        InvalidRequest: the mask belongs to another picture.
    """
    if kind == "generate":
        return Painted()
    try:
        canvas = json.loads(painted or "{}")
        name, bits = canvas["name"], base64.b64decode(canvas.get("mask", ""), validate=True)
        expand = tuple(int(margin) for margin in canvas.get("expand", ()))
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        raise InputMissing(
            "There is no picture yet: choose, paste or drop one, or pick one."
        ) from None
    source = pictures_on_disk.get(name)
    if kind == "edit":
        return Painted(source)
    expand = expand if any(expand) else ()
    height, width = source.size
    touched = np.unpackbits(np.frombuffer(bits, np.uint8))[: width * height]
    if not touched.any() and expand:
        return Painted(source, None, expand)
    if not touched.any():
        raise InputMissing("Nothing is masked yet: paint over what is to change.")
    if len(bits) != -(-width * height // 8):
        raise InvalidRequest("mask", "is of another picture", "paint it again")
    return Painted(source, Image.fromarray(255 * touched.reshape(height, width)), expand)


def references_of(
    further: str | None, pictures_on_disk: PagePictures, kind: EditKind
) -> list[PagePicture]:
    """Return the pictures that an edit sees beside its source; only an instruction has any.

    Args:
        further: JSON of `references.js`, their names.
        pictures_on_disk: pictures of the page.
        kind: kind of the edit.

    Raises:
        InvalidRequest: one is not here any more, or `further` is no list.
    """
    if kind != "edit" or not further:
        return []
    try:
        names = list(json.loads(further))
    except (ValueError, TypeError, RecursionError):
        problem = "is no list of names"
        raise InvalidRequest("further pictures", problem, "pictures that are here") from None
    return [pictures_on_disk.get(name) for name in names]


def sizes_of(native: int) -> list[tuple[str, str]]:
    """Return sizes to choose from, each as shown and as `SETTINGS.size`: the model's own, then
    shapes of about the area of its native square.
    """
    unit = max(native // 8 // 32 * 32, 16)  # a multiple of every model's grid
    sizes = [("automatic", "auto")]
    for across, down in _SHAPES:
        scale = (across / down) ** 0.5
        width, height = (int(native * part) // unit * unit for part in (scale, 1 / scale))
        sizes.append((f"{width} × {height}", f"{width}x{height}"))
    return sizes


def settings_of(
    kind: EditKind,
    seed: float | None,
    new_seed: bool,
    steps: float | None,
    guidance: float | None,
    size: str | None,
    strength: float | None,
    dilate: int,
    feather: int,
    cache: str,
    loras: str | None,
) -> dict[str, Any]:
    """Return SETTINGS of an edit of this kind, without those left at the model's defaults."""
    settings: dict[str, Any] = {
        "seed": secrets.randbits(_SEED_BITS) if new_seed or seed is None else int(seed),
        "preview_every": max(1, int(steps or 28) // _PREVIEWS),
    }
    if kind == "inpaint":
        settings |= {"mask_dilate": int(dilate), "mask_feather": int(feather), "cache": cache}
    else:
        settings["size"] = (size or "auto").replace(" ", "").replace("×", "x")
    if kind == "edit" and strength is not None:
        settings["strength"] = float(strength)
    if steps:
        settings["num_inference_steps"] = int(steps)
    if guidance:
        settings["guidance_scale"] = float(guidance)
    lora_texts = [part.strip() for part in (loras or "").split(",") if part.strip()]
    if lora_texts:
        settings["loras"] = [_lora(text) for text in lora_texts]
    return settings


def _lora(text: str) -> dict[str, Any]:
    name, colon, scale = text.partition(":")
    try:
        return {"name": name, "scale": float(scale)} if colon else {"name": name}
    except ValueError:
        raise InvalidRequest("LoRAs", f"{scale!r} is not a number", "NAME or NAME:SCALE") from None
