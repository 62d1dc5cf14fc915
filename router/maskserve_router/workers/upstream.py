"""gRPC calls to one worker, as bytes, so that no message is parsed or encoded again."""

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
    # Otherwise routers of one process, as in tests, would share connections.
    ("grpc.use_local_subchannel_pool", 1),
)


class Upstream:
    """Calls one worker's gRPC port."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.aio.insecure_channel(address, OPTIONS)
        # Control requests have a connection of their own, so that pictures do not delay them.
        self._control_channel = grpc.aio.insecure_channel(address, OPTIONS)
        self._infer = self._channel.unary_unary(f"/{SERVICE}/ModelInfer")
        self._infer_control = self._control_channel.unary_unary(f"/{SERVICE}/ModelInfer")
        self._stream = self._channel.stream_stream(f"/{SERVICE}/ModelStreamInfer")

    def infer(
        self, request: bytes, timeout: float | None = None, metadata: Metadata = ()
    ) -> grpc.aio.UnaryUnaryCall[bytes, bytes]:
        return self._infer(request, timeout=timeout, metadata=metadata)

    def stream(
        self, request: bytes, timeout: float | None = None, metadata: Metadata = ()
    ) -> grpc.aio.StreamStreamCall[bytes, bytes]:
        """Start a stream of one request."""

        async def requests() -> AsyncIterator[bytes]:
            yield request

        return self._stream(requests(), timeout=timeout, metadata=metadata)

    async def call(self, method: str, request: bytes, timeout: float) -> bytes:
        """Make any other unary call of the service and return the answer.

        Raises:
            grpc.aio.AioRpcError: the call failed.
        """
        answer: bytes = await self._control_channel.unary_unary(f"/{SERVICE}/{method}")(
            request, timeout=timeout
        )
        return answer

    async def control(self, request: bytes, timeout: float) -> bytes:
        """Run an operation of the model `control` and return its result as JSON.

        `request` comes from `control_request`.

        Raises:
            grpc.aio.AioRpcError: the call failed.
        """
        answer = await self._infer_control(request, timeout=timeout)
        return bytes(bytes_tensor.outputs(pb.ModelInferResponse.FromString(answer))["RESULT"])

    async def close(self, grace_s: float | None = None) -> None:
        """Close the connections. Calls under way end at once, or after `grace_s` seconds."""
        await self._channel.close(grace_s)
        await self._control_channel.close()
