"""Tensors and errors between Triton's API and plain values."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from maskserve_common.contracts.meta import failed_meta
from maskserve_common.contracts.tensors import Tensor, text
from maskserve_common.errors import (
    AdapterNotFound,
    Cancelled,
    DeadlineExceeded,
    EngineFailed,
    InvalidRequest,
    MaskserveError,
    Overloaded,
    Refused,
    TemplateNotFound,
    guarded,
    hidden,
    split_code,
)
from maskserve_common.logs import about

log = logging.getLogger("maskserve")
Outputs = dict[str, Any]
"""Values of a response's tensors, by name."""

# Our code -> attribute of pb_utils.TritonError. TRITON-2.51: there is no code for a deadline or an
# exhausted resource; UNAVAILABLE is the nearest that says "another time may do".
_TRITON_CODES = {
    InvalidRequest.code: "INVALID_ARG",
    TemplateNotFound.code: "NOT_FOUND",
    AdapterNotFound.code: "NOT_FOUND",
    Refused.code: "INVALID_ARG",
    Overloaded.code: "UNAVAILABLE",
    DeadlineExceeded.code: "UNAVAILABLE",
    Cancelled.code: "CANCELLED",
    EngineFailed.code: "INTERNAL",
}
# What Triton's wrappers put behind a Python model's message.
_TRACE_MARKS = ("\n\nAt:", "Traceback (most recent call last)")


class RelayedError(MaskserveError):
    """An error of another model, with that model's code and message."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


def read_bytes(api: Any, request: Any, name: str) -> bytes:
    """The one element of a BYTES tensor, copied out of Triton's memory.

    Raises:
        InvalidRequest: there is no such tensor, or it has not exactly one element.
    """
    [value] = read_elements(api, request, text(name))
    return value


def read_elements(api: Any, request: Any, declared: Tensor) -> list[bytes]:
    """Return copies of all elements of a BYTES tensor. An absent optional one has no elements, or
    one without bytes if it must have one.

    Raises:
        InvalidRequest: it is missing, or its number of elements is not the declared one.
    """
    [size] = declared.dims
    tensor = api.get_input_tensor_by_name(request, declared.name)
    if tensor is None:
        if declared.optional:
            return [b""] * max(size, 0)
        raise InvalidRequest(declared.name, "is missing", f"a BYTES tensor of shape [{size}]")
    values = tensor.as_numpy().reshape(-1)
    if size not in (-1, values.size):
        shape = f"a BYTES tensor of shape [{size}]"
        raise InvalidRequest(declared.name, f"has {values.size} elements", shape)
    return [value.encode() if isinstance(value, str) else bytes(value) for value in values]


def read_array(
    api: Any, request: Any, name: str, dtype: type[np.generic], *, ndim: int
) -> npt.NDArray[Any]:
    """A numeric tensor, copied: Triton's memory is reused once `execute` returns.

    Raises:
        InvalidRequest: absent, or of another type or rank.
    """
    return np.array(view_array(api, request, name, dtype, ndim=ndim))


def view_array(
    api: Any, request: Any, name: str, dtype: type[np.generic], *, ndim: int
) -> npt.NDArray[Any]:
    """Return a view of an input in Triton's memory, for models that answer before `execute`
    returns.

    Raises:
        InvalidRequest: absent, or of another type or rank.
    """
    tensor = api.get_input_tensor_by_name(request, name)
    if tensor is None:
        raise InvalidRequest(name, "is missing")
    array: npt.NDArray[Any] = tensor.as_numpy()
    if array.dtype != np.dtype(dtype) or array.ndim != ndim:
        raise InvalidRequest(
            name, f"is {array.dtype}{list(array.shape)}", f"{np.dtype(dtype).name} of rank {ndim}"
        )
    return array


def read_array_or_none(
    api: Any, request: Any, name: str, dtype: type[np.generic], *, ndim: int
) -> npt.NDArray[Any] | None:
    """Return the array that `read_array` returns; None: the tensor is absent."""
    if api.get_input_tensor_by_name(request, name) is None:
        return None
    return read_array(api, request, name, dtype, ndim=ndim)


def tensor(api: Any, name: str, value: npt.NDArray[Any] | bytes | list[bytes]) -> Any:
    """A Triton tensor of an array, or of bytes elements."""
    if isinstance(value, np.ndarray):
        return api.Tensor(name, np.ascontiguousarray(value))
    elements = [value] if isinstance(value, bytes) else value
    cells = np.empty(len(elements), np.object_)
    cells[:] = elements
    return api.Tensor(name, cells)


def named_tensors(api: Any, outputs: Mapping[str, npt.NDArray[Any] | bytes]) -> list[Any]:
    """Tensors of these names and values, of a response or a request."""
    return [tensor(api, name, value) for name, value in outputs.items()]


def response(api: Any, outputs: Mapping[str, npt.NDArray[Any] | bytes]) -> Any:
    """A Triton response that carries `outputs`, to be returned from `execute`."""
    return api.InferenceResponse(named_tensors(api, outputs))


def error_response(api: Any, error: MaskserveError) -> Any:
    """A Triton response that carries `error`, with the nearest of Triton's codes."""
    code = getattr(api.TritonError, _TRITON_CODES[error.code])
    return api.InferenceResponse(output_tensors=[], error=api.TritonError(str(error), code))


def failed_event(meta: bytes, error: Exception) -> bytes:
    """Return META that reports an event of the denoiser's whose decoding failed.

    A Triton error would not arrive before the edit's last event has gone, which may be held back
    until this event arrives (acks.py).
    """
    try:
        request_id = str(json.loads(meta)["request_id"])
    except (ValueError, KeyError, TypeError):
        request_id = ""  # not an event of the denoiser's
    return failed_meta(guarded(request_id, error), request_id)


def relayed(text: str, request_id: str) -> MaskserveError:
    """Return another model's error in a form for clients: clean, with its code, without trace.

    Triton wraps messages ("in ensemble …"), and an uncaught Python exception arrives with its
    stack.
    """
    code, message = split_code(text)
    if f"[{code}]" not in text or any(mark in text for mark in _TRACE_MARKS):
        log.error("a model's error: %s", text, extra=about(request_id))
        return hidden(text, request_id)
    return RelayedError(code, message.strip())


def output(api: Any, answer: Any, name: str) -> bytes:
    """Return one BYTES output of another model's response; empty if it is missing."""
    named_tensor = api.get_output_tensor_by_name(answer, name)
    if named_tensor is None:
        return b""
    values: Sequence[Any] = named_tensor.as_numpy().reshape(-1)
    return bytes(values[0]) if len(values) else b""
