"""A request to a model: what is small as a message, what is large where it came.

Protobuf copies a content when it reads the message, each time it is looked at, and when the message
is written: an image of 40 MiB lay in memory nine times. Here it lies once as it came, and once more
as it is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from google.protobuf.message import DecodeError
from tritonclient.grpc import service_pb2 as pb

from maskserve_common.contracts import bytes_tensor
from maskserve_common.errors import InvalidRequest
from maskserve_router.messages.request_limits import raw_contents

Buffer: TypeAlias = bytes | memoryview
_RAW_CONTENTS = b"\x3a"
"""Tag of `raw_input_contents` on the wire."""
_BYTES = "BYTES"
MOST_ELEMENTS = 64
"""Of a tensor of any number; an edit has three control pictures at most."""


@dataclass(slots=True, eq=False)
class ModelRequest:
    """A ModelInferRequest of BYTES tensors."""

    head: pb.ModelInferRequest
    """All but the contents."""
    contents: list[Buffer] = field(default_factory=list)
    """Of each input in its order, each element behind its length."""
    host: str = ""
    """Where what it names lies (`core.worker.values`)."""
    elsewhere: Callable[[], ModelRequest] | None = None
    """Makes the same without names, for a worker of another host; None: it has none."""

    @classmethod
    def parse(cls, raw: bytes) -> ModelRequest:
        """The request that a message on the wire is; its contents stay where they are.

        Raises:
            InvalidRequest: it is none.
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
            raise InvalidRequest("request", "is no ModelInferRequest") from None
        if contents:
            return cls(head, contents)
        for tensor in head.inputs:
            contents.append(bytes_tensor.pack(tensor.contents.bytes_contents))
            tensor.ClearField("contents")
        # Another one: what is cleared of a message stays in its memory.
        return cls(pb.ModelInferRequest.FromString(head.SerializeToString()), contents)

    def copy(self) -> ModelRequest:
        """Another request of the same contents, which can be written to by itself."""
        head = pb.ModelInferRequest()
        head.CopyFrom(self.head)
        return ModelRequest(head, list(self.contents), self.host, self.elsewhere)

    @property
    def size(self) -> int:
        """Bytes."""
        return int(self.head.ByteSize()) + sum(map(len, self.contents))

    def add(self, name: str, elements: Sequence[bytes]) -> None:
        """Append a tensor."""
        self.head.inputs.add(name=name, datatype=_BYTES, shape=[len(elements)])
        self.contents.append(bytes_tensor.pack(elements))

    def view(self, name: str) -> memoryview:
        """The one element of an input, where it lies.

        Raises:
            LookupError: there is no such input, or not in that form.
        """
        place = self._place(name)
        tensor = self.head.inputs[place]
        if (tensor.datatype, list(tensor.shape)) != (_BYTES, [1]):
            raise LookupError(name)
        try:
            return bytes_tensor.only(self.contents[place])
        except ValueError:
            raise LookupError(name) from None

    def read(self, name: str) -> bytes:
        """A copy of the same."""
        return bytes(self.view(name))

    def count(self, name: str) -> int:
        """Elements of an input of any size; -1: it is in no such form."""
        return bytes_tensor.count(self.contents[self._place(name)], MOST_ELEMENTS)

    def write(self, name: str, value: bytes) -> None:
        """Give an input another element."""
        self.contents[self._place(name)] = bytes_tensor.pack([value])

    def encoded(self) -> bytes:
        """The message on the wire."""
        return on_the_wire(self.head, ([content] for content in self.contents))

    def _place(self, name: str) -> int:
        positions = [i for i, tensor in enumerate(self.head.inputs) if tensor.name == name]
        if len(positions) != 1 or len(self.contents) != len(self.head.inputs):
            raise LookupError(name)
        return positions[0]


def on_the_wire(head: pb.ModelInferRequest, contents: Iterable[Sequence[Buffer]]) -> bytes:
    """A message with these contents, each in parts that are copied once.

    Args:
        head: all but the contents.
        contents: of its inputs.
    """
    parts: list[Buffer] = [head.SerializeToString()]
    for content in contents:
        parts += (_RAW_CONTENTS, _varint(sum(map(len, content))), *content)
    return b"".join(parts)


def _varint(value: int) -> bytes:
    """A number on the wire."""
    written = bytearray()
    while value > 0x7F:
        written.append(value & 0x7F | 0x80)
        value >>= 7
    written.append(value)
    return bytes(written)
