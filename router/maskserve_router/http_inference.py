"""Inference over HTTP: KServe v2's `infer`, and Triton's `generate` and `generate_stream`."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Coroutine, Mapping
from contextlib import ExitStack, aclosing
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from tritonclient.grpc import service_pb2 as pb

from maskserve_core.contracts.tensors import Contract
from maskserve_core.errors import EngineFailed, InvalidRequest, MaskserveError
from maskserve_router.edit_call import check_request
from maskserve_router.failures import Failure
from maskserve_router.front import Front
from maskserve_router.http_answers import JSON, error_json
from maskserve_router.http_body import Bodies
from maskserve_router.keys import KeyHolder
from maskserve_router.kserve_http import (
    Wanted,
    generate_request,
    generate_response,
    infer_request,
    infer_response,
)
from maskserve_router.model_request import ModelRequest
from maskserve_router.turns import Turns

_NUMBER = re.compile("[0-9]{1,18}")
_HEADER_LENGTH = "inference-header-content-length"
T = TypeVar("T")


class HttpInference:
    """Handlers of the requests that carry tensors."""

    def __init__(self, bodies: Bodies, front: Front, turns: Turns) -> None:
        self._bodies, self._front, self._turns = bodies, front, turns

    async def infer(self, request: Request) -> Response:
        with ExitStack() as held:
            client, body = await self._body(request, held)
            length = request.headers.get(_HEADER_LENGTH)
            if length is not None and not _NUMBER.fullmatch(length):
                raise InvalidRequest("Inference-Header-Content-Length", "is not a number")
            size, split = len(body), None if length is None else int(length)
            message, wanted = await self._turns.run(
                client, size, _checked_infer, self._front.models, *model_of(request), body, split
            )
            del body
            work = self._front.infer(message, size, client, _headers(request), None, "http")
            answer = await while_connected(request, work)
            content, head = await self._turns.run(
                client, len(answer), infer_response, answer, wanted
            )
            headers = {} if head is None else {_HEADER_LENGTH: str(head)}
            kind = JSON if head is None else "application/octet-stream"
            return Response(content, headers=headers, media_type=kind)

    async def generate(self, request: Request) -> Response:
        with ExitStack() as held:
            client, message, size = await self._generation(request, held)
            work = self._only_answer(message, size, client, _headers(request))
            return Response(await while_connected(request, work), media_type=JSON)

    async def generate_stream(self, request: Request) -> Response:
        with ExitStack() as held:
            client, message, size = await self._generation(request, held)
        answers = self._answers(message, size, client, _headers(request))
        # As with Triton, an error that comes before all else is the status of the answer.
        first = await while_connected(request, first_of(answers))
        events = self._server_sent(first, answers)
        return StreamingResponse(events, media_type="text/event-stream; charset=utf-8")

    async def body(self, request: Request) -> bytes:
        """The body of a request without tensors; raises as `Bodies.read`."""
        with ExitStack() as held:
            _, body = await self._body(request, held)
            return body

    async def _body(self, request: Request, held: ExitStack) -> tuple[KeyHolder, bytes]:
        """The client and the body, of one that may call: who may not is told so before it is read.

        Raises:
            Unauthorized: keys are needed, and there is none that is known.
            MaskserveError: as `Bodies.read`.
        """
        client = self._front.client(_headers(request))
        return client, await self._bodies.read(request, client, held)

    async def _generation(
        self, request: Request, held: ExitStack
    ) -> tuple[KeyHolder, ModelRequest, int]:
        client, body = await self._body(request, held)
        size = len(body)
        work = _checked_generate, self._front.models, *model_of(request), body
        return client, await self._turns.run(client, size, *work), size

    async def _only_answer(
        self,
        message: ModelRequest,
        size: int,
        client: KeyHolder,
        headers: dict[str, str],
    ) -> bytes:
        """The answer of /generate, which has room for one.

        Raises:
            InvalidRequest: there are several, as with progress.
        """
        async with aclosing(self._answers(message, size, client, headers)) as answers:
            found = [answer async for answer in answers]
        if len(found) != 1:
            raise InvalidRequest(
                "generate", f"has {len(found)} responses", "generate_stream, or no progress"
            )
        return found[0]

    async def _server_sent(
        self,
        first: bytes,
        rest: AsyncGenerator[bytes, None],
    ) -> AsyncGenerator[bytes, None]:
        """The answers as server-sent events; an error behind the first one is one of them."""
        try:
            async with aclosing(rest) as answers:
                yield b"data: %b\n\n" % first
                async for answer in answers:
                    yield b"data: %b\n\n" % answer
        except (MaskserveError, Failure) as error:
            yield b"data: %b\n\n" % error_json(error)

    async def _answers(
        self,
        message: ModelRequest,
        size: int,
        client: KeyHolder,
        headers: dict[str, str],
    ) -> AsyncGenerator[bytes, None]:
        """Each answer as JSON."""
        if not self._front.models[message.head.model_name].decoupled:
            answer = await self._front.infer(message, size, client, headers, None, "generate")
            yield await self._turns.run(client, len(answer), _as_json, answer)
            return
        stream = self._front.stream(message, size, client, headers, None, "generate")
        async with aclosing(stream) as answers:
            async for raw in answers:
                if told := await self._turns.run(client, len(raw), _event_as_json, raw):
                    yield told


def _as_json(answer: bytes) -> bytes:
    return generate_response(pb.ModelInferResponse.FromString(answer))


def _event_as_json(raw: bytes) -> bytes:
    """A message of a stream; empty where it has no outputs."""
    response = pb.ModelStreamInferResponse.FromString(raw).infer_response
    return generate_response(response) if response.outputs else b""


def _checked_infer(
    models: Mapping[str, Contract], model: str, version: str, body: bytes, split: int | None
) -> tuple[ModelRequest, Wanted]:
    message, wanted = infer_request(model, version, body, split)
    check_request(message, models)
    return message, wanted


def _checked_generate(
    models: Mapping[str, Contract], model: str, version: str, body: bytes
) -> ModelRequest:
    message = generate_request(model, version, body, models)
    check_request(message, models)
    return message


async def first_of(answers: AsyncGenerator[T, None]) -> T:
    """The first answer; the generator is closed if there is none.

    Raises:
        EngineFailed: the stream ended without one.
    """
    try:
        return await anext(answers)
    except StopAsyncIteration:
        raise EngineFailed("the stream ended before the answer") from None
    except BaseException:
        await answers.aclose()
        raise


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """What `work` gives; it is cancelled when the client leaves.

    Raises:
        ClientDisconnect: the client left.
    """
    task = asyncio.create_task(work)
    gone = asyncio.create_task(_disconnected(request))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        for each in (task, gone):
            each.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def model_of(request: Request) -> tuple[str, str]:
    """Name and version of the path; empty where it has none."""
    return request.path_params.get("model", ""), request.path_params.get("version", "")


def _headers(request: Request) -> dict[str, str]:
    return dict(request.headers.items())
