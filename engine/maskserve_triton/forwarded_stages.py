"""The encoder or the decoder of a worker whose stages a service runs (`[stages] service`).

The service is a Triton with the models `encoder` and `decoder`. The worker's models forward each
request to the service's model of the same name and return its response. So Triton batches requests
of several workers as it does those of one (`Contract.together`), and edits of all workers share the
service's caches.

If the service ends, the supervisor restarts it, and the worker sends the lost requests again, since
both stages are functions of their inputs. `execute` returns before the responses, so that no
request waits for another.
"""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

import grpc
import numpy as np
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceStub

from maskserve_common import transport
from maskserve_common.config import Config, ConfigError, Stage
from maskserve_common.contracts import bytes_tensor
from maskserve_common.contracts.postprocess_context import NOTHING, PostprocessContext, request_in
from maskserve_common.contracts.tensors import CONTRACTS
from maskserve_common.errors import MaskserveError, Overloaded, guarded, has_code
from maskserve_common.files.stages import NO_ANSWER, PRIMING_PROMPT_FILE, StageOutages
from maskserve_common.files.store import FileStore
from maskserve_common.tracing import TRACEPARENT, parent_of
from maskserve_triton.answer import Answer, answer_all
from maskserve_triton.stage_requests import NO_PIXELS, PRIMING_PROMPT, REVISION
from maskserve_triton.tensor_io import Outputs, failed_event, relayed, view_array
from maskserve_triton.together import batched

log = logging.getLogger("maskserve")

_NO_EDIT = {
    "PIXELS": NO_PIXELS,
    "EDIT_MASK": np.zeros((0, 0), np.uint8),
    "CONTROLS": np.zeros((0, 0, 0, 3), np.uint8),
}
_DTYPES: dict[str, type[np.generic]] = {"UINT8": np.uint8, "FP32": np.float32, "BYTES": np.object_}
_THREADS = 16
"""Most requests at the service at a time: twice as many as one `execute` takes."""
_RETRY_S = 0.1
_PING_EVERY_S = 0.5
_PING_TIMEOUT_S = 2.0
_LOG_EVERY_S = 10.0
_NO_SERVICE = (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.UNIMPLEMENTED)
"""Status codes of a server that is no stage service."""


class StageService:
    """One model of a service; may be used from any thread.

    Args:
        config: configuration of the worker.
        stage: name of the model.
        revision: digest of the stages that the worker needs.
    """

    def __init__(self, config: Config, stage: Stage, revision: str) -> None:
        stages = config.stages
        self._url, self._stage, self._revision = stages.service, stage, revision
        self._patience_s, self._limit_s = stages.service_timeout_s, config.engine.stuck_timeout_s
        self._channel = grpc.insecure_channel(self._url, transport.SERVICE)
        self._stub = GRPCInferenceServiceStub(self._channel)
        self._outages = StageOutages(config)
        self._outages.mark(stage, lost=False)
        self._is_lost = False
        self._closing = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name=f"{stage}-service", daemon=True)

    def watch(self) -> None:
        """Start to watch the service and to report its outages."""
        self._watcher.start()

    def close(self) -> None:
        """Close the connection; calls under way end with an error."""
        self._closing.set()
        self._channel.close()
        if self._watcher.ident is not None:
            self._watcher.join()

    def request(self, inputs: Outputs, parent: str = "") -> Any:
        """Return a request to the model.

        Args:
            inputs: arrays with their batch dimension.
            parent: parent span of the call; empty: none.
        """
        infer_request = pb.ModelInferRequest(model_name=self._stage)
        infer_request.parameters[REVISION].string_param = self._revision
        if parent:
            infer_request.parameters[TRACEPARENT].string_param = parent
        for declared in CONTRACTS[self._stage].inputs:
            value = inputs[declared.name]
            infer_request.inputs.add(name=declared.name, datatype=declared.dtype, shape=value.shape)
            is_bytes = declared.dtype == "BYTES"
            raw = bytes_tensor.pack(value.reshape(-1)) if is_bytes else value.tobytes()
            infer_request.raw_input_contents.append(raw)
        return infer_request

    def call(self, request: Any, *, patiently: bool = False) -> Outputs:
        """Return the model's outputs, with their batch dimension. Blocks.

        Args:
            request: a request that `request` has built.
            patiently: whether to repeat the call without limit while the service does not answer.

        Raises:
            MaskserveError: the model's own error.
            Overloaded: the service does not answer any more.
            ConfigError: the server has no such model.
        """
        begin, warned_at_s = 0.0, -_LOG_EVERY_S
        while not self._closing.is_set():
            try:
                return _outputs(self._stub.ModelInfer(request, timeout=self._limit_s))
            except grpc.RpcError as error:
                code, details = error.code(), error.details() or ""
                if has_code(details):
                    raise relayed(details, "") from None
                if code in _NO_SERVICE:
                    problem = f"[stages] service: {self._url} has no {self._stage} ({details})"
                    raise ConfigError(problem) from None
                if self._closing.is_set():
                    break
                now_s = time.monotonic()
                begin = begin or now_s
                if patiently and now_s - warned_at_s > _LOG_EVERY_S:
                    warned_at_s = now_s
                    log.warning("waiting for the stage service at %s: %s", self._url, code.name)
                is_over = self._is_lost or now_s - begin > self._patience_s
                if not patiently and (is_over or code is grpc.StatusCode.DEADLINE_EXCEEDED):
                    raise Overloaded(NO_ANSWER) from None
            except ValueError:  # the channel was closed
                if not self._closing.is_set():
                    raise
            self._closing.wait(_RETRY_S)
        raise Overloaded("the worker is stopping")

    def _watch(self) -> None:
        """Ping the service, so that a worker without edits also notices an outage."""
        last_ready_s, was_ready = time.monotonic(), True
        ready_request = pb.ModelReadyRequest(name=self._stage)
        while not self._closing.wait(_PING_EVERY_S):
            try:
                is_ready = self._stub.ModelReady(ready_request, timeout=_PING_TIMEOUT_S).ready
            except grpc.RpcError:
                is_ready = False
            except ValueError:
                return  # the channel is closed
            if is_ready != was_ready:
                was_ready = is_ready
                state_text = "is back" if is_ready else "does not answer"
                log.warning("the stage service at %s %s", self._url, state_text)
            now_s = time.monotonic()
            last_ready_s = now_s if is_ready else last_ready_s
            is_lost = now_s - last_ready_s > self._patience_s
            if is_lost != self._is_lost:
                self._is_lost = is_lost
                self._outages.mark(self._stage, lost=is_lost)


class ForwardedStage(ABC):
    """A model of a worker that forwards its requests.

    Args:
        api: triton_python_backend_utils.
        config: configuration of the worker.
        revision: digest of the stages that its model has.

    Raises:
        ConfigError: there is no such service, or it has another model's stages.
    """

    stage: ClassVar[Stage]

    def __init__(self, api: Any, config: Config, revision: str) -> None:
        self._api = api
        self._service = StageService(config, self.stage, revision)
        self._pool = ThreadPoolExecutor(_THREADS, f"{self.stage}-forward")
        try:
            self._open(config)
        except MaskserveError as error:
            raise ConfigError(f"[stages] service: {error.message}") from None
        self._service.watch()

    def execute(self, requests: list[Any]) -> None:
        """Forward requests; each is answered once the service has answered."""
        answer_all(self._api, requests, self._take)

    def close(self) -> None:
        """Stop; requests under way get an error."""
        self._service.close()
        self._pool.shutdown()

    @abstractmethod
    def _open(self, config: Config) -> None:
        """Check that the service has everything the stage needs, before the worker is ready."""

    @abstractmethod
    def _take(self, request: Any, answer: Answer) -> None:
        """Forward a request, or answer it."""

    def _inputs(self, request: Any) -> Outputs:
        """Return a request's input arrays, which are views of Triton's memory: they are valid until
        `execute` returns.
        """
        contract = CONTRACTS[self.stage]
        return {
            declared.name: view_array(
                self._api,
                request,
                declared.name,
                _DTYPES[declared.dtype],
                ndim=1 + len(declared.dims),
            )
            for declared in contract.inputs
        }

    def _forward(
        self,
        request: Any,
        inputs: Outputs,
        finish: Callable[[Outputs], object],
        fail: Callable[[MaskserveError], object],
    ) -> None:
        infer_request = self._service.request(inputs, parent_of(request))

        def forward() -> None:
            try:
                finish(self._service.call(infer_request))
            except Exception as error:
                fail(guarded("", error))

        self._pool.submit(forward)


class ForwardedEncoder(ForwardedStage):
    """When it opens, it waits for the service and writes the priming prompt for the denoiser."""

    stage = "encoder"

    def _open(self, config: Config) -> None:
        infer_request = self._service.request(batched({**_NO_EDIT, "REQUEST": PRIMING_PROMPT}))
        prompt = self._service.call(infer_request, patiently=True)["CONDITIONING"]
        FileStore(config.runtime_dir).write(PRIMING_PROMPT_FILE, prompt.tobytes())

    def _take(self, request: Any, answer: Answer) -> None:
        self._forward(request, self._inputs(request), answer.finish, answer.fail)


class ForwardedDecoder(ForwardedStage):
    """Answers events without latents itself. It forwards CONTEXT without the source's pixels, which
    the decoder does not read.
    """

    stage = "decoder"

    def _open(self, config: Config) -> None:
        """Do nothing: the encoder has waited for the service."""

    def _take(self, request: Any, answer: Answer) -> None:
        inputs = self._inputs(request)
        meta, context = inputs["META"].reshape(-1)[0], np.array(inputs["CONTEXT"])
        if not inputs["LATENTS"].size:
            answer.finish({**batched({"PIXELS": NO_PIXELS, "META": meta}), "CONTEXT": context})
            return
        stripped_context = PostprocessContext(
            request_in(context[0]), b"", b"", decoded=False
        ).pack()

        def finish(outputs: Outputs) -> None:
            answer.finish({**outputs, "CONTEXT": context})

        def fail(error: MaskserveError) -> None:
            outputs = {"PIXELS": NO_PIXELS, "META": failed_event(meta, error), "CONTEXT": NOTHING}
            answer.finish(batched(outputs))

        self._forward(request, {**inputs, "CONTEXT": stripped_context[None]}, finish, fail)


def _outputs(answer: Any) -> Outputs:
    """Return the outputs of a ModelInferResponse, with their batch dimension."""
    outputs: Outputs = {}
    for declared, raw in zip(answer.outputs, answer.raw_output_contents, strict=True):
        if declared.datatype == "BYTES":
            elements = bytes_tensor.elements(raw, most=1)
            outputs |= batched({declared.name: elements[0]})
        else:
            array = np.frombuffer(raw, _DTYPES[declared.datatype])
            outputs[declared.name] = array.reshape(declared.shape)
    return outputs
