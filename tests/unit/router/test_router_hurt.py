"""Attacks of clients and workers on a router, and their cost."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from typing import Any

import aiohttp
import grpc
import grpc.aio
import msgspec
import pytest
from tritonclient.grpc import service_pb2 as pb

from maskserve_common.errors import InvalidRequest
from maskserve_common.servers.failure import Blame, Failure
from maskserve_router.messages.edit_call import check_request
from maskserve_router.workers.worker import read_status
from tests.support.router import FAST, calling, cluster, control_request, edit, http_edit, until
from tests.support.router_requests import parsed

STREAM = "/inference.GRPCInferenceService/ModelStreamInfer"


def _without(name: str) -> pb.ModelInferRequest:
    message = pb.ModelInferRequest.FromString(edit())
    place = [tensor.name for tensor in message.inputs].index(name)
    del message.inputs[place], message.raw_input_contents[place]
    return message


def _version() -> pb.ModelInferRequest:
    message = pb.ModelInferRequest.FromString(edit())
    message.model_version = "7"
    return message


def _extra() -> pb.ModelInferRequest:
    message = pb.ModelInferRequest.FromString(edit())
    message.inputs.add(name="MORE", datatype="BYTES", shape=[1])
    message.raw_input_contents.append(b"\0\0\0\0")
    return message


def _wrong(**changed: Any) -> pb.ModelInferRequest:
    message = pb.ModelInferRequest.FromString(edit())
    if "shape" in changed:
        message.inputs[0].shape[:] = changed["shape"]
    if "datatype" in changed:
        message.inputs[0].datatype = changed["datatype"]
    if "raw" in changed:
        message.raw_input_contents[0] = changed["raw"]
    return message


def _twice() -> pb.ModelInferRequest:
    message = pb.ModelInferRequest.FromString(edit())
    message.inputs[0].name = "MASK"
    return message


def _output() -> pb.ModelInferRequest:
    message = pb.ModelInferRequest.FromString(edit())
    message.outputs.add(name="LATENTS")
    return message


REFUSED = {
    "no prompt": (_without("PROMPT"), "PROMPT: is missing"),
    "another version": (_version(), "model_version: there is no version '7'"),
    "one input too many": (_extra(), "'MORE' is not an input"),
    "another shape": (_wrong(shape=[1, 1]), r"IMAGE.shape: is \[1, 1\]"),
    "another type": (_wrong(datatype="FP32"), "IMAGE.datatype"),
    "no length": (_wrong(raw=b"\x09\0\0\0"), "IMAGE: is not one element"),
    "twice": (_twice(), "more than once"),
    "another output": (_output(), "'LATENTS' is not an output"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_signature_refuses_is_not_sent(name: str):
    message, error_pattern = REFUSED[name]
    with pytest.raises(InvalidRequest, match=error_pattern):
        check_request(parsed(message))


async def test_requests_that_no_worker_takes_eject_no_worker():
    """Triton answers them in a stream without a code, as if the worker had failed."""
    async with cluster() as (router, workers):
        target = f"127.0.0.1:{router.grpc.port}"
        async with grpc.aio.insecure_channel(target) as channel:

            async def requests() -> Any:
                for _ in range(12):
                    for name in ("no prompt", "another version", "one input too many"):
                        message = pb.ModelInferRequest.FromString(
                            REFUSED[name][0].SerializeToString()
                        )
                        message.model_name = "edit_stream"
                        yield message.SerializeToString()

            answers = [
                pb.ModelStreamInferResponse.FromString(raw)
                async for raw in channel.stream_stream(STREAM)(requests())
            ]
        assert len(answers) == 36
        assert all("[INVALID_REQUEST]" in answer.error_message for answer in answers)
        assert not any(w.breaker.ejected for w in router.pool.workers.values())
        assert sum(len(worker.requests) for worker in workers) == 0


async def test_control_passes_the_check_of_tensors():
    async with cluster() as (router, _), calling(router) as call:
        assert b'"workers"' in await call(control_request("status"))


def test_an_error_without_a_code_is_no_sign_of_a_failing_worker():
    error_text = "expected 4 inputs but got 3 inputs for model 'edit_stream'"
    assert Failure(grpc.StatusCode.UNKNOWN, error_text, b"x").blame is Blame.UNKNOWN
    assert Failure(grpc.StatusCode.UNAVAILABLE, "Socket closed").blame is Blame.UNKNOWN
    assert Failure(grpc.StatusCode.UNKNOWN, "[ENGINE_FAILED] x", b"x").blame is Blame.WORKER


async def test_an_error_before_the_first_event_is_the_status_of_generate_stream():
    async with cluster() as (router, _):
        url = f"http://127.0.0.1:{router.http.port}/v2/models/"
        async with aiohttp.ClientSession(url) as session:
            body = dict.fromkeys(("IMAGE", "MASK", "PROMPT"), "x")
            for path, request_body, status in (
                ("edit_stream/generate_stream", {**body, "SETTINGS": '{"seed":"x"}'}, 400),
                ("edit_stream/generate_stream", body, 400),
                ("denoiser/generate_stream", body, 404),
                ("edit_stream/versions/7/generate_stream", {**body, "SETTINGS": "{}"}, 404),
            ):
                async with session.post(path, data=json.dumps(request_body)) as answer:
                    assert answer.status == status, await answer.text()


def record(**changed: Any) -> bytes:
    fields: dict[str, Any] = {
        "worker": "w",
        "model": "flux",
        "state": "ready",
        "max_rows": 8,
        "max_waiting": 8,
        "running": [],
        **changed,
    }
    return msgspec.json.encode(fields)


def row(**changed: Any) -> dict[str, Any]:
    plain = {"request_id": "a", "kind": "dense", "active_tokens": 1, "total_tokens": 1}
    return {**plain, "steps_left": 1, **changed}


@pytest.mark.parametrize(
    "changed",
    [
        {"max_rows": 0},
        {"max_rows": 10**12},
        {"devices": 0},
        {"max_waiting": -1},
        {"age_s": -1},
        {"running": [row()] * 10_001},
        {"running": [row(steps_left=-1)]},
        {"waiting": [row(active_tokens=5)]},
        {"waiting": [row(dense_share=-1.0)]},
        {"served": {"native_resolution": 0, "token_pixels": 16, "num_inference_steps": 4}},
        {"worker": "x" * 2**26},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_a_record_that_no_worker_can_have_is_none(changed: dict[str, Any]):
    assert read_status(record()).max_rows == 8
    with pytest.raises(ValueError, match="not a status"):
        read_status(record(**changed))


async def test_a_worker_whose_record_is_bad_is_down_and_others_serve():
    async with cluster() as (router, workers), calling(router) as call:
        workers[0].control_answer = lambda operation: record(max_rows=0)  # type: ignore[method-assign]
        await until("it is down", lambda: len(router.pool.up()) == 1)
        for _ in range(4):
            await call(edit())
        assert [len(worker.requests) for worker in workers] == [0, 4]


@pytest.mark.parametrize("answer", [b"", b"\xff\xff", b"\x0a\x04edit"])
async def test_an_answer_without_its_outputs_is_a_failure_of_the_worker(answer: bytes):
    async with cluster(routing={"policy": "round_robin"}) as (router, workers):
        workers[0].instead = answer
        async with calling(router) as call:
            for _ in range(4):
                response = pb.ModelInferResponse.FromString(await call(edit()))
                assert {output.name for output in response.outputs} == {"IMAGE", "META"}
        assert len(workers[1].requests) == 4


HEAD = b"POST /v2/models/edit/infer HTTP/1.1\r\nHost: x\r\n"


async def _sent(port: int, parts: list[bytes], limit: int = 2**20) -> tuple[bytes, int]:
    """The answer of a connection to these parts, and how many of their bytes it took."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    sent_bytes = 0
    with suppress(ConnectionError):
        for part in parts:
            writer.write(part)
            await asyncio.wait_for(writer.drain(), 10)
            sent_bytes += len(part)
            await asyncio.sleep(0)
        answer = await asyncio.wait_for(reader.read(limit), 10)
        writer.close()
        return answer, sent_bytes
    writer.close()
    return b"", sent_bytes


async def test_a_lone_header_over_the_bound_is_refused_also_when_it_comes_at_once():
    async with cluster() as (router, _):
        head = b"GET /readyz HTTP/1.1\r\nHost: x\r\nX-Long: " + b"a" * 100_000 + b"\r\n\r\n"
        answer, _ = await _sent(router.http.port, [head])
        assert answer.startswith(b"HTTP/1.1 400")
        fine = b"GET /readyz HTTP/1.1\r\nHost: x\r\nX-Long: " + b"a" * 30_000 + b"\r\n"
        answer, _ = await _sent(router.http.port, [fine + b"Connection: close\r\n\r\n"])
        assert answer.startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("line", [b"X-Trailer: " + b"a" * 1000 + b"\r\n", b"a" * 1000])
async def test_trailers_are_bounded_like_headers(line: bytes):
    """Many of them, or one without an end."""
    async with cluster() as (router, _):
        body = b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n"
        answer, sent_bytes = await _sent(router.http.port, [HEAD + body] + [line] * 20_000)
        assert sent_bytes < 8 * 2**20  # what the kernel's buffers hold
        assert answer == b"" or answer.startswith(b"HTTP/1.1 400")


async def test_what_comes_behind_a_request_under_way_is_bounded():
    async with cluster(hardware=FAST) as (router, workers):
        workers[0].hold()
        workers[1].hold()
        behind = HEAD + b"Content-Length: 80000000\r\n\r\n "
        parts = [http_edit(), behind, *([b" " * 2**16] * 600)]
        _, sent_bytes = await _sent(router.http.port, parts)
        assert sent_bytes < 16 * 2**20
        for worker in workers:
            worker.let_go()


async def test_requests_behind_one_under_way_are_bounded_in_number():
    """Small ones, which come in one piece."""
    small = b"GET /readyz HTTP/1.1\r\nHost: x\r\n\r\n"
    async with cluster(hardware=FAST) as (router, workers):
        for worker in workers:
            worker.hold()
        answer, _ = await _sent(router.http.port, [http_edit() + small * 500])
        assert answer == b""
        await until("the edit is let go", lambda: router.admission.edits == 0)
        for worker in workers:
            worker.let_go()
        answer, _ = await _sent(router.http.port, [small * 20])
        assert answer.startswith(b"HTTP/1.1 200")


async def test_a_worker_that_tells_its_status_and_does_nothing_loses_its_edits():
    faults = {"unlisted_s": 1.5}
    async with cluster(hardware=FAST, faults=faults) as (router, workers), calling(router) as call:
        workers[0].hold()
        workers[1].hold()
        edits = [asyncio.ensure_future(call(edit())) for _ in range(2)]
        await until("both have one", lambda: all(worker.requests for worker in workers))
        workers[1].let_go()
        await asyncio.wait_for(asyncio.gather(*edits), 10)
        assert len(workers[1].requests) == 2
        workers[0].let_go()


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v2/models/edit/versions/1/ready", 200),
        ("GET", "/v2/models/edit/versions/7/ready", 400),
        ("GET", "/v2/models/edit/versions/7/stats", 400),
        ("GET", "/v2/models/edit/versions/7", 404),
        ("GET", "/v2/models/edit/versions/7/config", 404),
        ("GET", "/v2/repository/index", 405),
        ("POST", "/v2/repository/index", 200),
        ("HEAD", "/v2/health/live", 405),
        ("GET", "/v2/models/edit/", 404),
        ("GET", "/no/such/path", 404),
        ("DELETE", "/v2", 405),
    ],
)
async def test_paths_answer_as_tritons(method: str, path: str, status: int):
    async with cluster() as (router, _):
        url = f"http://127.0.0.1:{router.http.port}"
        async with (
            aiohttp.ClientSession(url) as session,
            session.request(method, path, allow_redirects=False) as answer,
        ):
            assert answer.status == status
            if status >= 400 and method != "HEAD" and not path.endswith("ready"):
                error_text = (await answer.json())["error"]
                assert "TEMPLATE_NOT_FOUND" not in error_text


DEEP = b'{"x":' + b"[" * 100_000


async def test_the_index_takes_json_or_nothing():
    async with cluster() as (router, _):
        url = f"http://127.0.0.1:{router.http.port}"
        async with aiohttp.ClientSession(url) as session:
            fine = (b"", b'{"ready": true}')
            for body in (*fine, b"{", b"[]", DEEP):
                async with session.post("/v2/repository/index", data=body) as answer:
                    assert answer.status == (200 if body in fine else 400), body[:20]
