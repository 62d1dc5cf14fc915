"""Requests that are cheap to send and would be expensive to process."""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Callable, Iterator

from maskserve_benchmarks.soak.pictures import png_file
from tests.fakes.corpus.case import Case, Refused
from tests.fakes.corpus.encoding import (
    GREY,
    PALETTE,
    RGB,
    RGBA,
    header,
    png_of,
    segment,
    webp_canvas,
    webp_chunk,
    webp_of,
)
from tests.fakes.hostile import SIZE, good_inputs
from tests.fakes.pictures import encode, scene

MEGABYTE = 2**20
# (width, height), each beyond the default limit of sides or pixels.
HUGE = ((60_000, 60_000), (16_385, 1), (1, 16_385), (16_000, 4_000), (2**31 - 1, 2**31 - 1))


def bomb_cases() -> Iterator[Case]:
    """Bombs as IMAGE and as MASK. They assume the default limits."""
    for name, make in _bombs().items():
        for field in ("IMAGE", "MASK"):
            yield _case(f"{name} as {field}", field, make)


def _case(name: str, field: str, make: Callable[[], bytes]) -> Case:
    return Case("bomb", name, lambda: {**good_inputs(), field: make()}, Refused(field))


def _bombs() -> dict[str, Callable[[], bytes]]:
    bombs: dict[str, Callable[[], bytes]] = {}
    for width, height in HUGE:
        size = f"{width}x{height}"
        for depth, colour in ((8, RGB), (1, GREY), (16, RGBA), (1, PALETTE)):
            bombs[f"PNG of {size}, {depth}-bit colour type {colour}"] = (
                lambda w=width, h=height, d=depth, c=colour: png_file(w, h, d, c, bytes(5000))
            )
        if max(width, height) < 65_536:
            bombs[f"JPEG of {size}"] = lambda w=width, h=height: _jpeg_of(w, h)
        if max(width, height) < 2**24:
            bombs[f"WebP canvas of {size}"] = lambda w=width, h=height: webp_of(
                webp_canvas(w, h), webp_chunk(b"ALPH", bytes(30))
            )
    bombs |= {
        "WebP of 16383x16383 in one frame": lambda: webp_of(
            webp_chunk(b"VP8L", b"\x2f" + struct.pack("<I", 16_382 | 16_382 << 14) + bytes(90))
        ),
        "interlaced PNG of 60000x60000": lambda: png_of(
            header(60_000, 60_000, 8, RGBA, 0, 0, 1),
            (b"IDAT", zlib.compress(bytes(MEGABYTE))),
            (b"IEND", b""),
        ),
        # Within the limits, but with another size than the other picture.
        "PNG of 7000x7000 that is cut short": lambda: png_file(7000, 7000, 8, RGB, bytes(5000)),
        "JPEG of 100,000 segments": lambda: (
            b"\xff\xd8" + segment(0xFE, b"") * 100_000 + b"\xff\xd9\0\0"
        ),
        "JPEG of fill bytes": lambda: b"\xff\xd8" + b"\xff" * (4 * MEGABYTE),
        "JPEG of 1000 empty scans": _many_scans,
        "WebP of 200,000 chunks": lambda: webp_of(
            webp_canvas(9, 9, 0x08), webp_chunk(b"ABCD", b"") * 200_000
        ),
        "base64 with a blank after each letter": lambda: b"A " * (4 * MEGABYTE),
        "base64 of blanks": lambda: b"A" + b" " * (8 * MEGABYTE) + b"A",
        "base64 of padding": lambda: b"=" * (8 * MEGABYTE),
        "data: URI of a long head": lambda: b"data:" + b"a" * (8 * MEGABYTE) + b";base64,AAAA",
        "base64 of zeros": lambda: base64.b64encode(bytes(4 * MEGABYTE)),
        "zeros": lambda: bytes(4 * MEGABYTE),
    }
    return bombs


def _jpeg_of(width: int, height: int) -> bytes:
    whole = encode(scene(*SIZE), "JPEG")
    at = whole.index(b"\xff\xc0") + 5
    return whole[:at] + struct.pack(">HH", height, width) + whole[at + 4 :]


def _many_scans() -> bytes:
    whole = encode(scene(*SIZE), "JPEG", progressive=True)
    at = whole.index(b"\xff\xda")
    return whole[:at] + segment(0xDA, b"\1\1\0\0\0\0") * 1000 + whole[at:]
