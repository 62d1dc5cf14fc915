"""The CONTEXT tensor: what postprocess needs of an edit's beginning.

An ensemble step after a decoupled model cannot take inputs from before it, so this travels with
every image through denoiser and decoder, which do not look into it: as one tensor, because every
process on the way pays for each.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

NOTHING: npt.NDArray[np.uint8] = np.zeros(0, np.uint8)
"""CONTEXT of events without an image."""
_HEAD = struct.Struct("<II?")


def request_in(packed: npt.NDArray[np.uint8]) -> bytes:
    """REQUEST in a packed context, which may be as large as a picture: nothing else is copied."""
    request, _, _ = _HEAD.unpack(packed[: _HEAD.size].tobytes())
    return packed[_HEAD.size : _HEAD.size + request].tobytes()


@dataclass(frozen=True, slots=True)
class PostprocessContext:
    request: bytes
    """REQUEST."""
    source: bytes | memoryview
    """The source image: RGB pixels, or the file as it came or was registered."""
    paste: bytes | memoryview
    """Weight of the edited pixel, 8 bits at the source's size: pixels, or a PNG."""
    decoded: bool
    """Whether `source` and `paste` are pixels."""

    def pack(self) -> npt.NDArray[np.uint8]:
        """[n] bytes: the lengths of request and source and `decoded`, then all three parts."""
        head = _HEAD.pack(len(self.request), len(self.source), self.decoded)
        return np.frombuffer(b"".join((head, self.request, self.source, self.paste)), np.uint8)

    @classmethod
    def unpack(cls, packed: npt.NDArray[np.uint8]) -> PostprocessContext:
        """Pictures stay where they are, in `packed`."""
        raw = packed.data
        request, source, decoded = _HEAD.unpack_from(raw)
        begin = _HEAD.size + request
        end = begin + source
        return cls(bytes(raw[_HEAD.size : begin]), raw[begin:end], raw[end:], decoded)
