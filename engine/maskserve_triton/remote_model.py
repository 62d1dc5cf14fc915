"""A model of another Triton, called over KServe's gRPC."""

from __future__ import annotations

from typing import Any

import grpc
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceStub

from maskserve_common import transport
from maskserve_common.errors import has_code
from maskserve_triton.tensor_io import relayed

_NO_MODEL = (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.UNIMPLEMENTED)
"""Status codes of a server that has no such model."""


class NoAnswer(Exception):
    """The server gave no answer, or an error that is none of the model's."""

    def __init__(self, code: grpc.StatusCode, details: str = "") -> None:
        super().__init__(f"{code.name} {details}".strip())
        self.code, self.details = code, details

    @property
    def has_no_model(self) -> bool:
        """Whether the server is there, but without the model."""
        return self.code in _NO_MODEL


class RemoteModel:
    """One connection; may be used from any thread.

    Args:
        address: HOST:PORT of the server.
        name: name of the model.
    """

    def __init__(self, address: str, name: str) -> None:
        self.address, self.name = address, name
        self._connect()

    def call(self, request: Any, limit_s: float) -> Any:
        """Return the model's `ModelInferResponse`. Blocks, at most `limit_s` seconds.

        Raises:
            MaskserveError: the model's error.
            NoAnswer: there is no answer.
        """
        try:
            return self._stub.ModelInfer(request, timeout=limit_s)
        except grpc.RpcError as error:
            raise _error(error) from None
        except ValueError as error:  # the channel is closed
            raise NoAnswer(grpc.StatusCode.CANCELLED, str(error)) from None

    def call_decoupled(self, request: Any, limit_s: float) -> Any:
        """As `call`, of a model that answers through a stream: return its first response."""
        try:
            response = next(self._stub.ModelStreamInfer(iter([request]), timeout=limit_s), None)
        except grpc.RpcError as error:
            raise _error(error) from None
        if response is None:
            raise NoAnswer(grpc.StatusCode.UNAVAILABLE, "the stream has ended")
        if response.error_message:
            raise relayed(response.error_message, "")
        return response.infer_response

    def is_ready(self, limit_s: float) -> bool:
        """Ask the server whether the model is ready. Blocks, at most `limit_s` seconds."""
        try:
            ready_request = pb.ModelReadyRequest(name=self.name)
            return bool(self._stub.ModelReady(ready_request, timeout=limit_s).ready)
        except (grpc.RpcError, ValueError):
            return False

    def reconnect(self) -> None:
        """End all calls under way, which raise NoAnswer, and connect anew."""
        channel = self._channel
        self._connect()
        channel.close()

    def close(self) -> None:
        """End all calls, which raise NoAnswer; there is no answer any more."""
        self._channel.close()

    def _connect(self) -> None:
        self._channel = grpc.insecure_channel(self.address, transport.SERVICE)
        self._stub = GRPCInferenceServiceStub(self._channel)


def _error(error: grpc.RpcError) -> Exception:
    """Return a call's error: the model's, if it has a code."""
    details = error.details() or ""
    return relayed(details, "") if has_code(details) else NoAnswer(error.code(), details)
