"""The HTTP listener's application: KServe v2, /generate, and health."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import ExitStack, aclosing
from typing import Any, TypeVar

import msgspec
from google.protobuf.message import Message
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from tritonclient.grpc import service_pb2 as pb

from maskserve_core.contracts.tensors import CONTRACTS
from maskserve_core.errors import InvalidRequest, MaskserveError
from maskserve_router.admission import Admission
from maskserve_router.config import Http
from maskserve_router.edit_call import PUBLIC, UnknownModel, check_request
from maskserve_router.failures import Failure, guarded, http_status, retry_after, text_of
from maskserve_router.front import Front
from maskserve_router.json_values import values_of
from maskserve_router.kserve_http import (
    generate_request,
    generate_response,
    infer_request,
    infer_response,
)
from maskserve_router.server_calls import ServerCalls, operators_only, shared_memory_refused

JSON = "application/json"
_HEADER_LENGTH = "inference-header-content-length"
_GRACE_S = 10.0
_ACCEPTED_ENCODINGS = ("", "identity", "gzip", "deflate")
Handler = Callable[[Request], Awaitable[Response]]
T = TypeVar("T")


class HttpApp:
    """Makes the application."""

    def __init__(
        self, bounds: Http, front: Front, calls: ServerCalls, admission: Admission
    ) -> None:
        self._bounds = bounds
        self._front, self._calls, self._admission = front, calls, admission

    def app(self) -> Starlette:
        model = "/v2/models/{model}"
        versions = (model, model + "/versions/{version}")
        routes = [
            _get("/healthz", self._live),
            _get("/readyz", self._ready),
            _get("/v2", self._server),
            _get("/v2/", self._server),
            _get("/v2/health/live", self._live),
            _get("/v2/health/ready", self._ready),
            _get("/v2/models/stats", self._statistics),
            _post("/v2/repository/index", self._index),
            _any("/v2/repository/{rest:path}", self._operators),
            _any("/v2/trace/{rest:path}", self._operators),
            _any("/v2/logging", self._operators),
        ]
        for base in versions:
            routes += [
                _get(base, self._metadata),
                _get(base + "/ready", self._model_ready),
                _get(base + "/config", self._config),
                _get(base + "/stats", self._statistics),
                _post(base + "/infer", self._infer),
                _post(base + "/generate", self._generate),
                _post(base + "/generate_stream", self._generate_stream),
                _any(base + "/trace/{rest:path}", self._operators),
            ]
        for kind in ("systemsharedmemory", "cudasharedmemory"):
            for region in ("", "/region/{region}"):
                routes += [
                    _get(f"/v2/{kind}{region}/status", self._no_regions),
                    _post(f"/v2/{kind}{region}/unregister", self._unregistered),
                    _post(f"/v2/{kind}{region}/register", self._register),
                ]
        return Starlette(routes=routes)

    # Health and what is served.

    async def _live(self, _: Request) -> Response:
        return Response()

    async def _ready(self, _: Request) -> Response:
        return Response(status_code=200 if self._calls.ready() else 503)

    async def _model_ready(self, request: Request) -> Response:
        ready = self._calls.model_ready(request.path_params["model"])
        return Response(status_code=200 if ready else 400)

    async def _server(self, _: Request) -> Response:
        return _json(await self._calls.server_metadata())

    async def _metadata(self, request: Request) -> Response:
        return _json(await self._calls.model_metadata(*_model(request)))

    async def _config(self, request: Request) -> Response:
        return _json((await self._calls.model_config(*_model(request))).config)

    async def _statistics(self, request: Request) -> Response:
        return _json(await self._calls.statistics(*_model(request)))

    async def _index(self, request: Request) -> Response:
        models = self._calls.repository_index(ready=False).models
        return Response(
            msgspec.json.encode([values_of(model) for model in models]), 200, None, JSON
        )

    async def _no_regions(self, _: Request) -> Response:
        return Response(b"[]", media_type=JSON)

    async def _unregistered(self, _: Request) -> Response:
        return Response()

    async def _register(self, _: Request) -> Response:
        raise shared_memory_refused()

    async def _operators(self, request: Request) -> Response:
        raise operators_only(request.url.path)

    # Inference.

    async def _infer(self, request: Request) -> Response:
        with ExitStack() as held:
            body = await self._body(request, held)
            length = request.headers.get(_HEADER_LENGTH)
            if length is not None and not length.isdigit():
                raise InvalidRequest("Inference-Header-Content-Length", "is not a number")
            message, wanted = infer_request(
                *_model(request), body, None if length is None else int(length)
            )
            size = len(body)
            del body
            check_request(message)
            work = self._front.infer(message, size, _headers(request), None, "http")
            answer = await _while_connected(request, work)
            content, head = infer_response(answer, wanted)
            headers = {} if head is None else {_HEADER_LENGTH: str(head)}
            kind = JSON if head is None else "application/octet-stream"
            return Response(content, headers=headers, media_type=kind)

    async def _generate(self, request: Request) -> Response:
        with ExitStack() as held:
            message, size = await self._generation(request, held)
            work = self._only_answer(message, size, _headers(request))
            return Response(await _while_connected(request, work), media_type=JSON)

    async def _generate_stream(self, request: Request) -> Response:
        with ExitStack() as held:
            message, size = await self._generation(request, held)
        headers = _headers(request)
        self._front.client(headers)  # an unknown key is answered with a status, not in the stream
        events = self._server_sent(message, size, headers)
        return StreamingResponse(events, media_type="text/event-stream; charset=utf-8")

    async def _generation(
        self, request: Request, held: ExitStack
    ) -> tuple[pb.ModelInferRequest, int]:
        body = await self._body(request, held)
        model, version = _model(request)
        if model not in PUBLIC:
            raise UnknownModel(model)
        names = [tensor.name for tensor in CONTRACTS[model].inputs]
        message = generate_request(model, version, body, names)
        check_request(message)
        return message, len(body)

    async def _only_answer(
        self, message: pb.ModelInferRequest, size: int, headers: dict[str, str]
    ) -> bytes:
        """The answer of /generate, which has room for one.

        Raises:
            InvalidRequest: there are several, as with progress.
        """
        async with aclosing(self._answers(message, size, headers)) as answers:
            found = [generate_response(answer) async for answer in answers]
        if len(found) != 1:
            raise InvalidRequest(
                "generate", f"has {len(found)} responses", "generate_stream, or no progress"
            )
        return found[0]

    async def _server_sent(
        self, message: pb.ModelInferRequest, size: int, headers: dict[str, str]
    ) -> AsyncGenerator[bytes, None]:
        """The answers as server-sent events; an error is one of them."""
        try:
            async with aclosing(self._answers(message, size, headers)) as answers:
                async for answer in answers:
                    yield b"data: %b\n\n" % generate_response(answer)
        except (MaskserveError, Failure) as error:
            yield b"data: %b\n\n" % _error_json(error)

    async def _answers(
        self, message: pb.ModelInferRequest, size: int, headers: dict[str, str]
    ) -> AsyncGenerator[pb.ModelInferResponse, None]:
        if not CONTRACTS[message.model_name].decoupled:
            answer = await self._front.infer(message, size, headers, None, "generate")
            yield pb.ModelInferResponse.FromString(answer)
            return
        stream = self._front.stream(message, size, headers, None, "generate")
        async with aclosing(stream) as answers:
            async for raw in answers:
                response = pb.ModelStreamInferResponse.FromString(raw).infer_response
                if response.outputs:
                    yield response

    async def _body(self, request: Request, held: ExitStack) -> bytes:
        """The request's body, held against the bytes under way until `held` is closed.

        Its content type is not looked at: clients send JSON as forms.

        Raises:
            InvalidRequest: too long, or too slow.
            Later: too many bytes are under way.
        """
        encoding = request.headers.get("content-encoding", "").lower()
        if encoding not in _ACCEPTED_ENCODINGS:
            raise InvalidRequest("Content-Encoding", f"is {encoding[:20]}", "gzip, deflate or none")
        most, begin = self._bounds.max_body_bytes, time.monotonic()
        told = request.headers.get("content-length", "")
        if told.isdigit() and int(told) > most:
            raise InvalidRequest("body", f"is {told} bytes", f"up to {most}")
        parts: list[bytes] = []
        size = 0
        stream = aiter(request.stream())
        while True:
            allowed_s = _GRACE_S + size / max(self._bounds.min_bytes_per_s, 1)
            left = begin + allowed_s - time.monotonic()
            try:
                part = await asyncio.wait_for(anext(stream), max(left, 0.0))
            except StopAsyncIteration:
                break
            except (TimeoutError, asyncio.TimeoutError):
                raise InvalidRequest(
                    "body", f"came too slowly: {size} bytes", "a body sent without pauses"
                ) from None
            size += len(part)
            if size > most:
                raise InvalidRequest("body", f"is over {most} bytes", f"up to {most}")
            held.enter_context(self._admission.hold(len(part)))
            parts.append(part)
        body = b"".join(parts)
        if encoding in ("gzip", "deflate"):
            body = _inflated(body, most)
        return body


def _inflated(body: bytes, most: int) -> bytes:
    import zlib

    inflater = zlib.decompressobj(wbits=zlib.MAX_WBITS | 32)  # gzip and zlib, by their headers
    try:
        plain = inflater.decompress(body, most)
    except zlib.error:
        raise InvalidRequest("body", "is not compressed as Content-Encoding says") from None
    if inflater.unconsumed_tail or not inflater.eof:
        raise InvalidRequest("body", f"is cut short, or over {most} bytes when decompressed")
    return plain


async def _while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
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


def _get(path: str, handler: Handler) -> Route:
    return Route(path, _answering(handler), methods=["GET"])


def _post(path: str, handler: Handler) -> Route:
    return Route(path, _answering(handler), methods=["POST"])


def _any(path: str, handler: Handler) -> Route:
    return Route(path, _answering(handler), methods=["GET", "POST"])


def _answering(handler: Handler) -> Handler:
    """`handler`, with its errors as answers."""

    async def answer(request: Request) -> Response:
        try:
            return await handler(request)
        except ClientDisconnect:
            return Response(status_code=499)
        except (MaskserveError, Failure) as error:
            return error_response(error)
        except Exception as error:
            return error_response(guarded("", error))

    return answer


def error_response(error: MaskserveError | Failure) -> Response:
    seconds = retry_after(error)
    headers = {} if seconds is None else {"retry-after": str(seconds)}
    return Response(_error_json(error), http_status(error), headers, JSON)


def _error_json(error: MaskserveError | Failure) -> bytes:
    return msgspec.json.encode({"error": text_of(error)})


def _json(message: Message) -> Response:
    return Response(msgspec.json.encode(values_of(message)), media_type=JSON)


def _model(request: Request) -> tuple[str, str]:
    """Name and version of the path; empty where it has none."""
    return request.path_params.get("model", ""), request.path_params.get("version", "")


def _headers(request: Request) -> dict[str, str]:
    return dict(request.headers.items())
