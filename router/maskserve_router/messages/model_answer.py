"""A worker's answer, parsed without copying its large contents.

Protobuf copies a content when it reads the message and at each access; see `model_request`. Here it
stays in the received buffer.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from google.protobuf.message import DecodeError
from tritonclient.grpc import service_pb2 as pb

from maskserve_common.contracts import bytes_tensor
from maskserve_common.errors import InvalidRequest
from maskserve_router.messages.request_limits import raw_outputs, streamed_response


@dataclass(slots=True, eq=False)
class ModelAnswer:
    """A ModelInferResponse of BYTES tensors."""

    head: pb.ModelInferResponse
    """The message without the contents."""
    contents: list[memoryview] = field(default_factory=list)
    """Content of each output, in order; each element follows its length."""
    error: str = ""
    """The error text of a stream's message; empty: none."""

    @classmethod
    def parse(cls, raw: bytes | memoryview, *, streamed: bool = False) -> ModelAnswer:
        """Parse a message; its contents stay in the buffer.

        Args:
            raw: a ModelInferResponse, or a ModelStreamInferResponse that holds one.
            streamed: True for a ModelStreamInferResponse.

        Raises:
            ValueError: the message is not an answer.
        """
        view, error = memoryview(raw), ""
        try:
            if streamed:
                tag, begin, end = streamed_response(view)
                around = b"".join((view[:tag], view[end:]))
                error = pb.ModelStreamInferResponse.FromString(around).error_message
                view = view[begin:end]
            head_parts, contents, at = [], [], 0
            for tag, begin, end in raw_outputs(view):
                head_parts.append(view[at:tag])
                contents.append(view[begin:end])
                at = end
            head = pb.ModelInferResponse.FromString(b"".join((*head_parts, view[at:])))
        except (DecodeError, InvalidRequest):
            raise ValueError("is no answer") from None
        return cls(head, contents, error)

    def outputs(self) -> dict[str, memoryview]:
        """Return the one element of each output, without a copy.

        Raises:
            ValueError: an output does not have exactly one element, or the numbers of outputs and
                contents differ.
        """
        contents = zip(self.head.outputs, self.contents, strict=True)
        return {tensor.name: bytes_tensor.only(content) for tensor, content in contents}
