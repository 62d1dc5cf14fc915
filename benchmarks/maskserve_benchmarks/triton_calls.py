"""Calls to a worker with Triton's own client, as any user makes them."""

from __future__ import annotations

import base64
import io
import json
import queue
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from PIL import Image
from tritonclient.utils import InferenceServerException

from maskserve_common.errors import split_code

Answer = tuple[bytes, dict[str, Any]]
"""IMAGE and META of a response."""
TIMEOUT_S = 120.0
"""Seconds to wait for a response."""

CLIENT_CANCELLED = "client cancelled"
CLIENT_TIMEOUT = "client timeout"
# The client library enforces a deadline; it has this long to report that it has passed.
_GRACE_S = 10.0


def tensors(module: Any, values: Mapping[str, bytes]) -> list[Any]:
    """Return inputs for tritonclient's `module`, grpc or http."""
    inputs = []
    for name, value in values.items():
        cell = np.empty(1, np.object_)
        cell[0] = value
        tensor = module.InferInput(name, [1], "BYTES")
        tensor.set_data_from_numpy(cell)
        inputs.append(tensor)
    return inputs


def texts(inputs: Mapping[str, bytes]) -> dict[str, str]:
    """Return an edit's inputs in a form for JSON: images in base64."""
    return {
        name: base64.b64encode(value).decode() if name in ("IMAGE", "MASK") else value.decode()
        for name, value in inputs.items()
    }


def decode(encoded: bytes) -> npt.NDArray[np.uint8]:
    """Return RGB [H, W, 3] of a response's IMAGE."""
    return np.asarray(Image.open(io.BytesIO(encoded)).convert("RGB"))


def reason(error: Exception) -> str:
    """Return why a call failed: the server's code, or the client's own reason; else the error's
    text.
    """
    if not isinstance(error, InferenceServerException):
        return CLIENT_TIMEOUT if isinstance(error, TimeoutError) else repr(error)
    text = str(error.message())
    code, _ = split_code(text)
    if f"[{code}]" in text:
        return code
    status = str(error.status())
    if "CANCELLED" in status or "cancelled by application" in text:
        return CLIENT_CANCELLED
    if "DEADLINE_EXCEEDED" in status or "timed out" in text.lower():
        return CLIENT_TIMEOUT
    return f"{status}: {text}"


class Http:
    """KServe v2 over HTTP. Triton's client binds a connection to the thread that uses it first, so
    one thread may use this object, or as many threads as `concurrency` gives connections.
    """

    def __init__(self, url: str, timeout_s: float = TIMEOUT_S, concurrency: int = 1) -> None:
        self._client = triton_http.InferenceServerClient(
            url.removeprefix("http://"),
            concurrency=concurrency,
            connection_timeout=TIMEOUT_S,
            network_timeout=timeout_s,
        )

    def edit(self, inputs: Mapping[str, bytes]) -> Answer:
        return answer_of(self.infer("edit", tensors(triton_http, inputs)))

    def infer(self, model: str, inputs: list[Any]) -> Any:
        return self._client.infer(model, inputs)

    def close(self) -> None:
        self._client.close()


class Grpc:
    """KServe v2 over gRPC."""

    def __init__(self, url: str) -> None:
        self._client = triton_grpc.InferenceServerClient(url)

    def edit(self, inputs: Mapping[str, bytes], timeout_s: float = TIMEOUT_S) -> Answer:
        return self.begin(inputs, timeout_s).wait(timeout_s + _GRACE_S)

    def begin(
        self,
        inputs: Mapping[str, bytes],
        timeout_s: float | None = None,
        headers: dict[str, str] | None = None,
    ) -> Pending:
        """Start an edit without waiting for it; None leaves it without a deadline."""
        pending = Pending()
        pending.call = self._client.async_infer(
            "edit",
            tensors(triton_grpc, inputs),
            pending.put,
            client_timeout=timeout_s,
            headers=headers,
        )
        return pending

    def infer(self, model: str, inputs: list[Any]) -> Any:
        return self._client.infer(model, inputs)

    def control(
        self,
        op: str,
        timeout_s: float = TIMEOUT_S,
        headers: dict[str, str] | None = None,
        **fields: Any,
    ) -> dict[str, Any]:
        inputs = tensors(triton_grpc, {"OP": json.dumps({"op": op, **fields}).encode()})
        result = self._client.infer("control", inputs, client_timeout=timeout_s, headers=headers)
        answer: dict[str, Any] = json.loads(result.as_numpy("RESULT")[0])
        return answer

    def close(self) -> None:
        self._client.close()


class Pending:
    """An edit in flight."""

    def __init__(self) -> None:
        self.call: Any = None
        self._answers: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()

    def put(self, result: Any, error: Any) -> None:
        self._answers.put((result, error))

    @property
    def answered(self) -> bool:
        """Return whether `wait` would return at once."""
        return not self._answers.empty()

    def wait(self, timeout_s: float = TIMEOUT_S) -> Answer:
        """Return the response, or raise its error; TimeoutError if there is neither."""
        return _next(self._answers, timeout_s)


class Stream:
    """One gRPC stream of edits."""

    def __init__(self, url: str) -> None:
        self._client = triton_grpc.InferenceServerClient(url)
        self._events: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()
        self._client.start_stream(lambda result, error: self._events.put((result, error)))

    def send(self, inputs: Mapping[str, bytes]) -> None:
        self._client.async_stream_infer("edit_stream", tensors(triton_grpc, inputs))

    def next(self, timeout_s: float = TIMEOUT_S) -> Answer:
        """Return the next event, or raise an edit's error; TimeoutError if there is neither."""
        return _next(self._events, timeout_s)

    def cancel(self) -> None:
        self._client.stop_stream(cancel_requests=True)

    def close(self) -> None:
        self._client.close()


def _next(events: queue.SimpleQueue[tuple[Any, Any]], timeout_s: float) -> Answer:
    try:
        result, error = events.get(timeout=timeout_s)
    except queue.Empty:
        raise TimeoutError("no answer") from None
    if error is not None:
        raise error
    return answer_of(result)


def answer_of(result: Any) -> Answer:
    """Return IMAGE and META of tritonclient's result of an edit."""
    return result.as_numpy("IMAGE")[0], json.loads(result.as_numpy("META")[0])
