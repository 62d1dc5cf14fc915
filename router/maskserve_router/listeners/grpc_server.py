"""The gRPC listener: KServe v2's service; payloads pass as bytes."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import ExitStack, aclosing
from functools import partial
from typing import Any, NoReturn, TypeAlias

import grpc
import grpc.aio
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2
from tritonclient.grpc import service_pb2 as pb

from maskserve_common import transport
from maskserve_common.contracts.keys import NO_SCOPE
from maskserve_common.errors import Cancelled, DeadlineExceeded, MaskserveError
from maskserve_common.servers.failure import Failure
from maskserve_common.servers.upstream import SERVICE
from maskserve_router.api.front import Front
from maskserve_router.api.server_calls import ServerCalls, operators_only, shared_memory_refused
from maskserve_router.config import Grpc, RouterConfig
from maskserve_router.key_holder import KeyHolder
from maskserve_router.listeners.certificates import Certificates
from maskserve_router.listeners.descriptors import connections
from maskserve_router.listeners.open_calls import OpenCall, OpenCalls
from maskserve_router.messages import failures
from maskserve_router.messages.call_context import CallContext
from maskserve_router.messages.model_request import ModelRequest

Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]
_Answers: TypeAlias = "asyncio.Queue[bytes | MaskserveError | None]"
"""Messages of a stream, then None, or the error for which the router ended it."""
_NO_REGIONS = tuple(
    f"{memory}SharedMemory{call}"
    for memory in ("System", "Cuda")
    for call in ("Status", "Unregister")
)
"""Methods that are answered as by a server without regions of shared memory."""
_OPEN = frozenset(("ServerLive", "ServerReady", "ModelReady", *_NO_REGIONS, "Check"))
"""Methods that need no key."""
_HEALTH = "grpc.health.v1.Health"
_PATIENCE_S = 30.0
_LEAST_PACE = 16 * 1024
"""Bytes per second at which a client must read a message, after `_PATIENCE_S`."""
_PER_STREAM = 64
"""Edits of one stream that may be under way; further ones are not read."""


def _ages(bounds: Grpc) -> tuple[tuple[str, int], ...]:
    age = math.ceil(1e3 * bounds.max_age_s)
    return (("grpc.max_connection_age_ms", age),) if age else ()


class GrpcServer:
    """The gRPC server at one address."""

    def __init__(
        self,
        config: RouterConfig,
        front: Front,
        calls: ServerCalls,
        open_calls: OpenCalls,
        certificates: Certificates,
    ) -> None:
        self._front, self._calls = front, calls
        self._server = grpc.aio.server(
            options=(
                ("grpc.max_send_message_length", -1),
                ("grpc.max_receive_message_length", config.http.max_body_bytes),
                ("grpc.max_metadata_size", config.http.max_header_bytes),
                ("grpc.so_reuseport", 0),
                (
                    "grpc.max_allowed_incoming_connections",
                    connections(config.grpc.max_connections),
                ),
                ("grpc.max_connection_idle_ms", int(1e3 * config.grpc.idle_s)),
                ("grpc.server_handshake_timeout_ms", int(1e3 * config.http.header_timeout_s)),
                *transport.LISTENER,
                *_ages(config.grpc),
                # A compressed message is inflated before its size can be checked.
                ("grpc.compression_enabled_algorithms_bitset", 1),
            ),
        )
        gate = _Gate(front, open_calls)
        self._server.add_generic_rpc_handlers(
            (
                gate.service(SERVICE, self._handlers()),
                gate.service(_HEALTH, {"Check": _health_check(calls)}),
            )
        )
        self._address = f"{config.listen.host}:{config.listen.grpc_port}"
        self._certificates = certificates
        self.port = config.listen.grpc_port
        """The port; 0 until it listens, if any is accepted."""

    async def start(self) -> None:
        """Start to listen.

        Raises:
            OSError: the port is not available.
        """
        try:
            self.port = (
                self._server.add_secure_port(self._address, self._certificates.for_grpc())
                if self._certificates.files
                else self._server.add_insecure_port(self._address)
            )
        except RuntimeError as error:  # gRPC raises it for an unavailable port
            raise OSError(f"gRPC cannot listen at {self._address}: {error}") from error
        await self._server.start()

    async def stop(self, grace_s: float) -> None:
        """Take no more calls; calls under way have `grace_s` seconds."""
        await self._server.stop(grace_s)

    def _handlers(self) -> dict[str, grpc.RpcMethodHandler[Any, Any]]:
        calls, keyed = self._calls, self._keyed

        async def index(request: pb.RepositoryIndexRequest, _: KeyHolder) -> Message:
            return calls.repository_index(ready=request.ready)

        handlers = {
            "ServerLive": _open(pb.ServerLiveRequest, lambda _: pb.ServerLiveResponse(live=True)),
            "ServerReady": _open(
                pb.ServerReadyRequest, lambda _: pb.ServerReadyResponse(ready=calls.ready())
            ),
            "ModelReady": _open(
                pb.ModelReadyRequest,
                lambda of: pb.ModelReadyResponse(ready=calls.model_ready(of.name, of.version)),
            ),
            "ServerMetadata": keyed(pb.ServerMetadataRequest, lambda *_: calls.server_metadata()),
            "ModelMetadata": keyed(
                pb.ModelMetadataRequest, lambda of, _: calls.model_metadata(of.name, of.version)
            ),
            "ModelConfig": keyed(
                pb.ModelConfigRequest, lambda of, _: calls.model_config(of.name, of.version)
            ),
            "ModelStatistics": keyed(
                pb.ModelStatisticsRequest,
                lambda of, client: calls.statistics(of.name, of.version, client),
            ),
            "RepositoryIndex": keyed(pb.RepositoryIndexRequest, index),
            "ModelInfer": grpc.stream_stream_rpc_method_handler(self._infer),
            "ModelStreamInfer": grpc.stream_stream_rpc_method_handler(self._stream),
        }
        handlers |= {name: _without_regions(name) for name in _NO_REGIONS}
        for name in ("SystemSharedMemoryRegister", "CudaSharedMemoryRegister"):
            handlers[name] = _refused(shared_memory_refused)
        for name in (
            "RepositoryModelLoad",
            "RepositoryModelUnload",
            "TraceSetting",
            "LogSettings",
        ):
            handlers[name] = _refused(partial(operators_only, "this call"))
        return handlers

    def _keyed(
        self, kind: type[Message], answer: Callable[[Any, KeyHolder], Awaitable[Message]]
    ) -> grpc.RpcMethodHandler[Any, Any]:
        """Return the handler of a call that needs a key, if there are keys."""

        async def handle(request: Any, context: Context) -> Message:
            return await answer(request, self._front.client(_headers(context)))

        return _unary(kind, handle)

    async def _infer(self, requests: OpenCall, context: Context) -> AsyncGenerator[bytes, None]:
        """Yield the one answer to a unary call; its memory is held until it is written."""
        headers = _headers(context)
        client, left_s = self._front.client(headers), context.time_remaining()
        with ExitStack() as exit_stack, self._front.room(client) as room:
            parsing = self._front.parse(await requests.only(), client, exit_stack)
            with requests.working():
                message = await parsing
                call_context = CallContext(client, message.size, headers, "grpc", left_s)
                yield await self._front.infer(message, call_context, room)

    async def _stream(self, requests: OpenCall, context: Context) -> AsyncGenerator[bytes, None]:
        try:
            first = await anext(requests)
        except StopAsyncIteration:
            return
        answers: _Answers = asyncio.Queue(maxsize=1)
        reader = asyncio.create_task(self._serve_all(first, requests, context, answers))
        del first  # the reader frees it
        try:
            while (answer := await answers.get()) is not None:
                if isinstance(answer, MaskserveError):
                    raise answer
                yield answer
                answers.task_done()  # it is written
        finally:
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)

    async def _serve_all(
        self, raw: bytes, requests: OpenCall, context: Context, answers: _Answers
    ) -> None:
        """Serve `raw` and each further request of the stream in a task, until the client ends the
        stream.
        """
        places = asyncio.Semaphore(_PER_STREAM)
        tasks: set[asyncio.Task[None]] = set()

        async def serve(raw: bytes) -> None:
            with requests.working():
                async with aclosing(self._events(raw, context)) as events:
                    async for event in events:
                        await answers.put(event)
                        await answers.join()

        def done(task: asyncio.Task[None]) -> None:
            tasks.discard(task)
            places.release()

        ended_for: MaskserveError | None = None
        try:
            while True:
                await places.acquire()
                task = asyncio.create_task(serve(raw))
                tasks.add(task)
                task.add_done_callback(done)
                await asyncio.sleep(0)  # its own error comes before that of the next message
                raw = await anext(requests)
        except StopAsyncIteration:  # the client sends no more
            await asyncio.gather(*tasks)
        except MaskserveError as error:
            ended_for = error
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        await answers.put(ended_for)

    async def _events(self, raw: bytes, context: Context) -> AsyncGenerator[bytes, None]:
        """Yield the messages that answer one request of a stream; an error is one of them."""
        message, exit_stack = ModelRequest(pb.ModelInferRequest()), ExitStack()
        try:
            headers = _headers(context)
            client = self._front.client(headers)
            message = await self._front.parse(raw, client, exit_stack)
            room = exit_stack.enter_context(self._front.room(client))
            left_s = context.time_remaining()
            call_context = CallContext(client, len(raw), headers, "grpc_stream", left_s)
            async with aclosing(self._front.stream(message, call_context, room)) as events:
                async for event in events:
                    yield event
        except (MaskserveError, Failure) as error:
            yield _stream_error(message.head, error)
        except Exception as error:
            yield _stream_error(message.head, failures.guarded("", error))
        finally:
            exit_stack.close()


class _Gate:
    """Admits calls at their beginning, by key and the client's share, and messages by the key's
    turn.

    A unary call is served as a stream of one message. The wait for its message is therefore counted
    here, so a client that never sends it holds no more than its share. Until that message a call
    has one task: clients may open hundreds of calls in one moment, and all others wait meanwhile.
    """

    def __init__(self, front: Front, open_calls: OpenCalls) -> None:
        self._front, self._open_calls = front, open_calls

    def service(
        self, name: str, handlers: Mapping[str, grpc.RpcMethodHandler[Any, Any]]
    ) -> grpc.GenericRpcHandler[Any, Any]:
        """Return the handler of a service whose calls pass the gate."""
        gated = {
            method: grpc.stream_stream_rpc_method_handler(
                partial(self._serve, handler, method in _OPEN),
                handler.request_deserializer,
                handler.response_serializer,
            )
            for method, handler in handlers.items()
        }
        return grpc.method_handlers_generic_handler(name, gated)

    async def _serve(
        self,
        handler: grpc.RpcMethodHandler[Any, Any],
        is_open: bool,
        _: AsyncIterator[Any],
        context: Context,
    ) -> None:
        async def read() -> Any:
            if not is_open:
                await self._front.may_read(_headers(context))
            return await context.read()

        try:
            client = self._client(context, is_open)
            with self._open_calls.enter(client, read) as call:
                if handler.stream_stream is not None:
                    async with aclosing(handler.stream_stream(call, context)) as answers:
                        async for answer in answers:
                            await _write(context, answer)
                else:
                    first = await call.only()
                    with call.working():
                        await _write(context, await handler.unary_unary(first, context))
        except (MaskserveError, Failure) as error:
            _refuse(context, error)
        except Exception as error:
            _refuse(context, failures.guarded("", error))

    def _client(self, context: Context, is_open: bool) -> str:
        """Return the client of a call: its key, or its address if no key is needed.

        Raises:
            Unauthorized: a key is needed, and the call has no known one.
        """
        client = None if is_open else self._front.client(_headers(context))
        if client is None or client.scope == NO_SCOPE:
            return str(context.peer()).rpartition(":")[0]
        return f"key {client.name}"


def _health_check(calls: ServerCalls) -> grpc.RpcMethodHandler[Any, Any]:
    """Return the handler of grpc.health.v1: serving while a worker takes edits."""

    def answer(_: Message) -> Message:
        states = health_pb2.HealthCheckResponse
        return states(status=states.SERVING if calls.ready() else states.NOT_SERVING)

    return _open(health_pb2.HealthCheckRequest, answer)


def _unary(
    kind: type[Message], handle: Callable[[Any, Context], Awaitable[Message]]
) -> grpc.RpcMethodHandler[Any, Any]:
    return grpc.unary_unary_rpc_method_handler(
        handle,
        request_deserializer=kind.FromString,
        response_serializer=lambda message: message.SerializeToString(),
    )


def _open(kind: type[Message], answer: Callable[[Any], Message]) -> grpc.RpcMethodHandler[Any, Any]:
    """Return the handler of a call of `_OPEN`."""

    async def handle(request: Any, _: Context) -> Message:
        return answer(request)

    return _unary(kind, handle)


def _without_regions(name: str) -> grpc.RpcMethodHandler[Any, Any]:
    """Return the handler of a method of `_NO_REGIONS`."""
    response = getattr(pb, f"{name}Response")
    return _open(getattr(pb, f"{name}Request"), lambda _: response())


def _refused(error: Callable[[], MaskserveError]) -> grpc.RpcMethodHandler[Any, Any]:
    """Return the handler of a call that always fails."""

    async def handle(_: bytes, _context: Context) -> NoReturn:
        raise error()

    return grpc.unary_unary_rpc_method_handler(handle)


def _headers(context: Context) -> dict[str, str]:
    metadata = context.invocation_metadata() or ()
    return {str(name): value for name, value in metadata if isinstance(value, str)}


async def _write(context: Context, answer: Any) -> None:
    """Send a message.

    Raises:
        Cancelled: the client is gone.
        DeadlineExceeded: the client does not read it.
    """
    size = len(answer) if isinstance(answer, bytes) else 0
    try:
        await asyncio.wait_for(context.write(answer), _PATIENCE_S + size / _LEAST_PACE)
    except (TimeoutError, asyncio.TimeoutError):
        raise DeadlineExceeded("the client does not read its answers") from None
    except grpc.aio.InternalError:  # what grpc raises where a call's connection has ended
        raise Cancelled("the client is gone") from None


def _refuse(context: Context, error: MaskserveError | Failure) -> None:
    """End the call with this error.

    `context.abort` is not used: grpc keeps its exception, and through the traceback a large
    message, long after the call.
    """
    seconds = failures.retry_after(error)
    if seconds is not None:
        context.set_trailing_metadata((("retry-after", str(seconds)),))
    context.set_code(failures.grpc_status(error))
    context.set_details(failures.text_of(error))
    failures.drop_tracebacks(error)


def _stream_error(message: pb.ModelInferRequest, error: MaskserveError | Failure) -> bytes:
    """Return an error in the form of Triton's streams: as text, with the request's id."""
    failures.drop_tracebacks(error)
    if isinstance(error, Failure) and error.message and error.coded:
        return error.message
    answer = pb.ModelStreamInferResponse(error_message=failures.text_of(error))
    answer.infer_response.id = message.id
    answer.infer_response.model_name = message.model_name
    answer.infer_response.parameters["triton_final_response"].bool_param = True
    encoded: bytes = answer.SerializeToString()
    return encoded
