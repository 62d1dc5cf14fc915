"""Faults of a tensor in either protocol."""

from __future__ import annotations

import struct
from dataclasses import dataclass


@dataclass(frozen=True)
class Change:
    """A fault of one tensor; None leaves a part as it should be."""

    data: bytes | None = None
    shape: list[int] | None = None
    datatype: str | None = None
    name: str | None = None
    error_text: str | None = None
    """The name in the error; None: the tensor's."""


def cell(value: bytes) -> bytes:
    """One BYTES element on the wire."""
    return struct.pack("<I", len(value)) + value


CHANGES = {
    "of two elements": Change(cell(b"a") * 2, [2]),
    "of no element": Change(b"", [0]),
    "of rank 0": Change(shape=[]),
    "of rank 2": Change(shape=[1, 1]),
    "of 2^62 elements": Change(shape=[2**62]),
    "of FP32": Change(bytes(4), datatype="FP32"),
    "of UINT8": Change(b"\0", datatype="UINT8"),
    "of a type that is none": Change(datatype="STRING"),
    "without bytes": Change(b""),
    "of half a length": Change(b"ab"),
    "of a length beyond its bytes": Change(struct.pack("<I", 100) + b"abc"),
    "of a length of 4 GB": Change(b"\xff\xff\xff\xffabc"),
    "of a length short of its bytes": Change(struct.pack("<I", 1) + b"abc"),
    "of two elements in one": Change(cell(b"a") * 2),
    "of another name": Change(name="OTHER", error_text="OTHER"),
    "of a long name": Change(name="x" * 5000, error_text="xxxx"),
}
