"""A worker's answer: what is small as a message, what is large where it came.

Protobuf copies a content when it reads the message and each time it is looked at; see
`model_request`. Here it lies once, as it came.
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
    """All but the contents."""
    contents: list[memoryview] = field(default_factory=list)
    """Of each output in its order, each element behind its length."""
    error: str = ""
    """What a stream says in place of an answer."""

    @classmethod
    def parse(cls, raw: bytes | memoryview, *, streamed: bool = False) -> ModelAnswer:
        """The answer that a message on the wire is; its contents stay where they are.

        Args:
            raw: a ModelInferResponse, or the message of a stream that holds one.
            streamed: whether it is the latter.

        Raises:
            ValueError: it is neither.
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
        """The one element of each output, where it lies.

        Raises:
            ValueError: one has more or fewer, or they are not as many as its contents.
        """
        contents = zip(self.head.outputs, self.contents, strict=True)
        return {tensor.name: bytes_tensor.only(content) for tensor, content in contents}
