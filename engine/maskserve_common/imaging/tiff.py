"""A TIFF's first picture, as the decoder is shown it: its own directory with the tags that pixels
need. So nothing else of a stranger's is followed: other pages, thumbnails, makers' notes, tags that
each point to the whole file.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Final, NamedTuple

_KINDS: Final = {1: "B", 3: "H", 4: "I"}
_SIZES: Final = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 1, 7: 1, 8: 2, 9: 4, 10: 8, 11: 4, 12: 8}
_WIDTH, _HEIGHT, _BITS, _COMPRESSION, _PHOTOMETRIC = 256, 257, 258, 259, 262
_ORIENTATION, _SAMPLES, _TILE_WIDTH, _TILE_HEIGHT, _FORMAT = 274, 277, 322, 323, 339
_XMP, _IPTC, _PROFILE = 700, 33_723, 34_675
_NEEDED: Final = frozenset({
    _WIDTH, _HEIGHT, _BITS, _COMPRESSION, _PHOTOMETRIC, 266, 273, _SAMPLES, 278, 279, 284, 292,
    293, 317, 320, _TILE_WIDTH, _TILE_HEIGHT, 324, 325, 332, 338, _FORMAT, 347, 529, 530, 531, 532,
})  # fmt: skip
"""FillOrder, strips, planes, fax options, predictor, palette, tiles, inks, extra samples, JPEG's
tables, YCbCr."""
_READ: Final = {1, 2, 3, 4, 5, 7, 8, 32_773, 32_946}
"""Compressions: none, fax, LZW, JPEG, Deflate, PackBits."""
_TEXTS: Final = {270, 271, 272, 305, 306, 315, 33_432}
"""Description, maker, camera, program, time, artist, copyright: EXIF has the same tags."""
_ACROSS, _DOWN, _UNIT = 282, 283, 296
_PER_INCH: Final = {2: 1.0, 3: 2.54}
_KEPT: Final = {*_TEXTS, _ACROSS, _DOWN, _UNIT}
_ASCII, _RATIONAL = 2, 5
_MOST_DPI = 2**16
_MOST_TAGS = 1024
_LEAST_TILE = 2**22
"""Pixels that a tile may have although its picture is smaller."""
_MOST_SAMPLES = 6


class FirstPage(NamedTuple):
    """The first page's payload for the decoder, and its properties."""

    size: tuple[int, int]
    """(height, width) as stored."""
    payload: bytes
    orientation: int
    profile: bytes
    exif: bytes
    """EXIF block of its texts."""
    xmp: bytes
    iptc: bytes
    dpi: tuple[float, float] | None
    """Pixels per inch, across and down."""
    pages: bool
    """Whether further pages follow."""


class _Directory:
    """The first directory, of the tags that this module reads.

    Args:
        order: byte order, as `struct` writes it.
        entries: 12 bytes of the directory, and the value, by tag. The value is empty if it is
            longer than the tag's bound.
        has_next: whether another directory follows.
    """

    def __init__(
        self, order: str, entries: Mapping[int, tuple[bytes, bytes]], *, has_next: bool
    ) -> None:
        self.order, self.entries, self.has_next = order, entries, has_next
        self.kinds = {
            tag: struct.unpack_from(order + "2xH", entry)[0] for tag, (entry, _) in entries.items()
        }

    def numbers(self, tag: int) -> tuple[int, ...]:
        """Return the integers of a tag; empty: there is none.

        Raises:
            ValueError: they are no integers, or too many.
        """
        if tag not in self.entries:
            return ()
        kind, value = self.kinds[tag], self.value(tag)
        if kind not in _KINDS or not value:
            raise ValueError("a damaged TIFF")
        return struct.unpack(f"{self.order}{len(value) // _SIZES[kind]}{_KINDS[kind]}", value)

    def number(self, tag: int, default: int) -> int:
        return max(self.numbers(tag), default=default)

    def value(self, tag: int) -> bytes:
        return self.entries[tag][1] if tag in self.entries else b""

    def texts(self) -> dict[int, bytes]:
        """Return the texts that are not empty, by tag in order."""
        tags = sorted(_TEXTS & self.entries.keys())
        return {
            tag: value for tag in tags if self.kinds[tag] == _ASCII and (value := self.value(tag))
        }

    def dpi(self) -> tuple[float, float] | None:
        """Return pixels per inch, across and down; None if they are missing or implausible."""
        resolution = self._per_inch(_ACROSS), self._per_inch(_DOWN)
        return resolution if 1 <= min(resolution) <= max(resolution) < _MOST_DPI else None

    def _per_inch(self, tag: int) -> float:
        """Return a resolution; 0: there is none."""
        if self.kinds.get(tag) != _RATIONAL or len(self.value(tag)) != _SIZES[_RATIONAL]:
            return 0.0
        above, below = struct.unpack(self.order + "II", self.value(tag))
        unit = self.numbers(_UNIT) if self.kinds.get(_UNIT) in _KINDS else ()
        return (above / below if below else 0.0) * _PER_INCH.get(max(unit, default=2), 0.0)


def first_page(data: bytes, most_profile: int, most_metadata: int) -> FirstPage:
    """Read the first directory.

    Args:
        data: bytes of the file.
        most_profile: most bytes of a profile that is read.
        most_metadata: most bytes of XMP, of IPTC and of a text that are read.

    Raises:
        ValueError: the file is cut short or damaged, or of an unsupported kind; continues "is ".
    """
    directory = _read_directory(data, most_profile, most_metadata)
    size = _checked_size(directory)
    turned, texts = directory.number(_ORIENTATION, 1), directory.texts()
    return FirstPage(
        size,
        _payload(data, directory),
        turned if 1 <= turned <= 8 else 1,
        directory.value(_PROFILE),
        _exif(data[:4], directory.order, texts) if texts else b"",
        directory.value(_XMP),
        directory.value(_IPTC),
        directory.dpi(),
        directory.has_next,
    )


def _read_directory(data: bytes, most_profile: int, most_metadata: int) -> _Directory:
    order = "<" if data[:2] == b"II" else ">"
    if len(data) < 8:
        raise ValueError("a truncated TIFF")
    (at,) = struct.unpack_from(order + "I", data, 4)
    if at < 8 or at + 2 > len(data):
        raise ValueError("a truncated or damaged TIFF")
    (count,) = struct.unpack_from(order + "H", data, at)
    end = at + 2 + 12 * count
    if count > _MOST_TAGS:
        raise ValueError(f"a TIFF of more than {_MOST_TAGS} tags")
    if end + 4 > len(data):
        raise ValueError("a truncated TIFF")
    most_bytes = {_PROFILE: most_profile, **dict.fromkeys((_XMP, _IPTC, *_TEXTS), most_metadata)}
    entries: dict[int, tuple[bytes, bytes]] = {}
    needed_bytes = 0
    for begin in range(at + 2, end, 12):
        tag, kind, many, place = struct.unpack_from(order + "HHII", data, begin)
        nbytes = _SIZES.get(kind, 0) * many
        if tag not in _NEEDED | _KEPT and tag not in (_ORIENTATION, _XMP, _IPTC, _PROFILE):
            continue
        where = place if nbytes > 4 else begin + 8
        if where + nbytes > len(data):
            if tag in _KEPT:
                continue
            raise ValueError("a truncated TIFF")
        needed_bytes += nbytes if tag in _NEEDED else 0
        value = data[where : where + nbytes] if nbytes <= most_bytes.get(tag, 64) else b""
        entries.setdefault(tag, (data[begin : begin + 12], value))
    if needed_bytes > len(data):
        raise ValueError("a damaged TIFF")
    return _Directory(order, entries, has_next=any(data[end : end + 4]))


def _checked_size(directory: _Directory) -> tuple[int, int]:
    """Return (height, width).

    Raises:
        ValueError: the decoder would not read the pixels, or would take too much memory.
    """
    number, numbers = directory.number, directory.numbers
    width, height = number(_WIDTH, 0), number(_HEIGHT, 0)
    across, down = number(_TILE_WIDTH, 0), number(_TILE_HEIGHT, 0)
    if not width or not height:
        raise ValueError("a damaged TIFF")
    if across * down > max(4 * width * height, _LEAST_TILE) or number(_SAMPLES, 1) > _MOST_SAMPLES:
        raise ValueError("a damaged TIFF")
    compression, bits = number(_COMPRESSION, 1), set(numbers(_BITS) or (1,))
    if compression not in _READ:
        raise ValueError(f"a TIFF of compression {compression}")
    if set(numbers(_FORMAT)) - {1} or bits - {1, 2, 4, 8, 16}:
        raise ValueError("a TIFF of numbers that are no integers of up to 8 or of 16 bits")
    if bits == {16} and number(_PHOTOMETRIC, 1) == 0:
        raise ValueError("a TIFF of 16 bits in which 0 is white")
    return height, width


def _payload(data: bytes, directory: _Directory) -> bytes:
    """Return the file with a directory of the needed tags alone, behind its other bytes."""
    order, entries = directory.order, directory.entries
    tags = [entries[tag][0] for tag in sorted(entries) if tag in _NEEDED]
    gap = bytes(len(data) % 2)  # a directory begins at an even place
    head = data[:4] + struct.pack(order + "I", len(data) + len(gap))
    written_directory = struct.pack(order + "H", len(tags)) + b"".join(tags) + bytes(4)
    return head + data[8:] + gap + written_directory


def _exif(head: bytes, order: str, texts: Mapping[int, bytes]) -> bytes:
    """Return an EXIF block of texts, by tag in order."""
    entries, values = b"", b""
    begin = 8 + 2 + 12 * len(texts) + 4
    for tag, value in texts.items():
        place = struct.pack(order + "I", begin + len(values))
        entries += struct.pack(order + "HHI", tag, _ASCII, len(value))
        entries += value.ljust(4, b"\0") if len(value) <= 4 else place
        values += b"" if len(value) <= 4 else value
    count = struct.pack(order + "IH", 8, len(texts))
    return head + count + entries + bytes(4) + values
