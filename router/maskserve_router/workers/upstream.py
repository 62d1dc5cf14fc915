"""Calls to one worker, in bytes: nothing is parsed or written anew on its way through."""

from __future__ import annotations

from collections.abc import AsyncIterator

import grpc.aio
from tritonclient.grpc import service_pb2 as pb

from maskserve_common import transport
from maskserve_common.contracts import bytes_tensor
from maskserve_router.messages.forwarded_headers import Metadata

SERVICE = "inference.GRPCInferenceService"
OPTIONS = (
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    *transport.CHANNEL,
    # Routers in one process, as in tests, do not share connections.
    ("grpc.use_local_subchannel_pool", 1),
)


class Upstream:
    """One worker's gRPC port."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.aio.insecure_channel(address, OPTIONS)
        # The status is asked for on a connection of its own: pictures do not stand in its way.
        self._aside = grpc.aio.insecure_channel(address, OPTIONS)
        self._infer = self._channel.unary_unary(f"/{SERVICE}/ModelInfer")
        self._infer_aside = self._aside.unary_unary(f"/{SERVICE}/ModelInfer")
        self._stream = self._channel.stream_stream(f"/{SERVICE}/ModelStreamInfer")

    def infer(
        self, request: bytes, timeout: float | None = None, metadata: Metadata = ()
    ) -> grpc.aio.UnaryUnaryCall[bytes, bytes]:
        """Start a unary inference."""
        return self._infer(request, timeout=timeout, metadata=metadata)

    def stream(
        self, request: bytes, timeout: float | None = None, metadata: Metadata = ()
    ) -> grpc.aio.StreamStreamCall[bytes, bytes]:
        """Start a stream of one request."""

        async def requests() -> AsyncIterator[bytes]:
            yield request

        return self._stream(requests(), timeout=timeout, metadata=metadata)

    async def call(self, method: str, request: bytes, timeout: float) -> bytes:
        """Any other unary call of the service.

        Raises:
            grpc.aio.AioRpcError: it failed.
        """
        answer: bytes = await self._aside.unary_unary(f"/{SERVICE}/{method}")(
            request, timeout=timeout
        )
        return answer

    async def control(self, request: bytes, timeout: float) -> bytes:
        """An operation of the model `control`, as `control_request` has it: the JSON of its result.

        Raises:
            grpc.aio.AioRpcError: it failed.
        """
        answer = await self._infer_aside(request, timeout=timeout)
        return bytes(bytes_tensor.outputs(pb.ModelInferResponse.FromString(answer))["RESULT"])

    async def close(self, grace_s: float | None = None) -> None:
        """Calls under way end, after the grace if there is one."""
        await self._channel.close(grace_s)
        await self._aside.close()
