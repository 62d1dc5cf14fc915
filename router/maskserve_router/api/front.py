"""The part that both listeners share: it sends each inference to the part that runs its model."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import ExitStack, aclosing

from tritonclient.grpc import service_pb2 as pb

from maskserve_common.contracts.tensors import Contract
from maskserve_common.errors import InvalidRequest
from maskserve_router.fair_share import FairShare
from maskserve_router.key_holder import KeyHolder
from maskserve_router.keys import KeyRing
from maskserve_router.messages.call_context import CallContext
from maskserve_router.messages.edit_call import parse_request
from maskserve_router.messages.model_request import ModelRequest
from maskserve_router.operations.control import ClusterControl
from maskserve_router.scheduling.admission import Admission, EditRoom
from maskserve_router.scheduling.edits import Edits
from maskserve_router.scheduling.picture_rooms import PictureRooms
from maskserve_router.scheduling.served_workflows import ServedWorkflows


class Front:
    """Serves inferences, unary and streamed.

    Args:
        keys: identifies clients.
        admission: counts their bytes.
        fair_share: threads that encode and decode messages.
        edits: runs `edit` and `edit_stream`.
        control: runs `control`.
        workflows: runs workflows by name.
    """

    def __init__(
        self,
        keys: KeyRing,
        admission: Admission,
        fair_share: FairShare,
        edits: Edits,
        control: ClusterControl,
        workflows: ServedWorkflows,
    ) -> None:
        self._keys, self._admission, self._fair_share = keys, admission, fair_share
        self._edits, self._control, self._workflows = edits, control, workflows

    @property
    def models(self) -> Mapping[str, Contract]:
        """Model name -> tensors, for all models that clients may call."""
        return self._workflows.models

    def client(self, headers: Mapping[str, str]) -> KeyHolder:
        """Return the caller; see `KeyRing.client`."""
        return self._keys.client(headers)

    async def may_read(self, headers: Mapping[str, str]) -> None:
        """Wait until the next message of a call with these headers may be read."""
        await self._fair_share.may_read(self.client(headers))

    async def parse(self, raw: bytes, client: KeyHolder, resources: ExitStack) -> ModelRequest:
        """Parse a client's message, and count its bytes until `resources` is closed.

        Raises:
            InvalidRequest: as `parse_request`.
            RetryLater: too many bytes are under way.
        """
        self._fair_share.book_bytes(client, len(raw))
        resources.enter_context(self._admission.hold(client, len(raw)))
        return await self._fair_share.run(client, len(raw), parse_request, raw, self.models)

    def room(self, client: KeyHolder) -> EditRoom:
        """Return `Admission.room`."""
        return self._admission.room(client)

    def rooms(self, client: KeyHolder) -> PictureRooms:
        """Return rooms for the pictures of one request."""
        return PictureRooms(self._admission, client)

    def most_bytes(self, client: KeyHolder) -> int:
        """Return `Admission.most_bytes`."""
        return self._admission.most_bytes(client)

    def check_pictures(self, count: int, client: KeyHolder) -> None:
        """Check that a client can ever have this number of pictures under way.

        Raises:
            InvalidRequest: naming `n`.
        """
        most = self._admission.most_edits(client)
        if count > most:
            raise InvalidRequest(
                "n",
                f"is {count}, and {most} edits of {client.name} may be under way",
                f"1 to {most}",
            )

    async def infer(self, message: ModelRequest, context: CallContext, room: EditRoom) -> bytes:
        """Return the answer to one request, an encoded ModelInferResponse.

        Args:
            message: the request, checked by `parse_request`.
            context: the call that brought it.
            room: memory of the answer; the caller gives it back after writing.

        Raises:
            MaskserveError: the router's error.
            Failure: a worker's error.
        """
        if message.head.model_name == "control":
            return await self._control.infer(message, context.client)
        if message.head.model_name in self._workflows.names:
            answer = await self._workflows.infer(message, context)
            room.resize(len(answer))
            return answer
        return await self._edits.infer(message, context, room)

    async def stream(
        self, message: ModelRequest, context: CallContext, room: EditRoom
    ) -> AsyncGenerator[bytes, None]:
        """Yield the answers as encoded ModelStreamInferResponses; otherwise like `infer`."""
        if message.head.model_name == "control":
            answer = pb.ModelInferResponse.FromString(
                await self._control.infer(message, context.client)
            )
            yield pb.ModelStreamInferResponse(infer_response=answer).SerializeToString()
            return
        if message.head.model_name in self._workflows.names:
            run = self._workflows.stream(message, context)
            async with aclosing(run) as events:
                async for event in events:
                    room.resize(event.ByteSize())
                    yield await self._fair_share.run(context.client, room.size, _in_stream, event)
            return
        edit = self._edits.stream(message, context, room)
        async with aclosing(edit) as answers:
            async for answer_bytes in answers:
                yield answer_bytes


def _in_stream(event: pb.ModelInferResponse) -> bytes:
    """Return a response as a message of a stream."""
    message: bytes = pb.ModelStreamInferResponse(infer_response=event).SerializeToString()
    return message
