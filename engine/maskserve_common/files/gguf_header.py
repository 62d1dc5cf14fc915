"""The header of a GGUF file, checked before a library reads it.

    | GGUF | version | how many tensors | how many values |
    | values: key, type, value … | tensors: name, sides, form, offset … | data, aligned |

The library trusts the counts of a header: a count of 2⁶⁰ keeps it busy for ever. This module bounds
each count by the file's size, and by the counts of published models. It takes time in proportion to
the header.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from typing import BinaryIO

MAX_TENSORS = 2**16
MAX_VALUES = 2**22
"""Most values of all metadata, those in arrays included; a tokenizer has some 2¹⁸ words."""
MAX_SIDES = 4
MAX_NAME = 2**16
MAX_HEADER_BYTES = 2**28

_VERSIONS = (2, 3)
_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""Bytes of a value, by its type; strings and arrays give their own."""
_STRING, _ARRAY = 8, 9
_ALIGNMENT = b"general.alignment"


class BadGguf(ValueError):
    """A file that is no whole GGUF file; the text is the end of a sentence about it."""


def read_gguf(
    file: BinaryIO, nbytes: int, stored: Callable[[int, int], int] | None = None
) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a file's tensors by name, [out, in] for a linear layer's weight.

    Args:
        file: file open for reading, at its beginning.
        nbytes: bytes of the file.
        stored: returns the bytes of so many numbers in a form, by GGML's number of it. It raises
            KeyError for an unknown form, and ValueError if its blocks do not divide the numbers.
            With it, the tensors are checked to lie in the file.

    Raises:
        BadGguf: the header is not whole, or names something unsupported or missing.
    """
    header = _Header(file, nbytes)
    if header.take(4) != b"GGUF":
        raise BadGguf("does not begin as one")
    version = header.number("<I")
    if version not in _VERSIONS:
        raise BadGguf(f"is of version {version}; read are {_VERSIONS[0]} and {_VERSIONS[1]}")
    tensors, values = header.number("<Q"), header.number("<Q")
    if tensors > MAX_TENSORS:
        raise BadGguf(f"names {tensors} tensors; at most {MAX_TENSORS} are read")
    align = 32
    for _ in range(header.counted(values)):
        key = header.string()
        kind = header.number("<I")
        if key == _ALIGNMENT and kind == 4:
            align = header.number("<I")
        else:
            header.skip(kind)
    if align < 1 or align & (align - 1):
        raise BadGguf(f"says an alignment of {align}, which is not a power of two")
    shapes, ends = {}, []
    for _ in range(tensors):
        name = header.string().decode("utf-8", "replace")
        sides = header.number("<I")
        if not 1 <= sides <= MAX_SIDES:
            raise BadGguf(f"holds a tensor of {sides} sides; 1 to {MAX_SIDES} are read")
        shape = tuple(header.number("<Q") for _ in range(sides))[::-1]
        shapes[name] = shape
        form, offset = header.number("<I"), header.number("<Q")
        if stored is None:
            continue
        try:
            ends.append(offset + stored(form, math.prod(shape)))
        except (KeyError, ValueError) as error:
            raise BadGguf(f"holds {name[:60]!r} in form {form}, which is not read of it") from error
    begin = header.at + -header.at % align
    if begin + max(ends, default=0) > nbytes:
        raise BadGguf("is cut short: a tensor is not whole")
    return shapes


class _Header:
    def __init__(self, file: BinaryIO, nbytes: int) -> None:
        self._file, self._left = file, min(nbytes, MAX_HEADER_BYTES)
        self._values = MAX_VALUES
        self.at = 0

    def take(self, count: int) -> bytes:
        """The next bytes."""
        if count > self._left:
            raise BadGguf("is cut short: its header is not whole")
        self._left -= count
        self.at += count
        return self._file.read(count)

    def number(self, form: str) -> int:
        value: int = struct.unpack(form, self.take(struct.calcsize(form)))[0]
        return value

    def string(self) -> bytes:
        length = self.number("<Q")
        if length > MAX_NAME:
            raise BadGguf(f"holds a name of {length} bytes; at most {MAX_NAME} are read")
        return self.take(length)

    def counted(self, count: int) -> int:
        """A number of values that follow."""
        if count > self._values:
            raise BadGguf(f"names more than {MAX_VALUES} values of metadata, which are not read")
        self._values -= count
        return count

    def skip(self, kind: int, depth: int = 0) -> None:
        """A value of a type."""
        if kind in _SIZES:
            self.take(_SIZES[kind])
        elif kind == _STRING:
            self._skip_bytes(self.number("<Q"))
        elif kind == _ARRAY and depth < 2:
            inner, count = self.number("<I"), self.counted(self.number("<Q"))
            if inner in _SIZES:
                self._skip_bytes(_SIZES[inner] * count)
            else:
                for _ in range(count):
                    self.skip(inner, depth + 1)
        else:
            raise BadGguf(f"holds metadata of type {kind}, which is not read")

    def _skip_bytes(self, count: int) -> None:
        if count > self._left:
            raise BadGguf("is cut short: its header is not whole")
        self._left -= count
        self.at += count
        self._file.seek(self.at)
