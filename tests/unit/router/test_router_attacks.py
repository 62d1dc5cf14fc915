"""What one client cannot do to the others by what it sends: to workers, to the loop, to places."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import aiohttp
import grpc
import grpc.aio
import pytest
from tritonclient.grpc import service_pb2 as pb

from maskserve_core.errors import InvalidRequest
from maskserve_router.forwarded import known_headers
from maskserve_router.router import Router
from tests.support.router import calling, cluster, edit, http_edit

TRACE = f"00-{'a' * 32}-{'b' * 16}-01"
REGION = (
    "Failed to increase the shared memory pool size for key 'triton_python_backend_shm_region_3' "
    "to 67108864 bytes. No space left on device"
)


def url_of(router: Router) -> str:
    return f"http://127.0.0.1:{router.http.port}"


def ejected(router: Router) -> list[str]:
    return [name for name, worker in router.pool.workers.items() if worker.breaker.ejected]


def http_parts(raw: bytes) -> tuple[bytes, dict[str, str]]:
    """Body and headers of a request."""
    head, _, body = raw.partition(b"\r\n\r\n")
    lines = [line.split(": ", 1) for line in head.decode().split("\r\n")[2:]]
    return body, {name: value for name, value in lines if name != "Content-Length"}


# What the client sent is never the worker's fault.


async def test_a_header_too_long_for_workers_ejects_none():
    """The bound of gRPC itself ends such a call, as if the worker had failed it."""
    async with cluster() as (router, workers), calling(router) as call:
        body, headers = http_parts(http_edit())
        async with aiohttp.ClientSession(url_of(router)) as session:
            for number in range(12):
                if number % 2:
                    await call(edit(), metadata=(("x-own", "a" * 20_000),))
                    continue
                more = {**headers, "x-own": "a" * 20_000, "x-amzn-trace-id": "Root=1"}
                async with session.post("/v2/models/edit/infer", data=body, headers=more) as answer:
                    assert answer.status == 200, await answer.text()
        assert not ejected(router)
        assert sum(len(worker.seen) for worker in workers) == 12
        assert not any(
            name.startswith("x-") for w in workers for seen in w.headers for name in seen
        )


@pytest.mark.parametrize(
    ("headers", "named"),
    [
        ({"x-own": "é"}, "x-own"),
        ({"x-own-bin": "AAAA"}, "x-own-bin"),
        ({"traceparent": "é" + TRACE[1:]}, "traceparent"),
        ({"traceparent": "00-" + "0" * 32 + TRACE[35:]}, "traceparent"),
        ({"traceparent": "x" * 20_000}, "traceparent"),
        ({"traceparent": TRACE + "-more"}, "traceparent"),
        ({"traceparent": TRACE, "tracestate": "a=é"}, "tracestate"),
        ({"traceparent": TRACE, "tracestate": "a" * 20_000}, "tracestate"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_headers_that_no_worker_can_be_given_are_refused(headers: Mapping[str, str], named: str):
    with pytest.raises(InvalidRequest, match=f"^.INVALID_REQUEST. {named}: "):
        known_headers(headers)


def test_the_headers_that_a_worker_is_given():
    assert known_headers({"x-own": "1", "tracestate": "a=1", "cookie": "é"}) == ()
    both = {"traceparent": TRACE, "tracestate": "a=1"}
    assert dict(known_headers({**both, "x-own": "1"})) == both
    assert dict(known_headers({"traceparent": f"01-{TRACE[3:]}-later"}))


@pytest.mark.parametrize(
    "headers", [{"x-own": "é"}, {"x-own-bin": "A"}, {"traceparent": "no"}], ids=str
)
async def test_such_headers_are_400(headers: dict[str, str]):
    async with cluster() as (router, workers), aiohttp.ClientSession(url_of(router)) as session:
        body, own = http_parts(http_edit())
        async with session.post(
            "/v2/models/edit/infer", data=body, headers={**own, **headers}
        ) as answer:
            assert answer.status == 400
            assert next(iter(headers)) in (await answer.json())["error"]
        for length in ("²", "9" * 5000):
            more = {**own, "Inference-Header-Content-Length": length}
            async with session.post("/v2/models/edit/infer", data=body, headers=more) as answer:
                assert answer.status == 400, await answer.text()
        assert not any(worker.seen for worker in workers)


@pytest.mark.parametrize(
    "status",
    [grpc.StatusCode.INTERNAL, grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED],
)
async def test_an_error_without_a_code_ejects_nobody_and_tells_nothing(
    status: grpc.StatusCode, caplog: Any
):
    """Large pictures where shared memory is small; Triton's text names the region."""
    caplog.set_level(logging.INFO, "maskserve.router")
    async with cluster() as (router, workers), calling(router) as call:
        for worker in workers:
            worker.fails, worker.status, worker.text = 100, status, REGION
        for _ in range(12):
            with pytest.raises(grpc.aio.AioRpcError) as told:
                await call(edit())
            said = told.value.details() or ""
            assert said.startswith("[")
            assert "region" not in said
            assert "shared memory" not in said
        stream = await _streamed(router)
        assert stream.startswith("[")
        assert "region" not in stream
        assert not ejected(router)
        assert any("shm_region_3" in str(vars(each)) for each in caplog.records)


async def _streamed(router: Router) -> str:
    message = pb.ModelInferRequest.FromString(edit())
    message.model_name = "edit_stream"
    async with grpc.aio.insecure_channel(f"127.0.0.1:{router.grpc.port}") as channel:

        async def one() -> Any:
            yield message.SerializeToString()

        call = channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer")(one())
        return pb.ModelStreamInferResponse.FromString(await call.read()).error_message
