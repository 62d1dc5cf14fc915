"""A small stand-in for triton_python_backend_utils, strict where Triton is.

Triton crashes when a request is asked for its cancellation after its final response. Here that and
every other misuse goes to `violations`, which tests check.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from maskserve_common.contracts.request import AcceptedEdit
from maskserve_common.contracts.tensors import CONTRACTS

GAUGE, COUNTER, HISTOGRAM = range(3)
TYPES = {np.dtype(np.uint8), np.dtype(np.float32), np.dtype(np.object_)}


class Tensor:
    def __init__(self, name: str, array: np.ndarray) -> None:
        if array.dtype not in TYPES:
            raise TypeError(f"{name}: {array.dtype} is no tensor of ours")
        self._name, self._array = name, array

    def name(self) -> str:
        return self._name

    def as_numpy(self) -> np.ndarray:
        return self._array


class TritonError:
    INTERNAL, INVALID_ARG, NOT_FOUND, UNAVAILABLE, CANCELLED = range(5)

    def __init__(self, message: str, code: int = INTERNAL) -> None:
        self._message, self._code = message, code

    def message(self) -> str:
        return self._message

    def code(self) -> int:
        return self._code


class InferenceResponse:
    def __init__(
        self, output_tensors: list[Tensor] | None = None, error: TritonError | None = None
    ) -> None:
        self._tensors, self._error = output_tensors or [], error

    def output_tensors(self) -> list[Tensor]:
        return self._tensors

    def has_error(self) -> bool:
        return self._error is not None

    def error(self) -> TritonError | None:
        return self._error

    def text(self, name: str) -> bytes:
        """One BYTES output, for tests."""
        return bytes(next(t for t in self._tensors if t.name() == name).as_numpy()[0])


class Sender:
    """A response sender that keeps what is sent."""

    def __init__(self, violations: list[str]) -> None:
        self.sent: list[InferenceResponse] = []
        self.cancel = threading.Event()
        self.finished = threading.Event()
        self._violations = violations
        self._ended = False

    def send(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
        if self._ended:
            self._violations.append("a response after the final one")
            return
        if response is not None:
            self.sent.append(response)
        if flags == FakeTriton.TRITONSERVER_RESPONSE_COMPLETE_FINAL:
            self._ended = True
            self.finished.set()

    def is_cancelled(self) -> bool:
        if self._ended:
            self._violations.append("is_cancelled after the final response: Triton would crash")
        return self.cancel.is_set()

    def wait(self, timeout: float = 60.0) -> InferenceResponse:
        """Wait for the final response, for tests."""
        assert self.finished.wait(timeout), "no final response"
        return self.sent[-1]


class Trace:
    def __init__(self, context: str | None) -> None:
        self._context = context

    def get_context(self) -> str | None:
        return self._context


class Request:
    """A request as a model's `execute` receives it."""

    def __init__(self, triton: FakeTriton, parameters: str = "", **tensors: Any) -> None:
        self.tensors = {name: as_tensor(name, value) for name, value in tensors.items()}
        self.sender = Sender(triton.violations)
        self._parameters = parameters
        self.trace_context: str | None = None
        """JSON with `traceparent`; None for a request without a trace."""
        self.timeout_us = 0

    def get_response_sender(self) -> Sender:
        return self.sender

    def parameters(self) -> str:
        return self._parameters

    def timeout(self) -> int:
        """KServe's parameter `timeout`, in microseconds; 0 for none."""
        return self.timeout_us

    def trace(self) -> Trace:
        return Trace(self.trace_context)


Model = Callable[["Call"], Iterable[InferenceResponse]]


class Call:
    """A request of one model to another (BLS)."""

    def __init__(
        self,
        triton: FakeTriton,
        model_name: str,
        requested_output_names: list[str],
        inputs: list[Tensor],
        parameters: dict[str, Any] | None = None,
    ) -> None:
        self.model = model_name
        self.outputs = requested_output_names
        self.tensors = {tensor.name(): tensor for tensor in inputs}
        self.parameters = parameters or {}
        self._triton = triton

    def exec(self, decoupled: bool = False) -> Any:
        """The responses of a decoupled model, or the single response of another model."""
        response = CONTRACTS.get(self.model)  # an operator's model answers once
        assert decoupled == (response is not None and response.decoupled), (
            "Triton refuses the other way"
        )
        self._triton.calls.append(self)
        answers = iter(self._triton.models[self.model](self))
        return answers if decoupled else next(answers)

    def json(self, name: str) -> Any:
        return json.loads(self.tensors[name].as_numpy()[0])

    def accepted(self) -> AcceptedEdit:
        return AcceptedEdit.from_json(self.tensors["ACCEPTED"].as_numpy()[0])


class Metric:
    """A metric. Calls that do not fit its kind fail, as in Triton."""

    def __init__(self, kind: int, labels: dict[str, str], buckets: list[float] | None) -> None:
        assert (kind == HISTOGRAM) == bool(buckets), "histograms have buckets, others have none"
        assert buckets is None or buckets == sorted(set(buckets)), "buckets must grow"
        self.kind, self.labels, self.value = kind, labels, 0.0
        self.observed: list[float] = []

    def set(self, value: float) -> None:
        assert self.kind == GAUGE
        self.value = value

    def increment(self, value: float) -> None:
        assert self.kind != HISTOGRAM
        assert value >= 0
        self.value += value

    def observe(self, value: float) -> None:
        assert self.kind == HISTOGRAM
        self.observed.append(value)


class FakeTriton:
    """The API of one process. Pass it as `api`, or put it in sys.modules for a `model.py`."""

    TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1
    Tensor = Tensor
    TritonError = TritonError
    InferenceResponse = InferenceResponse

    def __init__(self) -> None:
        self.violations: list[str] = []
        self.calls: list[Call] = []
        self.models: dict[str, Model] = {}
        self.metrics: dict[str, list[Metric]] = {}
        self.kinds: dict[str, int] = {}
        triton = self

        class MetricFamily:
            GAUGE, COUNTER, HISTOGRAM = GAUGE, COUNTER, HISTOGRAM

            def __init__(self, name: str, description: str, kind: int) -> None:
                # Triton returns the same family when a name is registered again.
                self._kind = triton.kinds.setdefault(name, kind)
                assert self._kind == kind, f"{name} is of another kind"
                self._list = triton.metrics.setdefault(name, [])

            def Metric(  # noqa: N802 (Triton's name)
                self, labels: dict[str, str], buckets: list[float] | None = None
            ) -> Metric:
                metric = Metric(self._kind, labels, buckets)
                self._list.append(metric)
                return metric

        self.MetricFamily = MetricFamily

    def InferenceRequest(self, **arguments: Any) -> Call:  # noqa: N802 (Triton's name)
        return Call(self, **arguments)

    def request(self, parameters: str = "", **tensors: Any) -> Request:
        return Request(self, parameters, **tensors)

    @staticmethod
    def get_input_tensor_by_name(request: Request, name: str) -> Tensor | None:
        return request.tensors.get(name)

    @staticmethod
    def get_output_tensor_by_name(response: InferenceResponse, name: str) -> Tensor | None:
        return next((t for t in response.output_tensors() if t.name() == name), None)

    def calls_of(self, model: str) -> list[Call]:
        return [call for call in self.calls if call.model == model]


def as_tensor(name: str, value: Any) -> Tensor:
    """A tensor from an array, or from one bytes element."""
    if isinstance(value, bytes):
        cell = np.empty(1, np.object_)
        cell[0] = value
        value = cell
    return Tensor(name, value)


def reply(**outputs: Any) -> InferenceResponse:
    return InferenceResponse([as_tensor(name, value) for name, value in outputs.items()])


def failure(message: str) -> InferenceResponse:
    return InferenceResponse(error=TritonError(message))
