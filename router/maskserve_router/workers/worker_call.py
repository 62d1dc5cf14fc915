"""One try of an edit: its unary or streamed call to a worker, and the errors that end it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

import grpc
import msgspec
from tritonclient.grpc import service_pb2 as pb

from maskserve_common.contracts import bytes_tensor
from maskserve_common.errors import EngineFailed, MaskserveError
from maskserve_common.servers.failure import Failure
from maskserve_common.servers.upstream import failures
from maskserve_router.messages.edit_call import EditCall
from maskserve_router.messages.model_answer import ModelAnswer
from maskserve_router.workers.stream_buffer import Message
from maskserve_router.workers.worker import SentEdit

log = logging.getLogger("maskserve.router")
Send: TypeAlias = Callable[[SentEdit, EditCall], AsyncIterator[Message]]


class _Meta(msgspec.Struct):
    """The fields of an answer's META that the router reads."""

    event: str = ""
    template_id: str | None = None
    result_template_id: str | None = None


_read_meta = msgspec.json.Decoder(_Meta).decode


async def unary(sent: SentEdit, call: EditCall) -> AsyncIterator[Message]:
    """Send a unary request and yield its one answer."""
    under_way = sent.worker.upstream.infer(
        call.encoded(sent.worker.host), call.left(), call.metadata
    )
    sent.cancel = under_way.cancel
    with _call_failures(sent):
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
    """Raises ValueError: a requested output is missing, or does not have exactly one element."""
    required_outputs = {output.name for output in call.message.head.outputs} or {"IMAGE", "META"}
    if missing := required_outputs - answer.outputs().keys():
        raise ValueError(f"has no {min(missing)}")


def _not_an_answer(sent: SentEdit) -> Failure:
    log.warning("worker %s sent an unexpected answer to an edit", sent.worker.address)
    message = f"[{EngineFailed.code}] the worker answered with something else"
    return Failure(grpc.StatusCode.INTERNAL, message)


async def streamed(sent: SentEdit, call: EditCall) -> AsyncIterator[Message]:
    """Send the one request of a stream and yield the worker's messages.

    After the final event, errors are ignored: the client has its answer and no second one follows.
    """
    under_way = sent.worker.upstream.stream(
        call.encoded(sent.worker.host), call.left(), call.metadata
    )
    sent.cancel = under_way.cancel
    answered = False
    try:
        with _call_failures(sent):
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


def _checked(message: bytes, sent: SentEdit, call: EditCall) -> tuple[Message, bool]:
    """Return a message of a stream as the client gets it, and whether it is the answer.

    Raises:
        Failure: the message is an error, or not a valid message of a worker.
    """
    try:
        answer = ModelAnswer.parse(message, streamed=True)
        if answer.error:
            raise Failure(grpc.StatusCode.UNKNOWN, answer.error, message)
        if not answer.head.outputs:
            return Message(message), False
        _check_whole(answer, call)
        meta = answer.outputs().get("META")
        if meta is None:  # META was not requested, so the last event cannot be recognised
            return Message(message), True
        event = _read_meta(meta).event
        if call.restarts:
            message = _restarted(message, call.restarts)
    except (ValueError, msgspec.MsgspecError):
        raise _not_an_answer(sent) from None
    passing = event in ("progress", "preview")
    return Message(message, passing), not passing


def _restarted(message: bytes, restarts: int) -> bytes:
    """Return an event whose META says how often the edit was restarted."""
    event = pb.ModelStreamInferResponse.FromString(message)
    names = [tensor.name for tensor in event.infer_response.outputs]
    contents, place = event.infer_response.raw_output_contents, names.index("META")
    meta = {**msgspec.json.decode(bytes_tensor.only(contents[place])), "restarts": restarts}
    contents[place] = bytes_tensor.pack([msgspec.json.encode(meta)])
    encoded: bytes = event.SerializeToString()
    return encoded


@contextmanager
def _call_failures(sent: SentEdit) -> Iterator[None]:
    """Convert errors that end a call to a worker into Failure."""
    try:
        with failures():
            yield
    except asyncio.CancelledError:
        if sent.end_reason is not None:
            raise sent.end_reason from None
        raise


def template_of(answer: bytes, *, streamed: bool) -> str:
    """Return the template id in an answer; empty if there is none.

    Args:
        answer: a worker's last message.
        streamed: True if it came in a stream.
    """
    return _meta_of(answer, streamed=streamed).template_id or ""


def result_of(answer: bytes, *, streamed: bool) -> str:
    """Return the template id of the answer's kept result; empty if it is not kept."""
    return _meta_of(answer, streamed=streamed).result_template_id or ""


def _meta_of(answer: bytes, *, streamed: bool) -> _Meta:
    meta = ModelAnswer.parse(answer, streamed=streamed).outputs().get("META")
    return _Meta() if meta is None else _read_meta(meta)
