"""A stage service in this process: the real stages behind KServe's gRPC, as Triton runs them.

One thread per model passes waiting requests to `execute` together, up to eight at a time.
"""

from __future__ import annotations

import json
import queue
import threading
import time
from collections.abc import Mapping
from concurrent import futures
from typing import Any

import grpc
import numpy as np
from tritonclient.grpc import service_pb2, service_pb2_grpc

from maskserve_common.contracts import bytes_tensor
from maskserve_common.contracts.tensors import CONTRACTS
from tests.fakes.pb_utils import FakeTriton, Request

_DTYPES = {"UINT8": np.uint8, "FP32": np.float32}
_NAMES = {np.dtype(np.uint8): "UINT8", np.dtype(np.float32): "FP32", np.dtype(object): "BYTES"}


class StageServer:
    """Use it as a context manager.

    Args:
        api: the Triton API of the stages.
        stages: by name.
        port: 0 for a free one.
        host: address to listen at.
    """

    def __init__(
        self,
        api: FakeTriton,
        stages: Mapping[str, Any],
        port: int = 0,
        host: str = "127.0.0.1",
    ) -> None:
        self.api = api
        self.models = {name: _Model(stage) for name, stage in stages.items()}
        self._server = grpc.server(
            futures.ThreadPoolExecutor(32), options=[("grpc.so_reuseport", 0)]
        )
        service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(_Service(self), self._server)
        self.port = self._server.add_insecure_port(f"{host}:{port}")
        self.url = f"{host}:{self.port}"
        self.is_silent = threading.Event()

    def __enter__(self) -> StageServer:
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def kill(self) -> None:
        """End the server with all its requests."""
        self.is_silent.clear()
        self._server.stop(0).wait()
        for model in self.models.values():
            model.end()

    def fall_silent(self) -> None:
        """Answer nothing more, with all connections open, as a stopped process."""
        self.is_silent.set()


class _Model:
    """A model's queue and its one thread."""

    def __init__(self, stage: Any) -> None:
        self.idle = threading.Event()
        """Cleared while the model is busy; requests then wait."""
        self.idle.set()
        self.waiting: queue.Queue[Request | None] = queue.Queue()
        self.has_begun = False
        self.pending: set[Request] = set()
        """Requests that have come and are not answered."""
        self._stage = stage
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def end(self) -> None:
        self.idle.set()
        self.waiting.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (first := self.waiting.get()) is not None:
            self.has_begun = True
            self.idle.wait()
            together = [first]
            while len(together) < 8 and not self.waiting.empty():
                more = self.waiting.get()
                if more is None:
                    return
                together.append(more)
            self._stage.execute(together)


class _Service(service_pb2_grpc.GRPCInferenceServiceServicer):  # type: ignore[misc]
    def __init__(self, server: StageServer) -> None:
        self._server = server

    def ModelReady(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802
        while self._server.is_silent.is_set() and context.is_active():
            time.sleep(0.05)
        return service_pb2.ModelReadyResponse(ready=request.name in self._server.models)

    def ModelInfer(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802
        model = self._server.models.get(request.model_name)
        if model is None:
            context.abort(grpc.StatusCode.NOT_FOUND, f"unknown model: '{request.model_name}'")
        parameters = {name: value.string_param for name, value in request.parameters.items()}
        tensors = {}
        declared = {
            declaration.name: declaration for declaration in CONTRACTS[request.model_name].inputs
        }
        for declaration, raw in zip(request.inputs, request.raw_input_contents, strict=True):
            assert declaration.datatype == declared[declaration.name].dtype
            assert (len(declaration.shape), declaration.shape[0]) == (
                1 + len(declared[declaration.name].dims),
                1,
            )
            if declaration.datatype == "BYTES":
                array = np.empty(1, np.object_)
                array[0] = bytes(bytes_tensor.only(raw))
            else:
                array = np.frombuffer(
                    bytearray(raw), _DTYPES[declaration.datatype]
                )  # makes it writable
            tensors[declaration.name] = array.reshape(tuple(declaration.shape))
        call = self._server.api.request(json.dumps(parameters), **tensors)
        model.pending.add(call)
        model.waiting.put(call)
        try:
            while not call.sender.finished.wait(0.05) or self._server.is_silent.is_set():
                if not context.is_active():
                    context.abort(grpc.StatusCode.UNAVAILABLE, "killed")
        finally:
            model.pending.discard(call)
        reply = call.sender.sent[-1]
        if reply.has_error():
            context.abort(grpc.StatusCode.INTERNAL, reply.error().message())
        answer = service_pb2.ModelInferResponse(model_name=request.model_name)
        for tensor in reply.output_tensors():
            array = np.asarray(tensor.as_numpy())
            answer.outputs.add(name=tensor.name(), datatype=_NAMES[array.dtype], shape=array.shape)
            of_bytes = array.dtype == np.object_
            raw = bytes_tensor.pack(array.reshape(-1)) if of_bytes else array.tobytes()
            answer.raw_output_contents.append(raw)
        return answer
