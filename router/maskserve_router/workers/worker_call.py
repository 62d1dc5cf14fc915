"""One try of an edit: its call to a worker, unary or streamed, and what may end that."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

import grpc
import grpc.aio
import msgspec
from tritonclient.grpc import service_pb2 as pb

from maskserve_common.contracts import bytes_tensor
from maskserve_common.errors import EngineFailed, MaskserveError
from maskserve_router.messages.edit_call import EditCall
from maskserve_router.messages.failures import Failure
from maskserve_router.messages.model_answer import ModelAnswer
from maskserve_router.workers.stream_buffer import Message
from maskserve_router.workers.worker import Sent

log = logging.getLogger("maskserve.router")
Send: TypeAlias = Callable[[Sent, EditCall], AsyncIterator[Message]]


class _Meta(msgspec.Struct):
    """Of an answer's META, what the router learns from."""

    event: str = ""
    template_id: str = ""
    result_template_id: str | None = None


_read_meta = msgspec.json.Decoder(_Meta).decode


async def unary(sent: Sent, call: EditCall) -> AsyncIterator[Message]:
    """Send a unary request; its one answer."""
    under_way = sent.worker.upstream.infer(
        call.encoded(sent.worker.host), call.left(), call.metadata
    )
    sent.cancel = under_way.cancel
    with _failures(sent):
        try:
            answer = await under_way
        finally:
            under_way.cancel()  # no effect once it is done
    try:
        _check_whole(ModelAnswer.parse(answer), call)
    except ValueError:
        raise _not_an_answer(sent) from None
    yield Message(answer)


def _check_whole(answer: ModelAnswer, call: EditCall) -> None:
    """Raises ValueError: it lacks an output that was asked for, or one has not its one element."""
    required_outputs = {output.name for output in call.message.head.outputs} or {"IMAGE", "META"}
    if missing := required_outputs - answer.outputs().keys():
        raise ValueError(f"has no {min(missing)}")


def _not_an_answer(sent: Sent) -> Failure:
    log.warning("worker %s answered an edit with something else", sent.worker.address)
    message = f"[{EngineFailed.code}] the worker answered with something else"
    return Failure(grpc.StatusCode.INTERNAL, message)


async def streamed(sent: Sent, call: EditCall) -> AsyncIterator[Message]:
    """Send the one request of a stream; the worker's messages as they come.

    Behind a final event nothing is a failure: the client has its answer, and no second one follows.
    """
    under_way = sent.worker.upstream.stream(
        call.encoded(sent.worker.host), call.left(), call.metadata
    )
    sent.cancel = under_way.cancel
    answered = False
    try:
        with _failures(sent):
            try:
                async for raw in under_way:
                    message, is_answer = _checked(raw, sent, call)
                    answered = answered or is_answer
                    yield message
            finally:
                under_way.cancel()
    except (Failure, MaskserveError):
        if not answered:
            raise
    if not answered:
        raise Failure(
            grpc.StatusCode.UNAVAILABLE, "[ENGINE_FAILED] the stream ended before the answer"
        )


def _checked(message: bytes, sent: Sent, call: EditCall) -> tuple[Message, bool]:
    """A message of a stream as the client gets it, and whether it is the answer.

    Raises:
        Failure: it is an error, or nothing that a worker may say.
    """
    try:
        answer = ModelAnswer.parse(message, streamed=True)
        if answer.error:
            raise Failure(grpc.StatusCode.UNKNOWN, answer.error, message)
        if not answer.head.outputs:
            return Message(message), False
        _check_whole(answer, call)
        meta = answer.outputs().get("META")
        if meta is None:  # not asked for, so that no event can be told from the last one
            return Message(message), True
        event = _read_meta(meta).event
        if call.restarts:
            message = _restarted(message, call.restarts)
    except (ValueError, msgspec.MsgspecError):
        raise _not_an_answer(sent) from None
    passing = event in ("progress", "preview")
    return Message(message, passing), not passing


def _restarted(message: bytes, restarts: int) -> bytes:
    """An event whose META tells that the edit was begun anew so many times."""
    event = pb.ModelStreamInferResponse.FromString(message)
    names = [tensor.name for tensor in event.infer_response.outputs]
    contents, place = event.infer_response.raw_output_contents, names.index("META")
    meta = {**msgspec.json.decode(bytes_tensor.only(contents[place])), "restarts": restarts}
    contents[place] = bytes_tensor.pack([msgspec.json.encode(meta)])
    encoded: bytes = event.SerializeToString()
    return encoded


@contextmanager
def _failures(sent: Sent) -> Iterator[None]:
    """What ends a call to a worker, as a Failure."""
    try:
        yield
    except grpc.aio.AioRpcError as error:
        raise Failure(error.code(), error.details() or "") from None
    except asyncio.CancelledError:
        if sent.ended_for is not None:
            raise sent.ended_for from None
        raise


def template_of(answer: bytes, *, streamed: bool) -> str:
    """The template that an answer names; empty if none.

    Args:
        answer: a worker's last message.
        streamed: whether it came in a stream.
    """
    return _meta_of(answer, streamed=streamed).template_id


def result_of(answer: bytes, *, streamed: bool) -> str:
    """The template that an answer's picture is kept as; empty if it is none."""
    return _meta_of(answer, streamed=streamed).result_template_id or ""


def _meta_of(answer: bytes, *, streamed: bool) -> _Meta:
    meta = ModelAnswer.parse(answer, streamed=streamed).outputs().get("META")
    return _Meta() if meta is None else _read_meta(meta)
