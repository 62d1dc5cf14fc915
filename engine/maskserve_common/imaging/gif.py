"""A GIF's first picture, without the other blocks."""

from __future__ import annotations

from typing import NamedTuple

_MOST_BLOCKS = 262_144
"""Most blocks of a picture; encoders write blocks of 255 bytes."""
_EXTENSION, _IMAGE, _END = 0x21, 0x2C, 0x3B
_CONTROL = 0xF9


class FirstPicture(NamedTuple):
    """The first picture's payload for the decoder, and its properties."""

    size: tuple[int, int]
    """(height, width) of the canvas."""
    payload: bytes
    clear: int | None
    """Index of the transparent colour; None: there is none."""
    animated: bool


def first_picture(data: bytes) -> FirstPicture:
    """Read as far as the first picture, and check whether another follows.

    Raises:
        ValueError: the file is cut short or damaged, or larger than its canvas; continues "is ".
    """
    if len(data) < 13:
        raise ValueError("a truncated GIF")
    width, height = (int.from_bytes(data[at : at + 2], "little") for at in (6, 8))
    at = 13 + _table(data[10])
    pieces, control, clear = [data[:at]], b"", None
    blocks = 0

    def end_of_blocks(begin: int) -> int:
        """Return the end of the blocks that begin at a position."""
        nonlocal blocks
        while begin < len(data):
            length = data[begin]
            begin += 1 + length
            blocks += 1
            if not length:
                return begin
            if blocks > _MOST_BLOCKS:
                raise ValueError(f"a GIF of more than {_MOST_BLOCKS} blocks")
        raise ValueError("a truncated GIF")

    def extensions(begin: int) -> int:
        """Return the position behind the extensions."""
        nonlocal control
        while data[begin : begin + 1] == bytes([_EXTENSION]):
            end = end_of_blocks(begin + 2)
            if data[begin + 1 : begin + 3] == bytes([_CONTROL, 4]):
                control = data[begin:end]
            begin = end
        return begin

    at = extensions(at)
    if data[at : at + 1] != bytes([_IMAGE]) or at + 10 > len(data):
        raise ValueError("a truncated or damaged GIF")
    pieces.append(control)
    if len(control) >= 7 and control[3] & 1:
        clear = control[6]
    left, top, across, down = (
        int.from_bytes(data[at + i : at + i + 2], "little") for i in (1, 3, 5, 7)
    )
    if left + across > width or top + down > height:
        raise ValueError("a GIF whose picture is larger than its canvas")
    end = end_of_blocks(at + 11 + _table(data[at + 9]))
    pieces += [data[at:end], bytes([_END])]
    try:
        animated = data[(next_ := extensions(end)) : next_ + 1] == bytes([_IMAGE])
    except ValueError:  # the picture is whole
        animated = False
    return FirstPicture((height, width), b"".join(pieces), clear, animated)


def _table(flags: int) -> int:
    """Return the bytes of a colour table."""
    return 3 << ((flags & 7) + 1) if flags & 0x80 else 0
