"""Inference over HTTP: KServe v2's `infer`, and Triton's `generate` and `generate_stream`."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Mapping
from contextlib import ExitStack, aclosing
from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from maskserve_common.contracts.tensors import Contract
from maskserve_common.errors import InvalidRequest, MaskserveError
from maskserve_common.servers.failure import Failure
from maskserve_router.api.front import Front
from maskserve_router.api.http_answers import (
    JSON,
    error_json,
    while_connected,
    whole_answer,
)
from maskserve_router.api.http_body import Bodies
from maskserve_router.api.http_events import Event, event_stream
from maskserve_router.api.kserve_http import (
    RequestedOutputs,
    generate_request,
    generate_response,
    infer_request,
    infer_response,
)
from maskserve_router.fair_share import FairShare
from maskserve_router.key_holder import KeyHolder
from maskserve_router.messages.call_context import CallContext
from maskserve_router.messages.edit_call import check_request
from maskserve_router.messages.model_answer import ModelAnswer
from maskserve_router.messages.model_request import ModelRequest
from maskserve_router.scheduling.admission import EditRoom

_NUMBER = re.compile("[0-9]{1,18}")
_HEADER_LENGTH = "inference-header-content-length"


class HttpInference:
    """Handlers of requests with tensors."""

    def __init__(self, bodies: Bodies, front: Front, fair_share: FairShare) -> None:
        self._bodies, self._front, self._fair_share = bodies, front, fair_share

    async def infer(self, request: Request) -> Response:
        with ExitStack() as exit_stack, ExitStack() as response_stack:
            client, body = await self._body(request, exit_stack)
            length = request.headers.get(_HEADER_LENGTH)
            if length is not None and not _NUMBER.fullmatch(length):
                raise InvalidRequest("Inference-Header-Content-Length", "is not a number")
            size, split = len(body), None if length is None else int(length)
            message, output_forms = await self._fair_share.run(
                client, size, _checked_infer, self._front.models, *model_of(request), body, split
            )
            del body
            room = response_stack.enter_context(self._front.room(client))
            context = CallContext(client, size, _headers(request), "http")
            work = self._front.infer(message, context, room)
            answer = await while_connected(request, work)
            parts, head = await self._fair_share.run(
                client, len(answer), infer_response, answer, output_forms
            )
            headers = {} if head is None else {_HEADER_LENGTH: str(head)}
            kind = JSON if head is None else "application/octet-stream"
            return whole_answer(parts, room, response_stack, headers, kind)

    async def generate(self, request: Request) -> Response:
        with ExitStack() as exit_stack, ExitStack() as response_stack:
            message, context = await self._generation(request, exit_stack)
            room = response_stack.enter_context(self._front.room(context.client))
            work = self._only_answer(message, context, room)
            return whole_answer([await while_connected(request, work)], room, response_stack, {})

    async def generate_stream(self, request: Request) -> Response:
        with ExitStack() as exit_stack:
            message, context = await self._generation(request, exit_stack)
            room = exit_stack.enter_context(self._front.room(context.client))
            answers = self._answers(message, context, room)
            return await event_stream(request, _server_sent(answers), exit_stack, _error_event)

    async def body(self, request: Request) -> bytes:
        """Return the body of a request without tensors; raises as `Bodies.read`."""
        with ExitStack() as exit_stack:
            _, body = await self._body(request, exit_stack)
            return body

    async def _body(self, request: Request, resources: ExitStack) -> tuple[KeyHolder, bytes]:
        """Return the client and the body. The client is checked before the body is read.

        Raises:
            Unauthorized: keys are needed, and the request has no known one.
            MaskserveError: as `Bodies.read`.
        """
        client = self._front.client(_headers(request))
        return client, await self._bodies.read(request, client, resources)

    async def _generation(
        self, request: Request, resources: ExitStack
    ) -> tuple[ModelRequest, CallContext]:
        client, body = await self._body(request, resources)
        work = _checked_generate, self._front.models, *model_of(request), body
        message = await self._fair_share.run(client, len(body), *work)
        return message, CallContext(client, len(body), _headers(request), "generate")

    async def _only_answer(
        self, message: ModelRequest, context: CallContext, room: EditRoom
    ) -> bytes:
        """Return the answer of /generate, which can hold only one.

        Raises:
            InvalidRequest: there are several, as with progress.
        """
        async with aclosing(self._answers(message, context, room)) as answers:
            responses = [answer async for answer in answers]
        if len(responses) != 1:
            raise InvalidRequest(
                "generate", f"has {len(responses)} responses", "generate_stream, or no progress"
            )
        return responses[0]

    async def _answers(
        self, message: ModelRequest, context: CallContext, room: EditRoom
    ) -> AsyncGenerator[bytes, None]:
        """Yield each answer as JSON."""
        turn = partial(self._fair_share.run, context.client)
        if not self._front.models[message.head.model_name].decoupled:
            answer = await self._front.infer(message, context, room)
            yield await turn(len(answer), _as_json, answer)
            return
        async with aclosing(self._front.stream(message, context, room)) as answers:
            async for raw in answers:
                if event_json := await turn(len(raw), _event_as_json, raw):
                    yield event_json


def _as_json(answer: bytes) -> bytes:
    return generate_response(ModelAnswer.parse(answer))


def _event_as_json(raw: bytes) -> bytes:
    """Return a stream's message as JSON; empty if it has no outputs."""
    response = ModelAnswer.parse(raw, streamed=True)
    return generate_response(response) if response.head.outputs else b""


async def _server_sent(answers: AsyncGenerator[bytes, None]) -> AsyncGenerator[Event, None]:
    """Yield the answers as server-sent events."""
    async with aclosing(answers):
        async for answer in answers:
            yield _event(answer)


def _event(data: bytes) -> tuple[bytes, ...]:
    return b"data: ", data, b"\n\n"


def _error_event(error: MaskserveError | Failure) -> bytes:
    return b"".join(_event(error_json(error)))


def _checked_infer(
    models: Mapping[str, Contract], model: str, version: str, body: bytes, split: int | None
) -> tuple[ModelRequest, RequestedOutputs]:
    message, output_forms = infer_request(model, version, body, split)
    check_request(message, models)
    return message, output_forms


def _checked_generate(
    models: Mapping[str, Contract], model: str, version: str, body: bytes
) -> ModelRequest:
    message = generate_request(model, version, body, models)
    check_request(message, models)
    return message


def model_of(request: Request) -> tuple[str, str]:
    """Return the model's name and version in the path; empty if absent."""
    return request.path_params.get("model", ""), request.path_params.get("version", "")


def _headers(request: Request) -> dict[str, str]:
    return dict(request.headers.items())
