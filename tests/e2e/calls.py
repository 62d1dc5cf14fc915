"""Calls to a worker as any Triton client makes them, without maskserve's own client."""

from __future__ import annotations

import io
import json
import queue
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from PIL import Image
from tritonclient.utils import InferenceServerException

from tests.fakes.pictures import blob_mask, encode, scene

Pixels = npt.NDArray[np.uint8]
Answer = tuple[bytes, dict[str, Any]]
TIMEOUT_S = 60.0


def edit_inputs(
    image: bytes | Pixels, mask: bytes | Pixels, prompt: str = "a red star", **settings: Any
) -> dict[str, bytes]:
    """The four tensors of an edit; arrays are encoded as PNG.

    Two edits of a picture prime its template, and what runs cached then is an approximation: the
    cache is off unless a test turns it on, so that equal edits give equal pictures.
    """
    settings = {"num_inference_steps": 2, "seed": 1, "cache": "off", **settings}
    return {
        "IMAGE": image if isinstance(image, bytes) else encode(image),
        "MASK": mask if isinstance(mask, bytes) else encode(mask),
        "PROMPT": prompt.encode(),
        "SETTINGS": json.dumps(settings).encode(),
    }


def plain_edit(height: int = 64, width: int = 64, **settings: Any) -> dict[str, bytes]:
    return edit_inputs(scene(height, width), blob_mask(height, width), **settings)


def tensors(module: Any, values: Mapping[str, bytes]) -> list[Any]:
    made = []
    for name, value in values.items():
        cell = np.empty(1, np.object_)
        cell[0] = value
        tensor = module.InferInput(name, [1], "BYTES")
        tensor.set_data_from_numpy(cell)
        made.append(tensor)
    return made


def pixels(encoded: bytes) -> Pixels:
    return np.asarray(Image.open(io.BytesIO(encoded)).convert("RGB"))


class Http:
    """KServe v2 over HTTP."""

    def __init__(self, url: str) -> None:
        self._client = triton_http.InferenceServerClient(
            url.removeprefix("http://"),
            concurrency=32,
            connection_timeout=TIMEOUT_S,
            network_timeout=TIMEOUT_S,
        )

    def edit(self, inputs: Mapping[str, bytes]) -> Answer:
        result = self._client.infer("edit", tensors(triton_http, inputs))
        return result.as_numpy("IMAGE")[0], json.loads(result.as_numpy("META")[0])

    def infer(self, model: str, inputs: list[Any]) -> Any:
        return self._client.infer(model, inputs)

    def close(self) -> None:
        self._client.close()


class Grpc:
    """KServe v2 over gRPC."""

    def __init__(self, url: str) -> None:
        self._client = triton_grpc.InferenceServerClient(url)

    def edit(self, inputs: Mapping[str, bytes]) -> Answer:
        result = self._client.infer("edit", tensors(triton_grpc, inputs), client_timeout=TIMEOUT_S)
        return result.as_numpy("IMAGE")[0], json.loads(result.as_numpy("META")[0])

    def begin(
        self,
        inputs: Mapping[str, bytes],
        timeout_s: float | None = None,
        headers: dict[str, str] | None = None,
    ) -> Pending:
        """An edit that is not waited for."""
        pending = Pending()
        pending.call = self._client.async_infer(
            "edit",
            tensors(triton_grpc, inputs),
            pending.put,
            client_timeout=timeout_s,
            headers=headers,
        )
        return pending

    def control(self, **operation: Any) -> dict[str, Any]:
        inputs = tensors(triton_grpc, {"OP": json.dumps(operation).encode()})
        result = self._client.infer("control", inputs, client_timeout=TIMEOUT_S)
        answer: dict[str, Any] = json.loads(result.as_numpy("RESULT")[0])
        return answer

    def close(self) -> None:
        self._client.close()


class Pending:
    """An edit under way."""

    def __init__(self) -> None:
        self.call: Any = None
        self._answers: queue.Queue[tuple[Any, Any]] = queue.Queue()

    def put(self, result: Any, error: Any) -> None:
        self._answers.put((result, error))

    def wait(self, timeout_s: float = TIMEOUT_S) -> Answer:
        """The answer, or the error raised."""
        result, error = self._answers.get(timeout=timeout_s)
        if error is not None:
            raise error
        return result.as_numpy("IMAGE")[0], json.loads(result.as_numpy("META")[0])


class Stream:
    """One gRPC stream of edits."""

    def __init__(self, url: str) -> None:
        self._client = triton_grpc.InferenceServerClient(url)
        self._events: queue.Queue[tuple[Any, Any]] = queue.Queue()
        self._client.start_stream(lambda result, error: self._events.put((result, error)))

    def send(self, inputs: Mapping[str, bytes]) -> None:
        self._client.async_stream_infer("edit_stream", tensors(triton_grpc, inputs))

    def next(self, timeout_s: float = TIMEOUT_S) -> Answer:
        result, error = self._events.get(timeout=timeout_s)
        if error is not None:
            raise error
        return result.as_numpy("IMAGE")[0], json.loads(result.as_numpy("META")[0])

    def cancel(self) -> None:
        self._client.stop_stream(cancel_requests=True)

    def close(self) -> None:
        self._client.close()


@contextmanager
def stream(url: str) -> Iterator[Stream]:
    opened = Stream(url)
    try:
        yield opened
    finally:
        opened.close()


def eventually(what: str, check: Any, timeout_s: float = 10.0) -> float:
    """Wait until `check()` is true; returns the seconds it took."""
    began = time.monotonic()
    while not check():
        assert time.monotonic() - began < timeout_s, f"{what}: not within {timeout_s:g} s"
        time.sleep(0.005)
    return time.monotonic() - began


__all__ = [
    "Answer",
    "Grpc",
    "Http",
    "InferenceServerException",
    "Pending",
    "Stream",
    "edit_inputs",
    "eventually",
    "pixels",
    "plain_edit",
    "stream",
    "tensors",
]
