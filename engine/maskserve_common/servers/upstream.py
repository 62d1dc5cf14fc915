"""gRPC calls to one Triton, as bytes, so that no message is parsed or encoded again."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager

import grpc.aio
from tritonclient.grpc import service_pb2 as pb

from maskserve_common import transport
from maskserve_common.contracts import bytes_tensor
from maskserve_common.servers.failure import Failure

SERVICE = "inference.GRPCInferenceService"


@contextmanager
def failures() -> Iterator[None]:
    """Turn gRPC's error of a call into Failure."""
    try:
        yield
    except grpc.aio.AioRpcError as error:
        raise Failure(error.code(), error.details() or "") from None


class Upstream:
    """Calls the gRPC port of one Triton: a worker or a node server."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.aio.insecure_channel(address, transport.SERVICE)
        # Control requests have a connection of their own, so that pictures do not delay them.
        self._control_channel = grpc.aio.insecure_channel(address, transport.SERVICE)
        self._infer = self._channel.unary_unary(f"/{SERVICE}/ModelInfer")
        self._infer_control = self._control_channel.unary_unary(f"/{SERVICE}/ModelInfer")
        self._stream = self._channel.stream_stream(f"/{SERVICE}/ModelStreamInfer")

    def infer(
        self, request: bytes, timeout: float | None = None, metadata: Sequence[tuple[str, str]] = ()
    ) -> grpc.aio.UnaryUnaryCall[bytes, bytes]:
        return self._infer(request, timeout=timeout, metadata=metadata)

    def stream(
        self, request: bytes, timeout: float | None = None, metadata: Sequence[tuple[str, str]] = ()
    ) -> grpc.aio.StreamStreamCall[bytes, bytes]:
        """Start a stream of one request."""

        async def requests() -> AsyncIterator[bytes]:
            yield request

        return self._stream(requests(), timeout=timeout, metadata=metadata)

    async def call(self, method: str, request: bytes, timeout: float) -> bytes:
        """Make any other unary call of the service and return the answer.

        Raises:
            Failure: the call failed.
        """
        with failures():
            answer: bytes = await self._control_channel.unary_unary(f"/{SERVICE}/{method}")(
                request, timeout=timeout
            )
        return answer

    async def control(self, request: bytes, timeout: float) -> bytes:
        """Run an operation of the model `control` and return its result as JSON.

        `request` comes from `control_request`.

        Raises:
            Failure: the call failed.
        """
        with failures():
            answer = await self._infer_control(request, timeout=timeout)
        return bytes(bytes_tensor.outputs(pb.ModelInferResponse.FromString(answer))["RESULT"])

    async def close(self, grace_s: float | None = None) -> None:
        """Close the connections. Calls under way end at once, or after `grace_s` seconds."""
        await self._channel.close(grace_s)
        await self._control_channel.close()
