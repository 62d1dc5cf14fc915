"""The CONTEXT tensor: the inputs of postprocess from the start of an edit.

An ensemble step after a decoupled model cannot take inputs from before it. So CONTEXT travels with
each image through denoiser and decoder, which do not read it. It is one tensor, because each tensor
costs time in each process.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

NOTHING: npt.NDArray[np.uint8] = np.zeros(0, np.uint8)
"""CONTEXT of events without an image."""
_HEAD = struct.Struct("<III?")


def request_in(packed: npt.NDArray[np.uint8]) -> bytes:
    """Return REQUEST from a packed context, without a copy of the pictures in it."""
    request, *_ = _HEAD.unpack(packed[: _HEAD.size].tobytes())
    return packed[_HEAD.size : _HEAD.size + request].tobytes()


@dataclass(frozen=True, slots=True)
class PostprocessContext:
    request: bytes = b""
    source: bytes | memoryview = b""
    """The source image: RGB pixels, or the received or registered file. Empty where the answer
    needs none: there is no mask, and no operator's check.
    """
    paste: bytes | memoryview = b""
    """Weight of the edited pixel, 8 bits at the source's size: pixels, or a PNG. Empty without a
    mask."""
    decoded: bool = True
    """Whether `source` and `paste` are pixels."""
    colour: bytes = b""
    """Colour space of the source (`imaging.colour.Colour.pack`)."""

    def pack(self) -> npt.NDArray[np.uint8]:
        """Return [n] bytes: `decoded` and the lengths of all parts but the last, then the parts."""
        head = _HEAD.pack(len(self.request), len(self.colour), len(self.source), self.decoded)
        parts = (head, self.request, self.colour, self.source, self.paste)
        return np.frombuffer(b"".join(parts), np.uint8)

    @classmethod
    def unpack(cls, packed: npt.NDArray[np.uint8]) -> PostprocessContext:
        """Return the context; its pictures are views of `packed`."""
        raw = packed.data
        request, colour, source, decoded = _HEAD.unpack_from(raw)
        behind_request = _HEAD.size + request
        begin = behind_request + colour
        end = begin + source
        request_bytes, colour_bytes = (
            bytes(raw[_HEAD.size : behind_request]),
            bytes(raw[behind_request:begin]),
        )
        return cls(request_bytes, raw[begin:end], raw[end:], decoded, colour_bytes)
