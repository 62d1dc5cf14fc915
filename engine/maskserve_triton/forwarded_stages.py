"""The encoder or the decoder of a worker whose stages a service runs (`[stages] service`).

The service is one or several Tritons with the models `encoder` and `decoder`. The worker's models
forward each request to a model of the same name and return its response. So Triton batches requests
of several workers as it does those of one (`Contract.together`), and edits of all workers share the
service's caches.

If a Triton of the service ends, the supervisor restarts it, and the worker sends the lost requests
again, to another one if there is any (replicas.py): both stages are functions of their inputs.
`execute` returns before the responses, so that no request waits for another.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np
from tritonclient.grpc import service_pb2 as pb

from maskserve_common.config import Config, ConfigError, Stage
from maskserve_common.contracts import bytes_tensor
from maskserve_common.contracts.parameters import parameters
from maskserve_common.contracts.postprocess_context import NOTHING, PostprocessContext, request_in
from maskserve_common.contracts.tensors import CONTRACTS
from maskserve_common.errors import MaskserveError, Overloaded, guarded
from maskserve_common.files.stages import PRIMING_PROMPT_FILE, StageOutages
from maskserve_common.files.store import FileStore
from maskserve_common.files.values import ENCODING, RUN
from maskserve_common.servers.failure import Failure
from maskserve_common.tracing import TRACEPARENT
from maskserve_triton.answer import Answer, answer_all
from maskserve_triton.batched_requests import batched
from maskserve_triton.loop_thread import LoopThread
from maskserve_triton.replicas import Replicas
from maskserve_triton.stage_requests import NO_PIXELS, PRIMING_PROMPT, REVISION
from maskserve_triton.tensor_io import Outputs, failed_event, relayed, view_array

log = logging.getLogger("maskserve")
_START_S = 2.0
"""Seconds between two tries of a worker that starts before its service."""
_NO_EDIT = {
    "PIXELS": NO_PIXELS,
    "REFERENCES": np.zeros(0, np.uint8),
    "EDIT_MASK": np.zeros((0, 0), np.uint8),
    "CONTROLS": np.zeros((0, 0, 0, 3), np.uint8),
}
_NO_EVENT = {
    "LATENTS": np.zeros((0, 0, 0), np.float32),
    "META": b'{"event":"final","request_id":""}',
    "CONTEXT": NOTHING,
}
_DTYPES: dict[str, type[np.generic]] = {"UINT8": np.uint8, "FP32": np.float32, "BYTES": np.object_}
_PASSED_ON = (TRACEPARENT, RUN, ENCODING)
"""Parameters of a worker's request that the service gets."""
NO_PARAMETERS: Mapping[str, Any] = MappingProxyType({})
_AT_A_REPLICA = 16
"""Most requests at a replica at a time: twice as many as one `execute` takes."""


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
        stages, outages = config.stages, StageOutages(config)
        addresses = stages.addresses(self.stage)
        self._api, self._revision = api, revision
        self._limit_s = config.engine.stuck_timeout_s
        self._replicas = Replicas(
            addresses,
            self.stage,
            stages.service_timeout_s,
            partial(outages.mark, self.stage),
        )
        self._places = asyncio.Semaphore(_AT_A_REPLICA * len(addresses))
        self._loop = LoopThread(f"{self.stage}-forward")
        try:
            self._loop.run(self._replicas.all_polled())
            self._open(config)
        except MaskserveError as error:
            problems = [" ".join(item) for item in self._replicas.problems().items()]
            self.close()
            raise ConfigError(f"[stages] service: {'; '.join(problems) or error.message}") from None

    def execute(self, requests: list[Any]) -> None:
        """Forward requests; each is answered once the service has answered."""
        answer_all(self._api, requests, self._take)

    def close(self) -> None:
        """Stop; requests under way get an error."""
        self._loop.close(self._replicas.close)

    @abstractmethod
    def _open(self, config: Config) -> None:
        """Wait for the service, and check that it has everything the stage needs, before the worker
        is ready.
        """

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
        infer_request = self._request(inputs, parameters(request))

        async def forward() -> None:
            try:
                async with self._places:
                    outputs = await self._call(infer_request)
                await asyncio.to_thread(finish, outputs)  # Triton may make it wait
            except asyncio.CancelledError:
                fail(Overloaded("the worker is stopping"))
            except Exception as error:
                fail(guarded("", error))

        self._loop.submit(forward())

    def _request(
        self, inputs: Outputs, request_parameters: Mapping[str, Any] = NO_PARAMETERS
    ) -> bytes:
        """Return an encoded request to the service's model.

        Args:
            inputs: arrays with their batch dimension.
            request_parameters: parameters of the worker's request.
        """
        infer_request = pb.ModelInferRequest(model_name=self.stage)
        infer_request.parameters[REVISION].string_param = self._revision
        for name in _PASSED_ON:
            if value := request_parameters.get(name):
                infer_request.parameters[name].string_param = str(value)
        for declared in CONTRACTS[self.stage].inputs:
            value = inputs[declared.name]
            infer_request.inputs.add(name=declared.name, datatype=declared.dtype, shape=value.shape)
            is_bytes = declared.dtype == "BYTES"
            raw = bytes_tensor.pack(value.reshape(-1)) if is_bytes else value.tobytes()
            infer_request.raw_input_contents.append(raw)
        encoded: bytes = infer_request.SerializeToString()
        return encoded

    async def _call(self, request: bytes) -> Outputs:
        """Return the outputs of the service's model, with their batch dimension.

        Args:
            request: a request that `_request` has built.

        Raises:
            MaskserveError: as `Replicas.call`.
        """
        try:
            answer = await self._replicas.call(request, self._limit_s)
        except Failure as failure:
            raise relayed(failure.details, "") from None
        return _outputs(pb.ModelInferResponse.FromString(answer))

    async def _first(self, request: bytes) -> Outputs:
        """Return the outputs of `_call` once a service answers."""
        while True:
            try:
                return await self._call(request)
            except Overloaded:
                log.warning("waiting for a server of the %s", self.stage)
                await asyncio.sleep(_START_S)


class ForwardedEncoder(ForwardedStage):
    """When it opens, it waits for the service and writes the priming prompt for the denoiser."""

    stage = "encoder"

    def _open(self, config: Config) -> None:
        infer_request = self._request(batched({**_NO_EDIT, "REQUEST": PRIMING_PROMPT}))
        prompt = self._loop.run(self._first(infer_request))["CONDITIONING"]
        FileStore(config.runtime_dir).write(PRIMING_PROMPT_FILE, prompt.tobytes())

    def _take(self, request: Any, answer: Answer) -> None:
        self._forward(request, self._inputs(request), answer.finish, answer.fail)


class ForwardedDecoder(ForwardedStage):
    """Answers events without latents itself. It forwards CONTEXT without the source's pixels, which
    the decoder does not read.
    """

    stage = "decoder"

    def _open(self, config: Config) -> None:
        self._loop.run(self._first(self._request(batched(_NO_EVENT))))

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
