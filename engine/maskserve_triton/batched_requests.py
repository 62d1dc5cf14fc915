"""The `execute` of a model that takes requests together: those that arrived while it was busy.

Triton gives such a model a list, and each tensor a batch dimension of 1 (`Contract.together`). Each
request is answered as soon as its result is ready, and on its own: if one fails, the others are
still answered.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from maskserve_common.errors import guarded
from maskserve_common.tracing import Stage, Tracer, parent_of
from maskserve_triton.tensor_io import Outputs, error_response, response, view_array

T = TypeVar("T")


class BatchedRequests(Generic[T]):
    """Answers requests of Triton.

    Args:
        api: triton_python_backend_utils.
        tracer: records a span for each request.
        name: name of the span.
        read: reads the inputs of a request.
        work: yields for each, in order, its outputs or its error.
        failed: makes the outputs for an error; by default a Triton error.
        output: name of an output; if it is empty (an event that passes through), no span is
            recorded.
    """

    def __init__(
        self,
        api: Any,
        tracer: Tracer,
        name: str,
        read: Callable[[Any], T],
        work: Callable[[Sequence[T]], Iterable[Outputs | Exception]],
        failed: Callable[[Any, Exception], Outputs] | None = None,
        output: str = "",
    ) -> None:
        self._api, self._tracer, self._name = api, tracer, name
        self._read, self._work, self._failed, self._output = read, work, failed, output

    def execute(self, requests: Sequence[Any]) -> None:
        """Answer every one of them."""
        begin, accepted, items = time.time_ns(), [], []
        for request in requests:
            try:
                items.append(self._read(request))
                accepted.append(request)
            except Exception as error:
                self._answer(request, error, begin)
        results = self._results(items)
        for request in accepted:
            begin = time.time_ns()
            self._answer(request, next(results), begin)

    def _results(self, items: Sequence[T]) -> Iterator[Outputs | Exception]:
        """Yield the results of `work`; after the last one, for ever the exception it raised, or an
        error that it ended too soon.
        """
        end: Exception = RuntimeError("not all requests were worked on")
        try:
            yield from self._work(items)
        except Exception as error:
            end = error
        while True:
            yield end

    def _answer(self, request: Any, outputs: Outputs | Exception, begin: int) -> None:
        api = self._api
        if not isinstance(outputs, Exception):
            answer = response(api, batched(outputs))
        elif self._failed is None:
            answer = error_response(api, guarded("", outputs))
        else:
            answer = response(api, batched(self._failed(request, outputs)))
        end = time.time_ns()  # before the edit goes on elsewhere
        request.get_response_sender().send(answer, flags=api.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        error = outputs if isinstance(outputs, Exception) else None
        if not isinstance(outputs, Exception) and self._output and not len(outputs[self._output]):
            return
        self._tracer.record(parent_of(request), [Stage(self._name, begin, end, error=error)])


def view_item(
    api: Any, request: Any, name: str, dtype: type[np.generic], *, ndim: int
) -> npt.NDArray[Any]:
    """Return a view of an input without its batch dimension, which `ndim` does not count.

    It is read before the request is answered: Triton's memory is reused then.
    """
    item: npt.NDArray[Any] = view_array(api, request, name, dtype, ndim=ndim + 1)[0]
    return item


def batched(tensors: Outputs) -> Outputs:
    """Inputs or outputs of such a model with their batch dimension: [1, …] of arrays, [1, 1] of
    bytes.
    """
    return {
        name: value[None] if isinstance(value, np.ndarray) else np.array([[value]], np.object_)
        for name, value in tensors.items()
    }
