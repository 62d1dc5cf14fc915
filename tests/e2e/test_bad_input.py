"""Every request of the corpus gets its documented answer and harms nobody beside it.

A short run takes a sample of each sort, `make test-full` all of it.
"""

from __future__ import annotations

import base64
import http.client
import json
from collections.abc import Iterator, Sequence
from typing import Any

import grpc as grpcio
import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from tritonclient.grpc import service_pb2_grpc

from maskserve_serving.worker import WorkerProcess
from tests.fakes.corpus.bodies import HttpCase, http_cases
from tests.fakes.corpus.case import Case, Damaged, Pixels, Refused, Works
from tests.fakes.corpus.collection import edit_cases, is_sampled, sample
from tests.fakes.corpus.messages import GrpcCase, grpc_cases
from tests.fakes.corpus.operations import OperationCase, operation_cases
from tests.fakes.pictures import as_pillow_reads, blob_mask, encode, scene
from tests.support.background_edits import BackgroundEdits, Processes
from tests.support.calls import (
    Answer,
    Grpc,
    Http,
    InferenceServerException,
    edit_inputs,
    pixels,
    plain_edit,
    stream,
    tensors,
)
from tests.support.eventually import eventually

STATUSES = {
    "INVALID_REQUEST": ("400", "INVALID_ARGUMENT"),
    "TEMPLATE_NOT_FOUND": ("404", "NOT_FOUND"),
}
SHORT = sample()


def some_slow(cases: Sequence[Any], quick_count: int) -> list[Any]:
    """Parameters of which about `quick_count` belong to a short run."""
    return [
        pytest.param(
            case,
            id=str(case),
            marks=() if is_sampled(index, len(cases), quick_count) else pytest.mark.slow,
        )
        for index, case in enumerate(cases)
    ]


@pytest.fixture(scope="module", autouse=True)
def unharmed(worker: WorkerProcess) -> Iterator[None]:
    """Around all tests of this file."""
    with BackgroundEdits(worker.grpc_url) as background_edits:
        processes = Processes(worker)
        yield
    background_edits.check()
    client = Grpc(worker.grpc_url)
    eventually("idle", lambda: _idle(client.control(op="status")))
    client.close()
    processes.check()


def _idle(status: dict[str, Any]) -> bool:
    return not (status["in_flight"] or status["running"] or status["waiting"])


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=str(case), marks=() if str(case) in SHORT else pytest.mark.slow)
        for case in edit_cases()
    ],
)
def test_each_edit_gets_its_documented_answer(case: Case, http: Http, grpc: Grpc) -> None:
    inputs = case.inputs
    for protocol, client in enumerate((http, grpc)):
        answer: Answer | InferenceServerException
        try:
            answer = client.edit(inputs)
        except InferenceServerException as error:
            answer = error
        match case.expected:
            case Refused() as refused:
                check_refusal(answer, protocol, refused)
            case Damaged() as damaged if isinstance(answer, InferenceServerException):
                check_refusal(answer, protocol, damaged.refused)
            case Damaged():
                assert answer[1]["event"] == "final"
                assert picture(answer).shape == as_pillow_reads(inputs["IMAGE"]).shape
            case Works(source, background):
                assert not isinstance(answer, InferenceServerException), answer
                assert answer[1]["event"] == "final"
                edited = picture(answer)
                assert edited.shape == source.shape
                np.testing.assert_array_equal(edited[background], source[background])


def test_a_stream_refuses_by_name_and_goes_on(worker: WorkerProcess) -> None:
    cases = [case for case in edit_cases() if isinstance(case.expected, Refused)]
    with stream(worker.grpc_url) as opened:
        for case in cases[:: len(cases) // 12]:
            opened.send(case.inputs)
            with pytest.raises(InferenceServerException) as caught:
                opened.next()
            assert isinstance(case.expected, Refused)
            assert caught.value.message().startswith(case.expected.start)
        opened.send(plain_edit())
        assert opened.next()[1]["event"] == "final"


def check_refusal(
    answer: Answer | InferenceServerException, protocol: int, expected: Refused
) -> None:
    assert isinstance(answer, InferenceServerException), answer[1]
    message = answer.message()
    assert message.startswith(expected.start), message[:300]
    assert STATUSES[expected.code][protocol] in str(answer.status())
    assert "Traceback" not in message
    assert len(message) < 1000


def picture(answer: Answer) -> Pixels:
    image = answer[0]
    text = image[:4] in (base64.b64encode(magic)[:4] for magic in (b"\x89PN", b"RIF"))
    return pixels(base64.b64decode(image) if text else image)


@pytest.mark.parametrize("case", some_slow(list(operation_cases()), 16))
def test_each_operation_is_refused_by_name(
    case: OperationCase, http: Http, worker: WorkerProcess
) -> None:
    with triton_grpc.InferenceServerClient(worker.grpc_url) as grpc:
        for protocol, (client, module) in enumerate(((http, triton_http), (grpc, triton_grpc))):
            with pytest.raises(InferenceServerException) as caught:
                client.infer("control", tensors(module, {"OP": case.op}))
            check_refusal(caught.value, protocol, case.expected)


def test_operations_that_work_still_do(grpc: Grpc) -> None:
    image = base64.b64encode(encode(scene(32, 48, seed=77))).decode()
    registered = grpc.control(op="register", image="data:image/png;base64," + image)
    name = registered["template_id"]
    mask = blob_mask(32, 48)
    picture_of_it, _ = grpc.edit(edit_inputs(b"", mask, template_id=name))
    np.testing.assert_array_equal(
        pixels(picture_of_it)[mask == 0], scene(32, 48, seed=77)[mask == 0]
    )
    for op in ("prime", "pin", "unpin", "evict"):
        assert grpc.control(op=op, template_id=name)["template_id"] == name
    assert grpc.control(op="cancel", request_id="\ud800 nobody's")["cancelled"] is False


# What Triton refuses before any of our code runs


@pytest.mark.parametrize("case", some_slow(list(http_cases()), 16))
def test_each_http_body_is_refused_by_triton(case: HttpCase, worker: WorkerProcess) -> None:
    headers = dict(case.headers)
    if case.header_length is not None:
        headers["Inference-Header-Content-Length"] = case.header_length
    connection = http.client.HTTPConnection(worker.http_url.removeprefix("http://"), timeout=30)
    try:
        connection.request("POST", case.path, case.body, headers)
        response = connection.getresponse()
        text = response.read().decode()
    finally:
        connection.close()
    assert response.status in case.statuses, text
    assert case.error_text in json.loads(text)["error"] or case.error_text == "error", text


@pytest.mark.parametrize("case", some_slow(list(grpc_cases()), 16))
def test_each_grpc_message_is_refused_by_triton(case: GrpcCase, worker: WorkerProcess) -> None:
    with grpcio.insecure_channel(worker.grpc_url) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        with pytest.raises(grpcio.RpcError) as caught:
            stub.ModelInfer(case.request, timeout=30)
    assert caught.value.code().name == case.code, caught.value.details()
    assert case.error_text in caught.value.details()


def post(
    worker: WorkerProcess, body: bytes, content_type: str, chunked: bool = False
) -> tuple[int, Any]:
    """Status and JSON of an answer of `edit`."""
    address = worker.http_url.removeprefix("http://")
    connection = http.client.HTTPConnection(address, timeout=120)
    try:
        chunks = (bytes([byte]) for byte in body)
        connection.request(
            "POST",
            "/v2/models/edit/infer",
            chunks if chunked else body,
            {"Content-Type": content_type},
            encode_chunked=chunked,
        )
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())
    finally:
        connection.close()


def json_body(size: int) -> bytes:
    """An edit as JSON, of at least `size` bytes."""
    inputs = plain_edit(output_encoding="base64")
    for name in ("IMAGE", "MASK"):
        inputs[name] = base64.b64encode(inputs[name])
    tensors = [
        {"name": name, "shape": [1], "datatype": "BYTES", "data": [value.decode()]}
        for name, value in inputs.items()
    ]
    return json.dumps({"inputs": tensors}).encode().ljust(size)


@pytest.mark.parametrize("megabytes", [1, 6, pytest.param(40, marks=pytest.mark.slow)])
def test_an_edit_sent_as_a_form_is_answered(worker: WorkerProcess, megabytes: int) -> None:
    """As by `curl -d`; Triton 2.51 puts such a body on its stack."""
    body = json_body(megabytes * 10**6)
    status, answer = post(worker, body, "application/x-www-form-urlencoded")
    assert status == 200
    assert {output["name"] for output in answer["outputs"]} == {"IMAGE", "META"}


@pytest.mark.parametrize("levels", [100_000, 1_000_000])
def test_deeply_nested_json_is_refused(worker: WorkerProcess, levels: int) -> None:
    body = b'{"inputs":' + b"[" * levels + b"]" * levels + b"}"
    status, _ = post(worker, body, "application/json")
    assert status == 400


@pytest.mark.slow
def test_a_body_in_very_many_chunks_is_answered(worker: WorkerProcess) -> None:
    status, _ = post(worker, json_body(300_000), "application/json", chunked=True)
    assert status == 200
