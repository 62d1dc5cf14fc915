"""A PNG writer for answers that someone waits for.

Pillow tries five filters on each row; here every row is stored as the difference to the row above
and deflated by run lengths and Huffman codes alone. On a photograph of 256x256 pixels that took
1.7 ms where Pillow's fastest level took 4.4 ms, for 119,130 bytes in place of 118,318
(`python scripts/bench codec` at d4e1388, 2-core AMD EPYC (Zen 5), 2026-11-20).
"""

from __future__ import annotations

import struct
import zlib

import numpy as np
import numpy.typing as npt

_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_UP = 2
_GREY, _RGB = 0, 2


def encode_png(pixels: npt.NDArray[np.uint8]) -> bytes:
    """A whole 8-bit PNG file.

    Args:
        pixels: uint8, RGB [H, W, 3] or grey [H, W].
    """
    height, width = pixels.shape[:2]
    flat = pixels.reshape(height, -1)
    rows = np.empty((height, flat.shape[1] + 1), np.uint8)
    rows[:, 0] = _UP
    rows[0, 1:] = flat[0]
    np.subtract(flat[1:], flat[:-1], out=rows[1:, 1:])  # modulo 256, as PNG wants it
    deflate = zlib.compressobj(1, zlib.DEFLATED, 15, 9, zlib.Z_RLE)
    data = deflate.compress(rows.data) + deflate.flush()
    colour = _GREY if pixels.ndim == 2 else _RGB
    header = struct.pack(">IIBBBBB", width, height, 8, colour, 0, 0, 0)
    return _SIGNATURE + _chunk(b"IHDR", header) + _chunk(b"IDAT", data) + _chunk(b"IEND", b"")


def _chunk(name: bytes, body: bytes) -> bytes:
    checksum = zlib.crc32(body, zlib.crc32(name))
    return struct.pack(">I", len(body)) + name + body + struct.pack(">I", checksum)
