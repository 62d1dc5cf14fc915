"""Encoded pictures for tests: ordinary ones, and odd ones that must also work."""

from __future__ import annotations

import io
import warnings
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageOps

from maskserve_benchmarks.soak.pictures import png_file

Bytes3D = npt.NDArray[np.uint8]


def scene(height: int, width: int, seed: int = 0) -> Bytes3D:
    """RGB [H, W, 3]: smooth ramps with noise, so that all rows and columns differ."""
    rng = np.random.default_rng(seed)
    rows, columns = np.mgrid[:height, :width]
    ramps = np.stack([rows * 3 + columns, rows + columns * 5, rows * 2 - columns], axis=2)
    noise: Bytes3D = ((ramps + rng.integers(0, 40, ramps.shape)) % 256).astype(np.uint8)
    return noise


def encode(image: Image.Image | npt.NDArray[Any], kind: str = "PNG", **options: Any) -> bytes:
    picture = image if isinstance(image, Image.Image) else Image.fromarray(image)
    out = io.BytesIO()
    picture.save(out, kind, **options)
    return out.getvalue()


def blob_mask(height: int, width: int, value: int = 255) -> npt.NDArray[np.uint8]:
    """Luminance [H, W]: a rectangle in the middle, at least one pixel."""
    mask = np.zeros((height, width), np.uint8)
    mask[height // 3 : height // 3 * 2 + 1, width // 4 : width // 4 * 2 + 1] = value
    return mask


def sixteen_bit_png(samples: npt.NDArray[np.uint16], before: Any = ()) -> bytes:
    """A 16-bit PNG of grey [H, W] or RGB [H, W, 3]."""
    height, width = samples.shape[:2]
    big = samples.astype(">u2").reshape(height, -1)
    rows = b"".join(b"\0" + row.tobytes() for row in big)
    return png_file(width, height, 16, 0 if samples.ndim == 2 else 2, rows, before)


@dataclass(frozen=True)
class OddImage:
    """A picture that must decode to exactly `pixels` (RGB [H, W, 3])."""

    name: str
    encoded: bytes
    pixels: Bytes3D


def odd_images(height: int = 45, width: int = 61) -> Iterator[OddImage]:
    """Every kind of source that must work. The expected pixels of lossy ones are Pillow's."""
    rgb = scene(height, width)
    picture = Image.fromarray(rgb)
    grey = np.asarray(picture.convert("L"))
    ramp = np.tile(np.linspace(0, 255, width).astype(np.uint8), (height, 1))

    yield OddImage("rgb", encode(rgb), rgb)
    yield OddImage("webp-lossless", encode(rgb, "WEBP", lossless=True), rgb)
    yield OddImage("grey", encode(grey), grey_pixels(grey))
    yield OddImage("grey-alpha", encode(Image.merge("LA", [_l(grey), _l(ramp)])), grey_pixels(grey))
    rgba = Image.merge("RGBA", [*picture.split(), _l(ramp)])
    yield OddImage("rgba", encode(rgba), rgb)
    yield OddImage("rgba-webp", encode(rgba, "WEBP", lossless=True, exact=True), rgb)
    bits = Image.fromarray(grey > 100)
    yield OddImage("one-bit", encode(bits), np.asarray(bits.convert("RGB")))

    palette = picture.quantize(64)
    looked_up = np.asarray(palette.convert("RGB"))
    yield OddImage("palette", encode(palette), looked_up)
    yield OddImage("palette-transparency", encode(palette, transparency=3), looked_up)
    several = encode(palette, transparency=bytes(range(0, 256, 4)))
    yield OddImage("palette-several-transparent", several, looked_up)
    few = picture.quantize(4)
    yield OddImage("palette-two-bits", encode(few, bits=2), np.asarray(few.convert("RGB")))

    deep = grey.astype(np.uint16) * 257 - (grey > 0)
    yield OddImage("grey-16", sixteen_bit_png(deep), grey_pixels((deep >> 8).astype(np.uint8)))
    deep_rgb = rgb.astype(np.uint16) * 256 + 77
    yield OddImage("rgb-16", sixteen_bit_png(deep_rgb), rgb)

    for name, mode, options in (
        ("jpeg", "RGB", {"quality": 90}),
        ("jpeg-grey", "L", {}),
        ("jpeg-progressive", "RGB", {"progressive": True}),
        ("jpeg-cmyk", "CMYK", {"quality": 90}),
    ):
        data = encode(picture.convert(mode), "JPEG", **options)
        yield OddImage(name, data, np.asarray(Image.open(io.BytesIO(data)).convert("RGB")))
    lossy = encode(picture, "WEBP", quality=80)
    yield OddImage("webp-lossy", lossy, np.asarray(Image.open(io.BytesIO(lossy)).convert("RGB")))

    for orientation in range(2, 9):
        exif = Image.Exif()
        exif[0x0112] = orientation
        turned = _UNDO[orientation](rgb)
        yield OddImage(f"exif-{orientation}-png", encode(turned, exif=exif), rgb)
        data = encode(turned, "WEBP", lossless=True, exif=exif.tobytes())
        yield OddImage(f"exif-{orientation}-webp", data, rgb)
        data = encode(turned, "JPEG", exif=exif)
        stored = np.asarray(Image.open(io.BytesIO(data)))
        yield OddImage(f"exif-{orientation}-jpeg", data, _APPLY[orientation](stored))

    frames = [picture, Image.fromarray(rgb[::-1].copy())]
    still = [("animated-png", "PNG", {}), ("animated-webp", "WEBP", {"lossless": True})]
    for name, kind, options in still:
        data = encode(picture, kind, save_all=True, append_images=frames[1:], **options)
        yield OddImage(name, data, rgb)
    raw = b"".join(b"\0" + row.tobytes() for row in rgb)
    text = (b"zTXt", b"Comment\0\0" + zlib.compress(bytes(20_000_000)))
    hostile = (
        text,
        (b"iCCP", b"x\0\0" + zlib.compress(bytes(20_000_000))),
        (b"eXIf", b"II*\0junk"),
    )
    yield OddImage("metadata-bombs", png_file(width, height, 8, 2, raw, hostile), rgb)


def as_pillow_reads(encoded: bytes) -> Bytes3D:
    """RGB [H, W, 3] of any picture, read by Pillow alone. It is turned by its EXIF tag; 16-bit grey
    keeps the high byte.
    """
    with warnings.catch_warnings(), Image.open(io.BytesIO(encoded)) as opened:
        warnings.simplefilter("ignore")  # about damaged metadata
        turned = ImageOps.exif_transpose(opened)
        if turned.mode.startswith("I"):
            turned = Image.fromarray((np.asarray(turned).astype(np.uint32) >> 8).astype(np.uint8))
        return np.asarray(turned.convert("RGB"))


def _l(grey: npt.NDArray[np.uint8]) -> Image.Image:
    return Image.fromarray(grey)


def grey_pixels(grey: npt.NDArray[np.uint8]) -> Bytes3D:
    """RGB [H, W, 3] from luminance [H, W]."""
    return np.repeat(grey[:, :, None], 3, axis=2)


# The turns of an orientation tag, written independently of the code under test.
_APPLY: dict[int, Any] = {
    1: lambda a: a,
    2: lambda a: a[:, ::-1],
    3: lambda a: a[::-1, ::-1],
    4: lambda a: a[::-1],
    5: lambda a: a.transpose(1, 0, 2),
    6: lambda a: np.rot90(a, -1),
    7: lambda a: a[::-1, ::-1].transpose(1, 0, 2),
    8: lambda a: np.rot90(a, 1),
}
_UNDO: dict[int, Any] = {
    **{k: (lambda a, f=f: np.ascontiguousarray(f(a))) for k, f in _APPLY.items()},
    6: lambda a: np.ascontiguousarray(np.rot90(a, 1)),
    8: lambda a: np.ascontiguousarray(np.rot90(a, -1)),
}
