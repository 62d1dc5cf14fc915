"""A picture's EXIF: its orientation, and the block that the response keeps.

A response has the source's EXIF block unchanged, makers' notes included, except for two facts that
are no longer true: the orientation, since the picture stands upright, and the thumbnail.
"""

from __future__ import annotations

import re
import struct
from typing import NamedTuple

from PIL import Image

MOST_BYTES = 65_527
"""Most bytes of a block in a JPEG file; a longer one of another file is left out."""
_SIZES = {1: 1, 2: 1, 7: 1, 3: 2, 4: 4, 5: 8, 6: 1, 8: 2, 9: 4, 10: 8, 11: 4, 12: 8, 13: 4, 16: 8}
"""Bytes of one value, by TIFF's type."""
_ORIENTATION, _THUMBNAIL, _THUMBNAIL_BYTES = 0x0112, 0x0201, 0x0202
_HEADS = re.compile(rb"(?:Exif\0\0)+")
_UPRIGHT = (_ORIENTATION, 3, 1, 1, 0)


class _Directory(NamedTuple):
    """One directory of a block."""

    entries: range
    """Offsets of the entries."""
    next: int
    """Offset of the pointer to the next directory."""


def _order(tiff: bytes) -> str | None:
    """Return the byte order as a prefix of `struct`; None: it is no TIFF."""
    order = {b"II": "<", b"MM": ">"}.get(tiff[:2])
    return order if tiff[2:4] in (b"*\0", b"\0*") and len(tiff) >= 8 else None


def _directory(tiff: bytes, order: str, pointer: int) -> _Directory | None:
    """The directory whose place stands at `pointer`; None: there is none."""
    if pointer + 4 > len(tiff):
        return None
    (at,) = struct.unpack_from(order + "I", tiff, pointer)
    if at == 0 or at + 2 > len(tiff):
        return None
    (count,) = struct.unpack_from(order + "H", tiff, at)
    end = at + 2 + 12 * count
    return _Directory(range(at + 2, min(end, len(tiff) - 11), 12), end)


def tiff_of(exif: bytes) -> bytes:
    """The block without what some writers put before it."""
    heads = _HEADS.match(exif)
    return exif[heads.end() :] if heads else exif


def read_orientation(tiff: bytes) -> int | None:
    """The orientation tag of the first directory of an EXIF block; None if it has none that can be
    read, 0 if that is nonsense.

    Pillow reads the value, whatever its type. It is shown this one entry alone: of a directory it
    would copy what each of up to 65,535 entries points to.
    """
    order = _order(tiff)
    directory = _directory(tiff, order, 4) if order else None
    if order is None or directory is None:
        return None
    orientation_ifd = value = b""
    for entry in directory.entries:
        if struct.unpack_from(order + "H", tiff, entry) != (_ORIENTATION,):
            continue
        kind, many, place = struct.unpack_from(order + "HII", tiff, entry + 2)
        size = _SIZES.get(kind, 0)
        begin = place if many * size > 4 else entry + 8
        if many and size > 0 and begin + many * size <= len(tiff):
            value = tiff[begin : begin + size]  # the last one counts
            orientation_ifd = struct.pack(order + "IHHHI", 8, 1, _ORIENTATION, kind, 1)
    if not orientation_ifd:
        return None
    if len(value) <= 4:
        orientation_ifd += value.ljust(4, b"\0")
    else:
        orientation_ifd += struct.pack(order + "I", 26)
    exif = Image.Exif()
    try:
        exif.load(tiff[:4] + orientation_ifd + bytes(4) + value)
        turned = exif.get(_ORIENTATION, 0)
        return next((code for code in range(1, 9) if code == turned), 0)
    except (OSError, SyntaxError, ValueError, TypeError, struct.error, ZeroDivisionError):
        return 0


def upright(tiff: bytes) -> bytes:
    """The block as the answer has it; empty: it cannot be read, or is too long."""
    order = _order(tiff) if len(tiff) <= MOST_BYTES else None
    first = _directory(tiff, order, 4) if order else None
    if order is None or first is None:
        return b""
    output = bytearray(tiff)
    for entry in first.entries:
        if struct.unpack_from(order + "H", output, entry) == (_ORIENTATION,):
            struct.pack_into(order + "HHIHH", output, entry, *_UPRIGHT)
    second = _directory(tiff, order, first.next)
    if second is not None:
        thumbnail_tags = {
            tag: value
            for tag, _, _, value in (
                struct.unpack_from(order + "HHII", tiff, entry) for entry in second.entries
            )
        }
        begin = thumbnail_tags.get(_THUMBNAIL, 0)
        end = min(len(output), begin + thumbnail_tags.get(_THUMBNAIL_BYTES, 0))
        if begin > 0:
            output[begin:end] = bytes(max(0, end - begin))
        output[first.next : first.next + 4] = bytes(4)
    return bytes(output)
