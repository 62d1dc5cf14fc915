"""A request to a model, parsed without copying its large contents.

Protobuf copies a content when it reads the message, at each access and when it writes the message.
Here it is in memory once as received, and once more as sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from google.protobuf.message import DecodeError
from tritonclient.grpc import service_pb2 as pb

from maskserve_common.contracts import bytes_tensor
from maskserve_common.errors import InvalidRequest
from maskserve_common.routing import EncodingPlace
from maskserve_router.messages.request_limits import raw_contents

Buffer: TypeAlias = bytes | memoryview
_RAW_CONTENTS = b"\x3a"
"""Tag of `raw_input_contents` on the wire."""
_BYTES = "BYTES"
MOST_ELEMENTS = 64
"""Most elements of a tensor without a fixed size; an edit has at most three control pictures, and
ten references."""


@dataclass(slots=True, eq=False)
class ModelRequest:
    """A ModelInferRequest of BYTES tensors."""

    head: pb.ModelInferRequest
    """The message without the contents."""
    contents: list[Buffer] = field(default_factory=list)
    """Content of each input, in order; each element follows its length."""
    host: str = ""
    """Host of the values that it names (`maskserve_common.files.values`); empty: it names none."""
    elsewhere: Callable[[], ModelRequest] | None = None
    """Makes the same request with bytes in place of names, for other hosts; None: it has no
    names."""
    encoding: EncodingPlace | None = None
    """Where its picture and prompt are encoded already; None: nowhere."""

    @classmethod
    def parse(cls, raw: bytes) -> ModelRequest:
        """Parse a message; its contents stay in the buffer.

        Raises:
            InvalidRequest: it is not a ModelInferRequest.
        """
        view, head_parts, at = memoryview(raw), [], 0
        contents: list[Buffer] = []
        for tag, begin, end in raw_contents(raw):
            head_parts.append(view[at:tag])
            contents.append(view[begin:end])
            at = end
        try:
            head = pb.ModelInferRequest.FromString(b"".join((*head_parts, view[at:])))
        except DecodeError:
            raise InvalidRequest("request", "is not a ModelInferRequest") from None
        if contents:
            return cls(head, contents)
        for tensor in head.inputs:
            contents.append(bytes_tensor.pack(tensor.contents.bytes_contents))
            tensor.ClearField("contents")
        # Make a new message: cleared fields of a message stay in its memory.
        return cls(pb.ModelInferRequest.FromString(head.SerializeToString()), contents)

    def copy(self) -> ModelRequest:
        """Return a copy with shared contents that can be written to independently."""
        head = pb.ModelInferRequest()
        head.CopyFrom(self.head)
        return ModelRequest(head, list(self.contents), self.host, self.elsewhere, self.encoding)

    @property
    def size(self) -> int:
        """Bytes of the request."""
        return int(self.head.ByteSize()) + sum(map(len, self.contents))

    def add(self, name: str, elements: Sequence[bytes]) -> None:
        self.head.inputs.add(name=name, datatype=_BYTES, shape=[len(elements)])
        self.contents.append(bytes_tensor.pack(elements))

    def view(self, name: str) -> memoryview:
        """Return the one element of an input, without a copy.

        Raises:
            LookupError: there is no such input, or it is malformed.
        """
        place = self._place(name)
        tensor = self.head.inputs[place]
        if (tensor.datatype, list(tensor.shape)) != (_BYTES, [1]):
            raise LookupError(name)
        try:
            return bytes_tensor.only(self.contents[place])
        except ValueError:
            raise LookupError(name) from None

    def first(self, name: str) -> memoryview:
        """Return the first element of a checked input of any number, without a copy; empty: there
        is none.
        """
        try:
            return bytes_tensor.first(self.contents[self._place(name)])
        except LookupError:
            return memoryview(b"")

    def read(self, name: str) -> bytes:
        """Return a copy of the one element of an input; raises as `view`."""
        return bytes(self.view(name))

    def count(self, name: str) -> int:
        """Return the number of elements of an input; 0: there is no such input; -1: it is
        malformed.
        """
        try:
            place = self._place(name)
        except LookupError:
            return 0
        return bytes_tensor.count(self.contents[place], MOST_ELEMENTS)

    def write(self, name: str, value: bytes) -> None:
        """Replace the one element of an input."""
        self.contents[self._place(name)] = bytes_tensor.pack([value])

    def encoded(self) -> bytes:
        """Return the message on the wire."""
        return on_the_wire(self.head, ([content] for content in self.contents))

    def _place(self, name: str) -> int:
        positions = [i for i, tensor in enumerate(self.head.inputs) if tensor.name == name]
        if len(positions) != 1 or len(self.contents) != len(self.head.inputs):
            raise LookupError(name)
        return positions[0]


def on_the_wire(head: pb.ModelInferRequest, contents: Iterable[Sequence[Buffer]]) -> bytes:
    """Return a message with these contents on the wire; each part is copied once.

    Args:
        head: the message without the contents.
        contents: parts of each input's content.
    """
    parts: list[Buffer] = [head.SerializeToString()]
    for content in contents:
        parts += (_RAW_CONTENTS, _varint(sum(map(len, content))), *content)
    return b"".join(parts)


def _varint(value: int) -> bytes:
    """Return a number as a varint."""
    written = bytearray()
    while value > 0x7F:
        written.append(value & 0x7F | 0x80)
        value >>= 7
    written.append(value)
    return bytes(written)
