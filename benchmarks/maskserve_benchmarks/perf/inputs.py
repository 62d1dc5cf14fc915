"""Edits for perf_analyzer: real pictures, published mask ratios, and prompts the demo model knows.

perf_analyzer takes inputs as JSON and sends their entries in turn. Bytes stand there as base64 of
what Triton puts on the wire for a BYTES element: a 4-byte little-endian length and the payload.
"""

from __future__ import annotations

import base64
import json
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageOps

from maskserve_benchmarks.demo_model.palette import COLOURS, SHAPES
from maskserve_benchmarks.demo_model.prompts import phrase
from maskserve_benchmarks.perf.errors import PerfError
from maskserve_benchmarks.simulator.workload import MIXES
from maskserve_common.contracts.edit_kinds import MOST_PICTURES
from maskserve_common.contracts.request import EDIT_KINDS, EditKind
from maskserve_common.imaging.images import encode_image

Mask = npt.NDArray[np.bool_]
TENSORS = ("IMAGE", "MASK", "PROMPT", "SETTINGS")
_LENGTH = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class InputOptions:
    """Properties of the edits. Equal options give equal edits."""

    size: int = 128
    """Side of the square pictures, in pixels."""
    entries: int = 32
    """Number of different edits; after the last one perf_analyzer starts again."""
    templates: int = 8
    """Number of different pictures among them; edits of one picture differ in mask, prompt and
    seed."""
    mix: str = "production"
    """Published distribution of mask ratios: a name of `simulator.workload.MIXES`."""
    kind: EditKind = "inpaint"
    """Kind of the edits. Without a mask or picture, that tensor is empty, and the answers have the
    size of the pictures."""
    references: int = 0
    """Further pictures of each edit, which follow its source."""
    seed: int = 0
    settings: dict[str, Any] = field(default_factory=dict)
    """SETTINGS of every edit; each edit also gets its own `seed`."""

    def __post_init__(self) -> None:
        for name, low, high in (("size", 16, 4096), ("entries", 1, 4096), ("templates", 1, 4096)):
            value = getattr(self, name)
            if not low <= value <= high:
                raise PerfError(f"--{name}: {value} is not from {low} to {high}")
        if self.kind not in EDIT_KINDS:
            raise PerfError(f"--kind: {self.kind!r} is not one of {', '.join(EDIT_KINDS)}")
        most = 0 if self.kind == "generate" else MOST_PICTURES - 1
        if not 0 <= self.references <= most:
            problem = f"--references: {self.references} is not from 0 to {most}"
            raise PerfError(f"{problem} with --kind {self.kind}")
        if self.mix not in MIXES:
            raise PerfError(f"--mix: {self.mix!r} is not one of {', '.join(MIXES)}")


@dataclass(frozen=True, slots=True)
class Edit:
    """One edit in the form in which it is sent."""

    image: bytes
    """PNG file; empty without a source."""
    mask: bytes
    """PNG file in grey; white is edited. Empty without a mask."""
    prompt: str
    settings: dict[str, Any]
    mask_ratio: float
    """White pixels over all pixels; 1 without a mask."""
    control: tuple[bytes, ...] = ()
    """PNG files for the ControlNets in `settings`."""
    references: tuple[bytes, ...] = ()
    """PNG files that follow the source."""

    def elements(self) -> dict[str, tuple[bytes, ...]]:
        """Return the elements of the fronts' input tensors by name."""
        elements = {name: (value,) for name, value in self.tensors().items()}
        several = {"IMAGE": (self.image, *self.references)}
        return {**elements, **several, **({"CONTROL": self.control} if self.control else {})}

    def tensors(self) -> dict[str, bytes]:
        """Return the fronts' input tensors by name, each with its first element."""
        settings = json.dumps(self.settings).encode()
        payloads = (self.image, self.mask, self.prompt.encode(), settings)
        return dict(zip(TENSORS, payloads, strict=True))


def make_edits(options: InputOptions, photos: list[Path]) -> list[Edit]:
    """Draw the edits.

    Args:
        options: properties of the edits.
        photos: pictures to crop from, taken in turn.

    Raises:
        PerfError: a photo cannot be read.
    """
    # Each property has its own random stream: changing one leaves the others unchanged.
    crops, masks, words = (
        np.random.default_rng(s) for s in np.random.SeedSequence(options.seed).spawn(3)
    )
    opened = [_open(photo) for photo in photos]
    pictures = [
        encode_image(np.asarray(_crop(opened[i % len(opened)], options.size, crops)), "png")
        for i in range(min(options.templates, options.entries))
    ]
    settings, is_masked = dict(options.settings), options.kind == "inpaint"
    if not is_masked:
        settings["size"] = f"{options.size}x{options.size}"
    edits = []
    for number, ratio in enumerate(draw_ratios(options.mix, options.entries, masks)):
        mask = draw_mask(options.size, float(ratio), masks)
        further = range(number + 1, number + 1 + options.references)
        edits.append(
            Edit(
                image=b"" if options.kind == "generate" else pictures[number % len(pictures)],
                mask=encode_image(mask * np.uint8(255), "png") if is_masked else b"",
                prompt=phrase(words, str(words.choice(list(COLOURS))), str(words.choice(SHAPES))),
                settings={**settings, "seed": number},
                mask_ratio=float(mask.mean()) if is_masked else 1.0,
                references=tuple(pictures[at % len(pictures)] for at in further),
            )
        )
    return edits


def draw_ratios(mix: str, count: int, rng: np.random.Generator) -> npt.NDArray[np.float64]:
    """Draw mask ratios of a published distribution, one from each `count`-th part of it, shuffled.

    A few dozen edits therefore have its mean and its tail.
    """
    probabilities = (np.arange(count) + rng.random(count)) / count
    return rng.permutation(MIXES[mix].ratios(probabilities))


def draw_mask(size: int, ratio: float, rng: np.random.Generator) -> Mask:
    """Draw a compact region that covers `ratio` of `size` x `size` pixels, exact to the pixel, and
    at least one pixel.

    It holds the pixels nearest to a random centre, by the distance of a turned ellipse or
    rectangle; where the border cuts the region it grows on the other sides.
    """
    count = min(max(round(ratio * size**2), 1), size**2)
    y, x = np.mgrid[:size, :size] - rng.uniform(0.2, 0.8, 2)[:, None, None] * size
    angle, aspect = rng.uniform(0, np.pi), rng.uniform(1, 2)
    along = x * np.cos(angle) + y * np.sin(angle)
    across = (y * np.cos(angle) - x * np.sin(angle)) * aspect
    if rng.random() < 0.5:
        distance = np.hypot(along, across)
    else:
        distance = np.maximum(np.abs(along), np.abs(across))
    mask = np.zeros(size**2, bool)
    mask[np.argpartition(distance.ravel(), count - 1)[:count]] = True
    return mask.reshape(size, size)


def write_edits(edits: list[Edit], path: Path) -> None:
    """Write the file for perf_analyzer's --input-data."""
    entries = [
        {
            name: {"b64": pack(*payloads), "shape": [len(payloads)]}
            for name, payloads in edit.elements().items()
        }
        for edit in edits
    ]
    path.write_text(json.dumps({"data": entries}), encoding="utf-8")


def pack(*payloads: bytes) -> str:
    """Return BYTES elements in perf_analyzer's form."""
    elements = [_LENGTH.pack(len(payload)) + payload for payload in payloads]
    return base64.b64encode(b"".join(elements)).decode()


def find_photos(assets: Path) -> list[Path]:
    """Return the repository's photographs, in a fixed order."""
    photos = [
        *sorted((assets / "photos").glob("*.jpg")),
        *sorted((assets / "demo").glob("source.*")),
    ]
    if not photos:
        raise PerfError(f"{assets} holds no photographs")
    return photos


def _open(path: Path) -> Image.Image:
    try:
        with Image.open(path) as opened:
            return ImageOps.exif_transpose(opened).convert("RGB")
    except OSError as error:
        raise PerfError(f"{path} is not a picture: {error}") from error


def _crop(photo: Image.Image, size: int, rng: np.random.Generator) -> Image.Image:
    """Cut a random square of at least half the photo's shorter side and scale it to `size`."""
    side = int(min(photo.size) * rng.uniform(0.5, 1.0))
    left, top = (int(rng.integers(0, length - side + 1)) for length in photo.size)
    box = (left, top, left + side, top + side)
    return photo.resize((size, size), Image.Resampling.LANCZOS, box=box)
