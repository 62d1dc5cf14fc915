"""Colour profiles of pictures: kept in the response, or converted to sRGB.

    source numbers ─────────────────────────► the answer's numbers outside the mask, tagged alike
          │ shown                        ▲ painted
          ▼                              │
      sRGB, which models know ─► model ──┘

The model gets sRGB, and its output is converted to the source's colour space before it is pasted.
So no number outside the mask changes, and the picture looks as the model meant it. Grey and CMYK
pictures with a profile are converted to sRGB when they are decoded, since the response is RGB; so
are RGB pictures with a profile that converts in one direction only.

A PNG states the meaning of its numbers in chunks (cICP goes before iCCP, iCCP before sRGB, sRGB
before gAMA and cHRM). A PNG response has the same chunks; JPEG and WebP get them as a profile.
"""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

import numpy as np
from PIL import Image, ImageCms

PROFILE = b"iCCP"
"""Among the `Words` of any file: the ICC profile, inflated."""
CHUNKS = {b"cICP": 4, b"mDCV": 24, b"cLLI": 8, PROFILE: 0, b"sRGB": 1, b"gAMA": 4, b"cHRM": 32}
"""Chunks of a PNG that say what its numbers mean, and the length of each; 0: any."""
MOST_PROFILE_BYTES = 4 * 2**20
"""Real profiles have up to 2 MiB if they contain a table."""
Words = Mapping[bytes, bytes]
"""Colour information of a file: chunk name → body, each once."""

_SPACES = {"1": b"GRAY", "L": b"GRAY", "LA": b"GRAY", "I": b"GRAY", "CMYK": b"CMYK"}
"""ICC's name of the space of a picture, by the beginning of its mode; all others are RGB."""


@dataclass(frozen=True, slots=True)
class Colour:
    """Colour space of RGB pixels; sRGB where every field is empty."""

    profile: bytes = b""
    """ICC profile: the file's own, or what its chunks say; empty: sRGB, or none can say it."""
    chunks: bytes = b""
    """Chunks of a PNG that state the colour space, whole."""
    only_png: bool = False
    """Whether only the chunks can state it: HDR, for whose curves there is no profile."""

    @property
    def identity(self) -> bytes:
        """Bytes that distinguish pictures of equal numbers; empty for sRGB."""
        return self.chunks if self.only_png else self.profile

    def in_png(self) -> bytes:
        """Chunks for a PNG, between IHDR and its pixels."""
        if self.chunks or not self.profile:
            return self.chunks
        return chunk(PROFILE, b"ICC profile\0\0" + zlib.compress(self.profile))

    def to_display(self, image: Image.Image) -> Image.Image:
        """An RGB image of these colours, in sRGB."""
        ways = _transforms(self.profile) if self.profile else None
        return image if ways is None else _applied(image, ways[0])

    def painted(self, image: Image.Image) -> Image.Image:
        """An RGB image in sRGB, in these colours."""
        ways = _transforms(self.profile) if self.profile else None
        return image if ways is None else _applied(image, ways[1])

    def pack(self) -> bytes:
        """For a tensor; nothing for sRGB."""
        if self == SRGB:
            return b""
        return struct.pack(">?I", self.only_png, len(self.profile)) + self.profile + self.chunks

    @classmethod
    def unpack(cls, packed: bytes) -> Colour:
        if not packed:
            return SRGB
        only_png, length = struct.unpack_from(">?I", packed)
        return cls(packed[5 : 5 + length], packed[5 + length :], only_png)


SRGB = Colour()


def pillow_words(image: Image.Image) -> dict[bytes, bytes]:
    """Return the colour information that Pillow has read from an image's file."""
    words: dict[bytes, bytes] = {}
    if profile := image.info.get("icc_profile"):
        words[PROFILE] = profile
    elif "srgb" in image.info:
        words[b"sRGB"] = bytes([image.info["srgb"]])
    if "gamma" in image.info:
        words[b"gAMA"] = struct.pack(">I", round(image.info["gamma"] * 100_000))
    if "chromaticity" in image.info:
        coordinates = (round(value * 100_000) for value in image.info["chromaticity"])
        words[b"cHRM"] = struct.pack(">8I", *coordinates)
    return words


def chunk(name: bytes, body: bytes) -> bytes:
    """A chunk of a PNG."""
    checksum = zlib.crc32(body, zlib.crc32(name))
    return struct.pack(">I", len(body)) + name + body + struct.pack(">I", checksum)


def find_colour(image: Image.Image, words: Words) -> tuple[Image.Image, Colour, str]:
    """Find the colour space of a decoded image.

    Args:
        image: the decoded image, of any mode.
        words: colour information of its file.

    Returns:
        The image, converted to sRGB where its profile cannot stay; its colour; and a warning
        if its profile is left out.
    """
    profile, warning = words.get(PROFILE, b""), ""
    if profile:
        try:
            if not _stays(profile, image.mode):
                return _converted(image, profile), SRGB, ""
        except (ImageCms.PyCMSError, OSError):
            warning, profile = "its colour profile cannot be used, and is left out", b""
    without = b"sRGB" if profile else PROFILE  # a file may have one of them
    words = {name: body for name, body in words.items() if name != without}
    derived_profile = _coded(words[b"cICP"]) if b"cICP" in words else None
    if b"cICP" in words and derived_profile is None and not profile:
        return image, Colour(b"", _chunks(words), only_png=True), warning
    if derived_profile is None and not profile and b"sRGB" not in words:
        derived_profile = _gamma_profile(words)
    return (
        image,
        Colour(profile if derived_profile is None else derived_profile, _chunks(words)),
        warning,
    )


def _chunks(words: Words) -> bytes:
    """Return a PNG's chunks, in the order that its readers require."""
    if not any(name in words for name in CHUNKS if name != PROFILE):
        return b""  # a profile alone is written as that of any file
    bodies = dict(words)
    if PROFILE in bodies:
        bodies[PROFILE] = b"ICC profile\0\0" + zlib.compress(bodies[PROFILE])
    return b"".join(chunk(name, bodies[name]) for name in CHUNKS if name in bodies)


def _stays(profile: bytes, mode: str) -> bool:
    """Whether the answer can have the profile of a picture of this mode: RGB, and it can be
    painted in.

    Raises:
        PyCMSError, OSError: it is broken, or of other pictures.
    """
    mode_space = next(
        (space for begin, space in _SPACES.items() if mode.startswith(begin)), b"RGB "
    )
    profile_space = profile[16:20]
    if profile_space != b"RGB " or mode_space == b"CMYK":
        if profile_space != mode_space:
            raise ImageCms.PyCMSError("it is of another space")
        return False
    try:
        _transforms(profile)
    except (ImageCms.PyCMSError, OSError):
        return False
    return True


def _converted(image: Image.Image, profile: bytes) -> Image.Image:
    """Convert to sRGB. Raises: PyCMSError, OSError: the profile has no transform."""
    mode = {b"GRAY": "L", b"CMYK": "CMYK"}.get(profile[16:20], "RGB")
    alpha = image.getchannel("A") if image.mode in ("LA", "RGBA") else None
    if image.mode.startswith("I"):
        image = Image.fromarray((np.asarray(image).astype(np.uint16) >> 8).astype(np.uint8))
    flat = image if image.mode == mode else image.convert(mode)
    converted = _applied(flat, _transform(profile, mode, to_srgb=True))
    if alpha is not None:
        converted.putalpha(alpha)
    return converted


Transform = ImageCms.ImageCmsTransform


def _transform(profile: bytes, mode: str, *, to_srgb: bool) -> Transform:
    """Build the transform. Raises: PyCMSError, OSError: the profile is broken, or has no
    transform.
    """
    picture_profile = ImageCms.ImageCmsProfile(io.BytesIO(profile))
    srgb = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB"))
    if to_srgb:
        return ImageCms.buildTransform(picture_profile, srgb, mode, "RGB")
    return ImageCms.buildTransform(srgb, picture_profile, "RGB", mode)


@lru_cache(32)
def _transforms(profile: bytes) -> tuple[Transform, Transform] | None:
    """Return the transforms to sRGB and from it; None where both give the same colours but for
    rounding.
    """
    forward = _transform(profile, "RGB", to_srgb=True)
    back = _transform(profile, "RGB", to_srgb=False)
    side = np.linspace(0, 255, 9).astype(np.uint8)
    probes = np.stack(np.meshgrid(side, side, side), -1).reshape(27, 27, 3)
    converted = np.asarray(_applied(Image.fromarray(probes), forward)).astype(int)
    return None if np.abs(converted - probes).max() <= 1 else (forward, back)


def _applied(image: Image.Image, transform: Transform) -> Image.Image:
    converted = ImageCms.applyTransform(image, transform)
    assert converted is not None, "only a transform in place gives nothing"
    converted.info.clear()  # what it holds is in no space of its own any more
    return converted


Chromaticities: TypeAlias = tuple[tuple[float, float], ...]
# ITU-T H.273: chromaticities of red, green, blue and white by the number of the primaries.
_D65, _C = (0.3127, 0.3290), (0.310, 0.316)
_SRGB_PRIMARIES = ((0.64, 0.33), (0.30, 0.60), (0.15, 0.06), _D65)
_PRIMARIES = {
    1: _SRGB_PRIMARIES,
    4: ((0.67, 0.33), (0.21, 0.71), (0.14, 0.08), _C),
    5: ((0.64, 0.33), (0.29, 0.60), (0.15, 0.06), _D65),
    6: ((0.630, 0.340), (0.310, 0.595), (0.155, 0.070), _D65),
    7: ((0.630, 0.340), (0.310, 0.595), (0.155, 0.070), _D65),
    9: ((0.708, 0.292), (0.170, 0.797), (0.131, 0.046), _D65),
    11: ((0.680, 0.320), (0.265, 0.690), (0.150, 0.060), (0.314, 0.351)),
    12: ((0.680, 0.320), (0.265, 0.690), (0.150, 0.060), _D65),
    22: ((0.630, 0.340), (0.295, 0.605), (0.155, 0.077), _D65),
}
# ICC's parametric curves: a gamma, or (g, a, b, c, d): (a x + b)^g from d on, c x below.
_SRGB_CURVE = (2.4, 1 / 1.055, 0.055 / 1.055, 1 / 12.92, 0.04045)
_BT709_CURVE = (1 / 0.45, 1 / 1.099, 0.099 / 1.099, 1 / 4.5, 0.081)
_CURVES: dict[int, tuple[float, ...]] = {
    **dict.fromkeys((1, 6, 14, 15), _BT709_CURVE),
    4: (2.2,),
    5: (2.8,),
    8: (1.0,),
    13: _SRGB_CURVE,
}


def _coded(cicp: bytes) -> bytes | None:
    """Return the profile of cICP code points, empty for sRGB; None where no profile has their
    curve.
    """
    primaries, curve, matrix, full_range = cicp
    if primaries not in _PRIMARIES or curve not in _CURVES or matrix or full_range != 1:
        return None
    if (primaries, curve) == (1, 13):
        return b""
    return _rgb_profile(_PRIMARIES[primaries], _CURVES[curve])


def _gamma_profile(words: Words) -> bytes:
    """Return the profile that gAMA and cHRM describe; empty without one, or where they are
    invalid.
    """
    if b"gAMA" not in words and b"cHRM" not in words:
        return b""
    curve: tuple[float, ...] = _SRGB_CURVE
    primaries: Chromaticities = _SRGB_PRIMARIES
    if b"gAMA" in words:
        (gamma,) = struct.unpack(">I", words[b"gAMA"])
        if not 1_000 <= gamma <= 10_000_000:
            return b""
        curve = (100_000 / gamma,)
    if b"cHRM" in words:
        white, *rgb = np.frombuffer(words[b"cHRM"], ">u4").reshape(4, 2) / 100_000
        primaries = (*((float(x), float(y)) for x, y in rgb), (float(white[0]), float(white[1])))
    try:
        return _rgb_profile(primaries, curve)
    except (ValueError, struct.error, np.linalg.LinAlgError):
        return b""


_D50 = np.array([0.9642, 1.0, 0.8249])
_BRADFORD = np.array(
    [[0.8951, 0.2664, -0.1614], [-0.7502, 1.7135, 0.0367], [0.0389, -0.0685, 1.0296]]
)


def _rgb_profile(primaries: Chromaticities, curve: tuple[float, ...]) -> bytes:
    """A display's ICC profile (version 4) of three primaries and one curve.

    Args:
        primaries: (x, y) of red, green, blue and white.
        curve: see _CURVES.

    Raises:
        ValueError, LinAlgError: there are no such colours.
    """
    if min(y for _, y in primaries) <= 0:
        raise ValueError("a chromaticity without light")
    xyz = np.array([[x / y, 1.0, (1 - x - y) / y] for x, y in primaries])
    white = xyz[3]
    columns = xyz[:3].T * np.linalg.solve(xyz[:3].T, white)
    cone_gains = np.diag((_BRADFORD @ _D50) / (_BRADFORD @ white))
    adapted = np.linalg.inv(_BRADFORD) @ cone_gains @ _BRADFORD
    if not np.isfinite(adapted @ columns).all():
        raise ValueError("a chromaticity without light")
    shaped = b"para\0\0\0\0" + struct.pack(">HH", 0 if len(curve) == 1 else 3, 0)
    shaped += _fixed(*curve)
    tags = [
        (b"desc", _text("RGB")),
        (b"cprt", _text("none")),
        (b"wtpt", b"XYZ \0\0\0\0" + _fixed(*_D50)),
        (b"chad", b"sf32\0\0\0\0" + _fixed(*adapted.flat)),
        *(
            (name, b"XYZ \0\0\0\0" + _fixed(*column))
            for name, column in zip((b"rXYZ", b"gXYZ", b"bXYZ"), (adapted @ columns).T, strict=True)
        ),
        *((name, shaped) for name in (b"rTRC", b"gTRC", b"bTRC")),
    ]
    begin = 128 + 4 + 12 * len(tags)
    table, body = struct.pack(">I", len(tags)), b""
    for name, value in tags:
        table += name + struct.pack(">II", begin + len(body), len(value))
        body += value + bytes(-len(value) % 4)
    head = struct.pack(">I4xI4s4s4s12x4s", begin + len(body), 0x04300000, *_DISPLAY)
    return head.ljust(68, b"\0") + _fixed(*_D50).ljust(60, b"\0") + table + body


_DISPLAY = (b"mntr", b"RGB ", b"XYZ ", b"acsp")


def _text(words: str) -> bytes:
    encoded = words.encode("utf-16-be")
    return (
        b"mluc\0\0\0\0" + struct.pack(">II2s2sII", 1, 12, b"en", b"US", len(encoded), 28) + encoded
    )


def _fixed(*values: float) -> bytes:
    return b"".join(struct.pack(">i", round(float(value) * 65536)) for value in values)
