"""ICC profiles for tests, written by hand: version 2, as scanners and presses have them."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from itertools import product

import numpy as np

_SRGB = ((0.64, 0.33), (0.30, 0.60), (0.15, 0.06))
_D65 = (0.3127, 0.3290)
_D50 = np.array([0.9642, 1.0, 0.8249])
_BRADFORD = np.array(
    [[0.8951, 0.2664, -0.1614], [-0.7502, 1.7135, 0.0367], [0.0389, -0.0685, 1.0296]]
)


def rgb_profile(
    primaries: Sequence[tuple[float, float]] | None = None, gamma: float | None = 2.2
) -> bytes:
    """A display of three primaries (None: sRGB's) round D65 and one curve (None: sRGB's)."""
    xyz = [np.array([x / y, 1, (1 - x - y) / y]) for x, y in (*(primaries or _SRGB), _D65)]
    scaled = np.stack(xyz[:3], 1) * np.linalg.solve(np.stack(xyz[:3], 1), xyz[3])
    cones = np.diag((_BRADFORD @ _D50) / (_BRADFORD @ xyz[3]))
    columns = np.linalg.inv(_BRADFORD) @ cones @ _BRADFORD @ scaled
    curve = _curve(gamma)
    return _profile(
        b"mntr",
        b"RGB ",
        b"XYZ ",
        {
            **{name: _xyz(columns[:, i]) for i, name in enumerate((b"rXYZ", b"gXYZ", b"bXYZ"))},
            **dict.fromkeys((b"rTRC", b"gTRC", b"bTRC"), curve),
        },
    )


def grey_profile(gamma: float) -> bytes:
    return _profile(b"mntr", b"GRAY", b"XYZ ", {b"kTRC": _curve(gamma)})


def one_way_profile() -> bytes:
    """A scanner's profile: RGB → Lab by a table, and no way back."""
    grid = np.linspace(0, 1, 3)
    table = [
        (int(65280 * (r + g + b) / 3), int(32768 + 9000 * (r - g)), int(32768 + 9000 * (g - b)))
        for r, g, b in product(grid, grid, grid)
    ]
    return _profile(b"scnr", b"RGB ", b"Lab ", {b"A2B0": _table(3, 3, table)})


def cmyk_profile() -> bytes:
    """A press profile: CMYK → Lab by a table, with inks that are duller than a screen's colours."""
    table = []
    for c, m, y, k in product((0.0, 1.0), repeat=4):
        light = (1 - 0.45 * c) * (1 - 0.5 * m) * (1 - 0.1 * y) * (1 - 0.85 * k)
        count = 1 - 0.9 * k
        a, b = count * (60 * m - 35 * c) * 0.8, count * (80 * y - 45 * c - 5 * m) * 0.8
        table.append((int(65280 * light), int(32768 + 256 * a), int(32768 + 256 * b)))
    return _profile(b"prtr", b"CMYK", b"Lab ", {b"A2B0": _table(4, 2, table)})


def _table(channels: int, points: int, entries: Sequence[tuple[int, int, int]]) -> bytes:
    """A lut16Type tag with straight curves round a grid."""
    straight = struct.pack(">HH", 0, 65535)
    head = b"mft2\0\0\0\0" + bytes([channels, 3, points, 0])
    head += b"".join(_fixed(v) for v in np.eye(3).flat) + struct.pack(">HH", 2, 2)
    grid = b"".join(
        struct.pack(">HHH", *(min(max(v, 0), 65535) for v in entry)) for entry in entries
    )
    return head + straight * channels + grid + straight * 3


def _curve(gamma: float | None) -> bytes:
    if gamma is not None:
        return b"curv\0\0\0\0" + struct.pack(">IH", 1, round(gamma * 256)) + b"\0\0"
    x = np.linspace(0, 1, 1024)
    y = np.where(x <= 0.04045, x / 12.92, ((x + 0.055) / 1.055) ** 2.4)
    values = np.round(y * 65535).astype(">u2").tobytes()
    return b"curv\0\0\0\0" + struct.pack(">I", 1024) + values


def _profile(kind: bytes, space: bytes, pcs: bytes, tags: dict[bytes, bytes]) -> bytes:
    tags = {
        b"desc": b"desc\0\0\0\0" + struct.pack(">I", 2) + b"x\0" + bytes(79),
        b"cprt": b"text\0\0\0\0none\0\0\0\0",
        b"wtpt": _xyz(_D50),
        **tags,
    }
    at, table, body = 132 + 12 * len(tags), b"", b""
    for name, data in tags.items():
        table += name + struct.pack(">II", at + len(body), len(data))
        body += data + bytes(-len(data) % 4)
    head = struct.pack(">I", at + len(body)) + b"none" + struct.pack(">I", 0x02400000)
    head += kind + space + pcs + bytes(12) + b"acsp" + bytes(28)
    head += b"".join(map(_fixed, _D50))
    return head.ljust(128, b"\0") + struct.pack(">I", len(tags)) + table + body


def _xyz(values: Sequence[float] | np.ndarray) -> bytes:
    return b"XYZ \0\0\0\0" + b"".join(map(_fixed, values))


def _fixed(value: float) -> bytes:
    return struct.pack(">i", round(float(value) * 65536))
