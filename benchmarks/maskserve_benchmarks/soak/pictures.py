"""Drawn pictures with rectangular masks for soaks, the same for the same seed."""

from __future__ import annotations

import io
import random
import struct
import threading
import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

Pixels = npt.NDArray[np.uint8]
Box = tuple[int, int, int, int]
"""Left, top, right, bottom; right and bottom are exclusive."""


@dataclass(frozen=True, slots=True)
class Picture:
    """A source with a mask, encoded once."""

    pixels: Pixels
    """RGB [H, W, 3]."""
    box: Box
    """The box that the mask edits."""
    image: bytes
    mask: bytes

    def differs_outside(self, answer: Pixels, reach: int = 0) -> int:
        """Count the pixels of `answer` that differ from the source, farther than `reach` from the
        mask.
        """
        left, top, right, bottom = self.box
        changed = (answer != self.pixels).any(axis=2)
        changed[max(0, top - reach) : bottom + reach, max(0, left - reach) : right + reach] = False
        return int(changed.sum())


def draw(seed: int, height: int, width: int, cover: float = 0.3) -> Picture:
    """Draw a picture of `height` x `width` pixels; its mask covers about the share `cover`."""
    rng = np.random.default_rng(seed)
    rows, columns = np.mgrid[:height, :width]
    slopes = rng.integers(-5, 6, (3, 2))
    ramps = np.stack([a * rows + b * columns for a, b in slopes], axis=2)
    noise = rng.integers(0, 24, (height, width, 1))
    pixels = ((ramps + noise + rng.integers(0, 256, 3)) % 256).astype(np.uint8)
    box_h, box_w = (max(1, round(side * cover**0.5)) for side in (height, width))
    top = int(rng.integers(0, height - box_h + 1))
    left = int(rng.integers(0, width - box_w + 1))
    mask = np.zeros((height, width), np.uint8)
    mask[top : top + box_h, left : left + box_w] = 255
    box = (left, top, left + box_w, top + box_h)
    return Picture(pixels, box, encode(pixels), encode(mask))


class Album:
    """The pictures of a run: a few that all visitors edit, many that share a small cache, and new
    ones.

    Args:
        seed: seed of all draws.
        native: side in pixels of the model's native square.
        warm: templates in the pool that does not fit the cache.
    """

    def __init__(self, seed: int, native: int, warm: int) -> None:
        self.native = native
        self._seed = 1_000_003 * (seed + 1)
        self._lock = threading.Lock()
        self._fresh = 0
        self._warm = warm
        rng = random.Random(seed)
        self.hot = [self._draw(i, rng) for i in range(8)]
        # The sizes are fixed. Libraries keep something for every size that they have seen, up to a
        # limit. With ever new sizes this growth would last for hours.
        sides = (1, 3, *(rng.randint(4, 2 * native) for _ in range(10)))
        self._odd = [(rng.choice(sides), rng.choice(sides)) for _ in range(24)]
        self.largest = draw(self._seed, 2 * native, 2 * native)

    def warm(self, rng: random.Random) -> Picture:
        """Return a picture of the pool; it is drawn anew each time and not kept."""
        number = rng.randrange(self._warm)
        return self._draw(100 + number, random.Random(number))

    def fresh(self, rng: random.Random) -> Picture:
        """Return a picture that nobody has edited."""
        with self._lock:
            self._fresh += 1
            return self._draw(10_000 + self._fresh, rng)

    def odd(self, rng: random.Random) -> Picture:
        """Return a new picture of one of two dozen unusual sizes, from a single pixel on."""
        height, width = rng.choice(self._odd)
        with self._lock:
            self._fresh += 1
            return draw(self._seed + 10_000 + self._fresh, height, width, rng.uniform(0.05, 1.0))

    def _draw(self, number: int, rng: random.Random) -> Picture:
        half = self.native // 2
        height, width = (half * rng.choice((2, 2, 3, 4)) for _ in "hw")
        return draw(self._seed + number, height, width, rng.uniform(0.05, 0.6))


def encode(pixels: Any) -> bytes:
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "PNG", compress_level=1)
    return out.getvalue()


def png_chunk(name: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))


def png_file(
    width: int,
    height: int,
    depth: int,
    colour: int,
    rows: bytes,
    before: tuple[tuple[bytes, bytes], ...] = (),
) -> bytes:
    """Encode a PNG by hand. `rows` are unfiltered, and each row follows its filter byte 0."""
    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    chunks = [(b"IHDR", header), *before, (b"IDAT", zlib.compress(rows)), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(png_chunk(*chunk) for chunk in chunks)
