"""Encoded pictures that no ordinary program writes: PNGs by hand, JPEGs and WebPs in parts."""

from __future__ import annotations

import struct
import zlib
from typing import Any

import numpy as np
import numpy.typing as npt

from maskserve_benchmarks.soak.pictures import png_chunk

SIGNATURE = b"\x89PNG\r\n\x1a\n"
GREY, RGB, PALETTE, GREY_ALPHA, RGBA = 0, 2, 3, 4, 6
_CHANNELS = {GREY: 1, RGB: 3, PALETTE: 1, GREY_ALPHA: 2, RGBA: 4}
# Adam7: (first row, first column, rows apart, columns apart) of each pass.
_PASSES = (
    (0, 0, 8, 8),
    (0, 4, 8, 8),
    (4, 0, 8, 4),
    (0, 2, 4, 4),
    (2, 0, 4, 2),
    (0, 1, 2, 2),
    (1, 0, 2, 1),
)

Chunks = tuple[tuple[bytes, bytes], ...]


def header(
    width: int, height: int, depth: int = 8, colour: int = RGB, *rest: int
) -> tuple[bytes, bytes]:
    """The IHDR chunk; `rest` is compression, filter and interlace."""
    return b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour, *(rest or (0, 0, 0)))


def png_of(*chunks: tuple[bytes, bytes]) -> bytes:
    """A PNG of these chunks and nothing else."""
    return SIGNATURE + b"".join(png_chunk(*chunk) for chunk in chunks)


def chunks_of(png: bytes) -> list[tuple[bytes, bytes]]:
    """The chunks of a whole PNG."""
    chunks, at = [], 8
    while at < len(png):
        length = int.from_bytes(png[at : at + 4], "big")
        chunks.append((png[at + 4 : at + 8], png[at + 8 : at + 8 + length]))
        at += 12 + length
    return chunks


def png(
    samples: npt.NDArray[Any],
    colour: int,
    depth: int = 8,
    *,
    interlaced: bool = False,
    before: Chunks = (),
    pieces: int = 1,
) -> bytes:
    """A PNG of raw samples [H, W] or [H, W, channels], without filters.

    Args:
        samples: integers of `depth` bits.
        colour: PNG's colour type.
        depth: bits per sample.
        interlaced: write the seven passes of Adam7.
        before: chunks between IHDR and the pixels.
        pieces: IDAT chunks that the pixels are spread over.
    """
    height, width = samples.shape[:2]
    grid = samples.reshape(height, width, _CHANNELS[colour])
    parts = [grid]
    if interlaced:
        parts = [grid[y::dy, x::dx] for y, x, dy, dx in _PASSES]
    raw = b"".join(b"\0" + _packed(row, depth) for part in parts if part.size for row in part)
    data = zlib.compress(raw)
    length = -(-len(data) // pieces)
    return png_of(
        header(width, height, depth, colour, 0, 0, int(interlaced)),
        *before,
        *((b"IDAT", data[i : i + length]) for i in range(0, len(data), length)),
        (b"IEND", b""),
    )


def _packed(row: npt.NDArray[Any], depth: int) -> bytes:
    flat = row.reshape(-1)
    if depth == 16:
        return flat.astype(">u2").tobytes()
    if depth == 8:
        return flat.astype(np.uint8).tobytes()
    bits = (flat[:, None] >> np.arange(depth - 1, -1, -1)) & 1
    return np.packbits(bits.astype(np.uint8).reshape(-1)).tobytes()


def segment(marker: int, body: bytes) -> bytes:
    """One JPEG segment."""
    return bytes([0xFF, marker]) + struct.pack(">H", len(body) + 2) + body


def webp_chunk(name: bytes, body: bytes) -> bytes:
    return name + struct.pack("<I", len(body)) + body + b"\0" * (len(body) % 2)


def webp_of(*chunks: bytes) -> bytes:
    """A WebP of these chunks and nothing else."""
    body = b"WEBP" + b"".join(chunks)
    return b"RIFF" + struct.pack("<I", len(body)) + body


def webp_canvas(width: int, height: int, flags: int = 0x10) -> bytes:
    """The VP8X chunk, which states the size of an extended WebP."""
    extent = (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    return webp_chunk(b"VP8X", bytes([flags, 0, 0, 0]) + extent)
