"""Reader of AVIF and HEIC files' boxes (ISO/IEC 14496-12 and 23008-12).

Decoders trust the coded size, whatever the boxes say, and allocate memory for it. So this module
reads AV1's own headers too.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

_MOST_BOXES: Final = 4096
_MOST_ITEMS: Final = 4096
_MOST_BORDER: Final = 256
_AVIF: Final = (b"avif", b"avis")
_HEIC: Final = (b"heic", b"heix", b"hevc", b"hevx", b"heim", b"heis", b"mif1", b"msf1")
_ORIENTATIONS: Final = {(0, None): 1, (1, None): 8, (2, None): 3, (3, None): 6, (0, 0): 4,
                        (0, 1): 2, (1, 0): 5, (1, 1): 7, (2, 0): 2, (2, 1): 4, (3, 0): 7,
                        (3, 1): 5}  # fmt: skip
"""EXIF's orientation, by quarter turns anticlockwise and the axis of the mirror that follows."""
_SEQUENCE_HEADER: Final = 1


class BoxedPicture(NamedTuple):
    """The primary item."""

    kind: str
    """`avif` or `heic`."""
    size: tuple[int, int]
    """(height, width) as it is decoded, before it is turned."""
    orientation: int
    """Orientation in EXIF's numbers, from the boxes; EXIF's own does not count."""
    profile: bytes
    exif: bytes
    xmp: bytes
    sequence: bool
    """Whether the file is also an animation."""


class _Item(NamedTuple):
    kind: bytes
    content_type: bytes
    """Type of an item that is no picture."""
    parts: list[tuple[int, int]]
    """Offset and length in the file of each part."""


def brand_of(data: bytes) -> str:
    """`avif`, `heic`, or empty: it is neither."""
    if data[4:8] != b"ftyp":
        return ""
    size = int.from_bytes(data[:4], "big")
    brands = [data[8:12], *(data[at : at + 4] for at in range(16, min(size, 256, len(data)), 4))]
    if any(brand in _AVIF for brand in brands):
        return "avif"
    return "heic" if any(brand in _HEIC for brand in brands) else ""


def boxed_picture(data: bytes, most_metadata: int, most_profile: int) -> BoxedPicture:
    """Read the picture's properties from the boxes.

    Raises:
        ValueError: the file is cut short or damaged, or coded larger than its boxes say; continues
            "is ".
    """
    kind = brand_of(data)
    try:
        picture = _read(data, kind, most_metadata, most_profile)
    except IndexError:
        picture = None
    if picture is None:
        raise ValueError(f"a truncated or damaged {kind.upper()}")
    return picture


def _read(data: bytes, kind: str, most_metadata: int, most_profile: int) -> BoxedPicture | None:
    top = dict(_boxes(data, 0, len(data)))
    if b"meta" not in top:
        return None
    begin, end = top[b"meta"]
    meta = dict(_boxes(data, begin + 4, end))
    if not {b"pitm", b"iinf", b"iloc", b"iprp"} <= meta.keys():
        return None
    at = meta[b"pitm"][0]
    primary = _number(data, at + 4, 4 if data[at] else 2)
    items = _items(data, meta)
    shapes = _properties(data, *meta[b"iprp"])
    properties = shapes.get(primary, [])
    size = next((_size(data, at) for name, at, _ in properties if name == b"ispe"), None)
    if size is None or primary not in items:
        return None
    for number, item in items.items():
        if item.kind == b"av01":
            sizes = [_size(data, at) for name, at, _ in shapes.get(number, []) if name == b"ispe"]
            if not sizes or not _fits(b"".join(data[a : a + n] for a, n in item.parts), sizes[0]):
                return None
    if kind == "heic":  # AVIF's decoder leaves the border on
        size = next(
            (_cropped(data, at, size) for name, at, _ in properties if name == b"clap"), size
        )
    turns = next((data[at] & 3 for name, at, _ in properties if name == b"irot"), 0)
    axis = next((data[at] & 1 for name, at, _ in properties if name == b"imir"), None)
    profiles = (
        data[at + 4 : end]
        for name, at, end in properties
        if name == b"colr" and data[at : at + 4] in (b"prof", b"rICC")
    )
    profile = next(profiles, b"")
    metadata = {b"Exif": b"", b"application/rdf+xml": b""}
    for item in items.values():
        name = item.kind if item.kind == b"Exif" else item.content_type
        if name in metadata and sum(n for _, n in item.parts) <= most_metadata:
            metadata[name] = b"".join(data[a : a + n] for a, n in item.parts)
    exif = metadata[b"Exif"][4:]  # behind where in it the header lies
    return BoxedPicture(
        kind, size, _ORIENTATIONS[turns, axis],
        profile if len(profile) <= most_profile else b"", exif,
        metadata[b"application/rdf+xml"], b"moov" in top,
    )  # fmt: skip


def _number(data: bytes, at: int, size: int) -> int:
    if at + size > len(data):
        raise IndexError
    return int.from_bytes(data[at : at + size], "big")


def _boxes(data: bytes, at: int, end: int) -> Iterator[tuple[bytes, tuple[int, int]]]:
    """Names of boxes, and where their contents begin and end."""
    for _ in range(_MOST_BOXES):
        if at + 8 > end:
            return
        size, name, begin = _number(data, at, 4), data[at + 4 : at + 8], at + 8
        if size == 1:
            size, begin = _number(data, at + 8, 8), at + 16
        if size == 0:
            size = end - at
        if size < begin - at or at + size > end:
            raise IndexError
        yield name, (begin, at + size)
        at += size
    raise IndexError


def _items(data: bytes, meta: dict[bytes, tuple[int, int]]) -> dict[int, _Item]:
    """Return the items by number."""
    begin, end = meta[b"iinf"]
    counted = 4 if data[begin] else 2
    kinds: dict[int, tuple[bytes, bytes]] = {}
    for name, (at, until) in _boxes(data, begin + 4 + counted, end):
        if name == b"infe" and data[at] >= 2:
            wide = 4 if data[at] > 2 else 2
            kind = data[at + 6 + wide : at + 10 + wide]
            names = data[at + 10 + wide : min(until, at + 400)].split(b"\0")
            kinds[_number(data, at + 4, wide)] = kind, names[1] if kind == b"mime" else b""
    return {
        number: _Item(*kinds.get(number, (b"", b"")), parts)
        for number, parts in _places(data, meta)
    }


def _places(
    data: bytes, meta: dict[bytes, tuple[int, int]]
) -> Iterator[tuple[int, list[tuple[int, int]]]]:
    """Yield where each item lies, from the box iloc."""
    at, _ = meta[b"iloc"]
    version, sizes = data[at], _number(data, at + 4, 2)
    offset, length, base = sizes >> 12, sizes >> 8 & 15, sizes >> 4 & 15
    index = sizes & 15 if version else 0
    wide = 4 if version == 2 else 2
    count, at = _number(data, at + 6, wide), at + 6 + wide
    if count > _MOST_ITEMS:
        raise IndexError
    total = 0
    for _ in range(count):
        number, at = _number(data, at, wide), at + wide
        method = 0
        if version:
            method, at = _number(data, at, 2) & 15, at + 2
        at += 2
        first, at = _number(data, at, base), at + base
        extents, at = _number(data, at, 2), at + 2
        parts = []
        if method == 1:
            first += meta[b"idat"][0] if b"idat" in meta else len(data)
        for _ in range(extents):
            at += index
            begin, at = first + _number(data, at, offset), at + offset
            size, at = _number(data, at, length), at + length
            size = size or max(len(data) - begin, 0)
            total += size
            if method > 1 or begin + size > len(data) or total > 2 * len(data):
                raise IndexError
            parts.append((begin, size))
        yield number, parts


def _properties(data: bytes, begin: int, end: int) -> dict[int, list[tuple[bytes, int, int]]]:
    """Return each item's properties: name, and where it begins and ends."""
    every: list[tuple[bytes, int, int]] = []
    boxes: dict[int, list[tuple[bytes, int, int]]] = {}
    for name, (at, until) in _boxes(data, begin, end):
        if name == b"ipco":
            every = [(box_number, *place) for box_number, place in _boxes(data, at, until)]
        if name == b"ipma":
            wide, long = 4 if data[at] else 2, data[at + 3] & 1
            count, at = _number(data, at + 4, 4), at + 8
            if count > _MOST_ITEMS:
                raise IndexError
            for _ in range(count):
                number, many, at = _number(data, at, wide), data[at + wide], at + wide + 1
                for _ in range(many):
                    which = _number(data, at, 1 + long) & (0x7FFF if long else 0x7F)
                    at += 1 + long
                    if which:
                        boxes.setdefault(number, []).append(every[which - 1])
    return boxes


def _size(data: bytes, at: int) -> tuple[int, int]:
    return _number(data, at + 8, 4), _number(data, at + 4, 4)


def _cropped(data: bytes, at: int, size: tuple[int, int]) -> tuple[int, int]:
    """Return (height, width) without the border that fills up whole blocks."""
    width, wide, height, high = (_number(data, at + 4 * i, 4) for i in range(4))
    if not wide or not high or width % wide or height % high:
        raise IndexError
    tiles = height // high, width // wide
    if any(not 0 <= whole - part < _MOST_BORDER for whole, part in zip(size, tiles, strict=True)):
        raise IndexError
    return tiles


def _fits(payload: bytes, size: tuple[int, int]) -> bool:
    """Return whether AV1's sequence headers, of which there is one, describe no larger picture."""
    at, is_sequence = 0, False
    for _ in range(_MOST_BOXES):
        if at >= len(payload):
            return is_sequence
        head, at = payload[at], at + 1
        at += head >> 2 & 1
        length, shift = 0, 0
        if not head & 2:
            length = len(payload) - at
        else:
            while True:
                byte, at = payload[at], at + 1
                length |= (byte & 127) << shift
                shift += 7
                if byte < 128 or shift > 28:
                    break
        if head >> 3 & 15 == _SEQUENCE_HEADER:
            height, width = _sequence_size(payload[at : at + length])
            if height > size[0] or width > size[1]:
                return False
            is_sequence = True
        at += length
    return False


def _sequence_size(header: bytes) -> tuple[int, int]:
    """Return the (height, width) of AV1's sequence header (5.5.1); refuse features of films.

    Raises:
        IndexError: the header is cut short, or has times.
    """
    bits, left = int.from_bytes(header, "big"), 8 * len(header)

    def take(count: int) -> int:
        nonlocal left
        left -= count
        if left < 0:
            raise IndexError
        return bits >> left & (1 << count) - 1

    take(4)  # profile, and whether it is a still picture
    if take(1):  # reduced
        take(5)
    else:
        if take(1):  # times
            raise IndexError
        delays = take(1)
        for _ in range(take(5) + 1):
            take(12)
            if take(5) > 7:
                take(1)
            if delays and take(1):
                take(4)
    across, down = take(4) + 1, take(4) + 1
    width = take(across) + 1
    return take(down) + 1, width
