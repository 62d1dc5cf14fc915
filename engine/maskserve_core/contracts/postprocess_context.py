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
_LENGTHS = struct.Struct("<II")


@dataclass(frozen=True, slots=True)
class PostprocessContext:
    request: bytes
    """REQUEST."""
    source: bytes
    """The source image as the client encoded it, or as it was registered."""
    paste: bytes
    """8-bit PNG at the source's size: weight of the edited pixel."""

    def pack(self) -> npt.NDArray[np.uint8]:
        """[n] bytes: the lengths of request and source, then all three parts."""
        lengths = _LENGTHS.pack(len(self.request), len(self.source))
        return np.frombuffer(b"".join((lengths, self.request, self.source, self.paste)), np.uint8)

    @classmethod
    def unpack(cls, packed: npt.NDArray[np.uint8]) -> PostprocessContext:
        raw = packed.tobytes()
        request, source = _LENGTHS.unpack_from(raw)
        begin = _LENGTHS.size + request
        end = begin + source
        return cls(raw[_LENGTHS.size : begin], raw[begin:end], raw[end:])
