"""A probe that sends empty edits to a worker's fronts, to see that edits come through.

A stuck Triton still reports over HTTP that it is alive, and the engine that it is idle.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import grpc
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceStub

from maskserve_common.contracts import bytes_tensor
from maskserve_common.contracts.tensors import CONTRACTS
from maskserve_common.errors import EngineFailed, split_code
from maskserve_triton.traffic import PROBE

_EVERY_S = 10.0
# A probe that Triton lost is followed by another before the worker counts as stuck.
_TRIES = 2
_OPTIONS = (("grpc.enable_http_proxy", 0), ("grpc.use_local_subchannel_pool", 1))


class Probe:
    """Sends a probe to both fronts again and again, in a thread.

    Only silence and a front's own error count. A port that refuses, such as one with TLS, tells
    nothing.

    Args:
        grpc_url: address of the worker.
        limit_s: seconds of silence after which the worker counts as stuck.
    """

    def __init__(self, grpc_url: str, limit_s: float) -> None:
        self.rounds = 0
        """Number of rounds in which both fronts answered."""
        self.problem: str | None = None
        """The error that a front reported."""
        self.last_front = ""
        """Front that was asked last."""
        self._url = grpc_url
        self._every_s, self._timeout_s = min(_EVERY_S, limit_s / 10), limit_s / _TRIES
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="probe", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Stop asking, without waiting for an answer under way."""
        self._stop.set()

    def _run(self) -> None:
        with grpc.insecure_channel(self._url, _OPTIONS) as channel:
            stub = GRPCInferenceServiceStub(channel)
            calls = {"edit": self._unary, "edit_stream": self._stream}
            while not self._stop.wait(self._every_s):
                if all(self._answers(front, call, stub) for front, call in calls.items()):
                    self.rounds += 1

    def _answers(
        self, front: str, call: Callable[[GRPCInferenceServiceStub], str], stub: Any
    ) -> bool:
        """Return whether a front answers in time; note an error of its own."""
        self.last_front = front
        try:
            reply = call(stub)
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                return False
            reply = error.details() or ""
        if f"[{EngineFailed.code}]" in reply:
            self.problem = split_code(reply)[1]
        return True

    def _unary(self, stub: GRPCInferenceServiceStub) -> str:
        stub.ModelInfer(_request("edit"), timeout=self._timeout_s)
        return ""

    def _stream(self, stub: GRPCInferenceServiceStub) -> str:
        requests = iter((_request("edit_stream"),))
        answers = stub.ModelStreamInfer(requests, timeout=self._timeout_s)
        return "".join(answer.error_message for answer in answers)


def _request(front: str) -> pb.ModelInferRequest:
    request = pb.ModelInferRequest(model_name=front)
    request.parameters[PROBE].string_param = "1"
    for tensor in CONTRACTS[front].inputs:
        if not tensor.optional:
            bytes_tensor.add_input(request, tensor.name, [b""])
    return request
