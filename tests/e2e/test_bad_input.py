"""Every request that must be refused is, by name, and harms nobody beside it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tritonclient.http as triton_http

from serving.worker import Worker
from tests.e2e.calls import (
    Grpc,
    Http,
    InferenceServerException,
    pixels,
    plain_edit,
    tensors,
)
from tests.fakes.hostile import HostileCase, hostile_cases

CASES = list(hostile_cases())


class Beside:
    """An edit that is repeated while bad requests come in."""

    def __init__(self, grpc: Grpc) -> None:
        self._grpc = grpc
        self._stop = threading.Event()
        self.pictures: list[bytes] = []
        self.errors: list[Exception] = []
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Beside:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(60)

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self.pictures.append(self._grpc.edit(plain_edit(num_inference_steps=8))[0])
            except Exception as error:
                self.errors.append(error)


@pytest.fixture(scope="module")
def beside(worker: Worker) -> Iterator[Beside]:
    client = Grpc(worker.grpc_url)
    expected, _ = client.edit(plain_edit(num_inference_steps=8))
    with Beside(client) as running:
        yield running
    client.close()
    assert running.errors == []
    assert len(running.pictures) >= 3
    for picture in running.pictures:
        assert (abs(pixels(picture).astype(int) - pixels(expected)) <= 1).all()


@pytest.mark.usefixtures("beside")
@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_it_is_refused_by_name(case: HostileCase, http: Http, grpc: Grpc) -> None:
    start = f"[{case.code}] {case.field}"
    statuses = {
        "INVALID_REQUEST": ("400", "INVALID_ARGUMENT"),
        "TEMPLATE_NOT_FOUND": ("404", "NOT_FOUND"),
    }
    for client, status in zip((http, grpc), statuses[case.code], strict=True):
        with pytest.raises(InferenceServerException) as caught:
            client.edit(case.inputs)
        assert caught.value.message().startswith(start), caught.value.message()
        assert status in str(caught.value.status())
        assert "Traceback" not in caught.value.message()


WRONG_TENSORS: dict[str, dict[str, Any]] = {
    "missing": {"drop": "MASK"},
    "two elements": {"shape": [2]},
    "no element": {"shape": [0]},
    "a matrix": {"shape": [1, 1]},
    "another type": {"datatype": "FP32"},
}


@pytest.mark.parametrize("name", WRONG_TENSORS)
def test_tensors_that_break_the_signature_are_refused_by_triton(name: str, http: Http) -> None:
    """Triton itself refuses them, naming the tensor, before any of our code runs."""
    change = WRONG_TENSORS[name]
    made = [t for t in tensors(triton_http, plain_edit()) if t.name() != "MASK"]
    if "drop" not in change:
        shape = change.get("shape", [1])
        kind = change.get("datatype", "BYTES")
        tensor = triton_http.InferInput("MASK", shape, kind)
        values = np.full(shape, b"x", np.object_) if kind == "BYTES" else np.ones(shape, np.float32)
        tensor.set_data_from_numpy(values)
        made.append(tensor)
    with pytest.raises(InferenceServerException, match="MASK") as caught:
        http.infer("edit", made)
    assert str(caught.value.status()) == "400"
