"""Requests of one client do not hurt others: neither workers, nor the loop, nor places."""

from __future__ import annotations

import asyncio
import gc
import gzip
import json
import logging
import resource
import threading
import tracemalloc
import weakref
import zlib
from collections.abc import AsyncIterator, Mapping
from contextlib import ExitStack, asynccontextmanager
from typing import Any
from unittest.mock import AsyncMock

import aiohttp
import grpc
import grpc.aio
import pytest
from tritonclient.grpc import service_pb2 as pb

from maskserve_benchmarks.soak.pictures import png_file
from maskserve_common.config import LimitsConfig
from maskserve_common.contracts import bytes_tensor
from maskserve_common.contracts.settings import parse_settings
from maskserve_common.contracts.status_record import Served
from maskserve_common.errors import Cancelled, InvalidRequest
from maskserve_common.logs import Repeats
from maskserve_router.api import front, http_inference
from maskserve_router.api.http_body import Bodies
from maskserve_router.api.kserve_http import generate_request, infer_request
from maskserve_router.api.openai import form_pictures, form_reader
from maskserve_router.api.openai.form import EditForm, Fields
from maskserve_router.config import AdmissionBounds, Http
from maskserve_router.fair_share import FairShare
from maskserve_router.key_holder import KeyHolder
from maskserve_router.listeners import grpc_server, http_server
from maskserve_router.listeners.descriptors import connections, raise_limit
from maskserve_router.messages.call_context import CallContext
from maskserve_router.messages.edit_call import MODELS, parse_request
from maskserve_router.messages.failures import RetryLater
from maskserve_router.messages.forwarded_headers import known_headers
from maskserve_router.messages.model_request import ModelRequest
from maskserve_router.metrics import Metrics
from maskserve_router.router import Router
from maskserve_router.scheduling.admission import Admission, EditRoom
from maskserve_router.scheduling.edit_cost import MaskTokens, count_tokens
from maskserve_router.scheduling.picture_rooms import PictureRooms
from maskserve_router.workers.stream_buffer import Message, StreamBuffer
from tests.support.router import (
    FAST,
    SIDE,
    calling,
    cluster,
    control_request,
    edit,
    http_edit,
    picture,
    until,
)
from tests.support.router_requests import edit_request, mask_of

STREAM = "/inference.GRPCInferenceService/ModelStreamInfer"
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


# What a client sent goes when it is answered.

MIB = 2**20


@pytest.mark.parametrize("size", [0, 2**18], ids=["on the loop", "in a thread"])
@pytest.mark.parametrize("door", ["grpc", "http", "openai"])
async def test_a_message_that_was_refused_is_kept_by_nobody(
    monkeypatch: pytest.MonkeyPatch, door: str, size: int
):
    """Kept by grpc: what `context.abort` raised, and by its traceback the message, of 40 MiB. Then
    by the error itself, whose traceback led to who waited for it, until the next look for cycles.
    """

    class Large:
        """The parsed message of a refused request."""

    large_refs: list[weakref.ref[Large]] = []

    def parse(*_: object) -> pb.ModelInferRequest:
        large = Large()
        large_refs.append(weakref.ref(large))
        raise InvalidRequest("inputs", "are refused")

    monkeypatch.setattr(front, "parse_request", parse)
    monkeypatch.setattr(http_inference, "_checked_infer", parse)
    form = EditForm(Fields(prompt="a"), b"i", b"m", {})
    monkeypatch.setattr(form_reader, "read_form", AsyncMock(return_value=form))
    monkeypatch.setattr(form_reader.FormReader, "_checked", parse)
    message = edit_request(bytes(size), b"")
    path = {"http": "/v2/models/edit/infer", "openai": "/v1/images/edits"}
    async with (
        cluster() as (router, _),
        calling(router) as call,
        aiohttp.ClientSession(url_of(router)) as session,
    ):
        gc.disable()
        try:
            for _ in range(3):
                if door != "grpc":
                    async with session.post(path[door], data=bytes(size)) as answer:
                        assert "inputs: are refused" in await answer.text()
                        assert answer.status == 400
                    continue
                with pytest.raises(grpc.aio.AioRpcError, match="inputs: are refused") as refused:
                    await call(message)
                assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            await until(
                "what came of them goes",
                lambda: all(reference() is None for reference in large_refs),
            )
        finally:
            gc.enable()
    assert len(large_refs) == 3


async def test_a_message_goes_with_its_call():
    """Twenty of 10 MiB took 200 MiB, with nothing under way: what reads a call's messages one by
    one kept the last.
    """
    message = edit_request(bytes(MIB), mask_of(100, SIDE), template_id="0" * 32)
    refused = edit_request(bytes(MIB), b"", mask_mode="none")
    async with cluster() as (router, _), calling(router) as call:
        await call(edit())
        gc.collect()
        gc.disable()
        tracemalloc.start()
        try:
            for _ in range(8):
                await call(message)
                with pytest.raises(grpc.aio.AioRpcError, match=r"SETTINGS\.mask_mode"):
                    await call(refused)
            await until("they go", lambda: tracemalloc.get_traced_memory()[0] < 4 * MIB)
        finally:
            tracemalloc.stop()
            gc.enable()


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
        assert sum(len(worker.requests) for worker in workers) == 12
        assert not any(
            name.startswith("x-")
            for w in workers
            for call_headers in w.headers
            for name in call_headers
        )


@pytest.mark.parametrize(
    ("headers", "known"),
    [
        ({"x-own": "é", "x-own-bin": "AAAA"}, {}),
        ({"traceparent": "é" + TRACE[1:]}, {}),
        ({"traceparent": "00-" + "0" * 32 + TRACE[35:]}, {}),
        ({"traceparent": TRACE.upper()}, {}),
        ({"traceparent": "x" * 20_000}, {}),
        ({"traceparent": TRACE + "-more", "tracestate": "a=1"}, {}),
        ({"traceparent": TRACE, "tracestate": "a=é"}, {"traceparent": TRACE}),
        ({"traceparent": TRACE, "tracestate": "a" * 20_000}, {"traceparent": TRACE}),
    ],
    ids=lambda value: str(value)[:40],
)
def test_headers_that_no_worker_can_be_given_are_left_out(
    headers: Mapping[str, str], known: dict[str, str]
):
    """They may be a proxy's, of which the client knows nothing."""
    assert dict(known_headers(headers)) == known


def test_the_headers_that_a_worker_is_given():
    assert known_headers({"x-own": "1", "tracestate": "a=1", "cookie": "é"}) == ()
    trace_headers = {"traceparent": TRACE, "tracestate": "a=1"}
    assert dict(known_headers({**trace_headers, "x-own": "1"})) == trace_headers
    assert dict(known_headers({"traceparent": f"01-{TRACE[3:]}-later"}))


@pytest.mark.parametrize(
    "headers", [{"x-own": "é"}, {"x-own-bin": "A"}, {"traceparent": "no"}], ids=str
)
async def test_an_edit_with_such_headers_is_served(headers: dict[str, str]):
    async with cluster() as (router, _), aiohttp.ClientSession(url_of(router)) as session:
        body, edit_headers = http_parts(http_edit())
        async with session.post(
            "/v2/models/edit/infer", data=body, headers={**edit_headers, **headers}
        ) as answer:
            assert answer.status == 200, await answer.text()


async def test_a_length_that_is_no_number_is_refused():
    async with cluster() as (router, workers), aiohttp.ClientSession(url_of(router)) as session:
        body, edit_headers = http_parts(http_edit())
        for length in ("²", "9" * 5000):
            more = {**edit_headers, "Inference-Header-Content-Length": length}
            async with session.post("/v2/models/edit/infer", data=body, headers=more) as answer:
                assert answer.status == 400, await answer.text()
        assert not any(worker.requests for worker in workers)


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
            with pytest.raises(grpc.aio.AioRpcError) as refusal:
                await call(edit())
            details = refusal.value.details() or ""
            assert details.startswith("[")
            assert "region" not in details
            assert "shared memory" not in details
        stream = await _streamed(router)
        assert stream.startswith("[")
        assert "region" not in stream
        assert not ejected(router)
        assert any("shm_region_3" in str(vars(log_record)) for log_record in caplog.records)


async def _streamed(router: Router) -> str:
    message = pb.ModelInferRequest.FromString(edit())
    message.model_name = "edit_stream"
    async with grpc.aio.insecure_channel(f"127.0.0.1:{router.grpc.port}") as channel:

        async def one() -> Any:
            yield message.SerializeToString()

        call = channel.stream_stream(STREAM)(one())
        return pb.ModelStreamInferResponse.FromString(await call.read()).error_message


# Work that grows with what a client sends is counted, bounded, off the loop and in turns.


def holder(name: str) -> KeyHolder:
    return KeyHolder(name, max_edits=100, admin=False, scope=name)


class Zipped:
    """A request whose body is so many zeros, compressed a thousandfold."""

    def __init__(self, size: int, level: int = 9) -> None:
        self.headers = {"content-encoding": "gzip"}
        self._body = gzip.compress(bytes(size), level)

    async def stream(self) -> AsyncIterator[bytes]:
        for at in range(0, len(self._body), 2**16):
            yield self._body[at : at + 2**16]


async def test_inflated_bytes_are_counted_as_they_come():
    """Thirty bodies of 158 KiB with 159 MiB in each restarted a supervised router."""
    admission, turns = Admission(AdmissionBounds(max_bytes=16 * MIB), Metrics()), FairShare(1)
    bodies = Bodies(Http(), admission, turns)
    request: Any = Zipped(100 * MIB, level=0)
    tracemalloc.start()
    with ExitStack() as stack, pytest.raises(RetryLater):
        await bodies.read(request, holder("greedy"), stack)
    assert tracemalloc.get_traced_memory()[1] < 40 * MIB
    tracemalloc.stop()
    assert admission.bytes == 0
    small: Any = Zipped(6 * MIB, level=0)
    with ExitStack() as stack:
        assert len(await bodies.read(small, holder("greedy"), stack)) == 6 * MIB
        assert admission.bytes == 6 * MIB
    for most in (Http(max_body_bytes=5 * MIB),):
        with ExitStack() as stack, pytest.raises(InvalidRequest, match="over 5242880 bytes"):
            await Bodies(most, admission, turns).read(small, holder("greedy"), stack)
    turns.close()


async def test_what_inflates_a_hundredfold_is_refused_early():
    """Each of such bodies cost as much as its share of bytes allowed, thirty of them five
    seconds of a processor, and two when 16 MiB of each were inflated.
    """
    admission, turns = Admission(AdmissionBounds(), Metrics()), FairShare(1)
    request: Any = Zipped(150 * MIB)
    tracemalloc.start()
    with ExitStack() as stack, pytest.raises(InvalidRequest, match="times what is sent"):
        await Bodies(Http(), admission, turns).read(request, holder("greedy"), stack)
    assert tracemalloc.get_traced_memory()[1] < 16 * MIB
    tracemalloc.stop()
    black: Any = Zipped(4 * MIB)  # as a picture may be that nobody has compressed
    with ExitStack() as stack:
        assert (
            len(await Bodies(Http(), admission, turns).read(black, holder("a"), stack)) == 4 * MIB
        )
    turns.close()


@pytest.mark.parametrize(
    "body", [b"no gzip", gzip.compress(b"{}" * 10**5)[:-9], zlib.compress(b"")]
)
async def test_bodies_that_cannot_be_inflated_are_refused(body: bytes):
    async with cluster() as (router, _), aiohttp.ClientSession(url_of(router)) as session:
        headers = {"Content-Encoding": "gzip"}
        async with session.post("/v2/models/edit/infer", data=body, headers=headers) as answer:
            assert answer.status == 400, await answer.text()


async def test_large_bodies_are_parsed_in_threads(monkeypatch: pytest.MonkeyPatch):
    """149 KiB of gzipped JSON stalled the loop for 2.2 s."""
    on_main_thread: list[bool] = []
    parse = http_inference.infer_request

    def watched(*args: Any) -> Any:
        on_main_thread.append(threading.current_thread() is threading.main_thread())
        return parse(*args)

    monkeypatch.setattr(http_inference, "infer_request", watched)
    async with cluster() as (router, _), aiohttp.ClientSession(url_of(router)) as session:
        body = gzip.compress(json.dumps({"inputs": [], "id": "a" * MIB}).encode())
        headers = {"Content-Encoding": "gzip"}
        async with session.post("/v2/models/edit/infer", data=body, headers=headers) as answer:
            assert answer.status == 400
    assert on_main_thread == [False]


MANY = {
    "parameters": b'{"inputs": [], "parameters": {'
    + b",".join(b'"%d":1' % i for i in range(10**5)),
    "values": b'{"inputs": [], "x": [' + b"1," * 10**6,
    "blanks": b"{" + b" " * 5 * MIB,
    "escapes": b'{"inputs": [], "id": "' + b"\\/" * 5 * MIB,
}


@pytest.mark.parametrize("name", MANY)
def test_json_of_millions_of_parts_is_refused_before_it_is_parsed(name: str):
    """150 MiB of parameters took 44 s and 7 GB."""
    with pytest.raises(InvalidRequest, match=r"over 65536 values|millions of blanks"):
        infer_request("edit", "", MANY[name], None)
    with pytest.raises(InvalidRequest, match=r"over 65536 values|millions of blanks"):
        generate_request("edit", "", MANY[name])


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"\x32\x00" * 10**6, "over 1024 fields"),
        (b"\x2a\x82\x80\x04" + b"\x1a\x00" * 2**15 + b"\x1a\x00", "over 1024 fields"),
        (b"\x22\x80\x80\x08" + bytes(2**17), "131072 bytes that is no tensor"),
        (b"\x2a\x85\x80\x08\x1a\x80\x80\x08" + bytes(2**17), "no tensor's content|is not a Model"),
        (b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff", "is not a ModelInferRequest"),
        (b"\x0b\x0c", "is not a ModelInferRequest"),
        (b"\x3a\x05abc", "is not a ModelInferRequest"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_messages_of_millions_of_parts_are_refused_before_they_are_parsed(raw: bytes, message: str):
    """40 MiB of empty outputs took 4 s and 4 GB."""
    with pytest.raises(InvalidRequest, match=message):
        parse_request(raw)
    assert parse_request(edit()).head.model_name == "edit"


def test_a_tensor_of_any_number_has_not_any_number_of_elements():
    message = pb.ModelInferRequest.FromString(edit())
    message.inputs.add(name="CONTROL", datatype="BYTES", shape=[10**6])
    message.raw_input_contents.append(bytes(4 * 10**6))
    with pytest.raises(InvalidRequest, match=r"CONTROL\.shape"):
        parse_request(message.SerializeToString())


async def test_one_clients_work_is_done_in_its_turn():
    turns = FairShare(2)
    goes_on, begun = threading.Event(), []

    def work(name: str) -> str:
        begun.append(name)
        goes_on.wait(30)
        return name

    greedy = [asyncio.create_task(turns.run(holder("a"), MIB, work, "a")) for _ in range(20)]
    await until("both threads are busy", lambda: len(begun) == 2)
    other_task = asyncio.create_task(turns.run(holder("b"), MIB, work, "b"))
    cancelled_task = asyncio.create_task(turns.run(holder("c"), MIB, work, "c"))
    await asyncio.sleep(0)
    cancelled_task.cancel()
    goes_on.set()
    assert await other_task == "b"
    assert await asyncio.gather(*greedy) == ["a"] * 20
    assert begun[2] == "b"
    assert "c" not in begun
    assert await turns.run(holder("c"), MIB, str, 1) == "1"
    turns.close()


async def test_who_leaves_while_others_wait_for_a_thread_is_passed_over():
    turns, goes_on = FairShare(1), threading.Event()
    busy = asyncio.create_task(turns.run(holder("a"), MIB, goes_on.wait, 30))
    leaving = [asyncio.create_task(turns.run(holder("b"), MIB, str, i)) for i in range(5)]
    staying = asyncio.create_task(turns.run(holder("b"), MIB, str, 9))
    await asyncio.sleep(0)
    for task in leaving:
        task.cancel()
    goes_on.set()
    assert await busy
    assert await staying == "9"
    ends = await asyncio.gather(*leaving, return_exceptions=True)
    assert all(isinstance(end, asyncio.CancelledError) for end in ends)
    assert await turns.run(holder("c"), MIB, str, 1) == "1"
    turns.close()


async def test_registrations_are_admitted_by_what_they_take():
    """Twelve of them took a router to 8.2 GB."""
    image = picture("A" * (3 * MIB // 2))
    async with cluster(admission={"max_bytes": 18 * MIB}) as (router, workers):
        for worker in workers:
            worker.holds_registrations.clear()
        async with calling(router) as call:
            first = asyncio.ensure_future(call(control_request("register", image=image)))
            second = asyncio.ensure_future(call(control_request("register", image=image)))
            await until("two are under way", lambda: workers[0].registering == 2)
            assert router.admission.bytes > 16 * MIB
            with pytest.raises(grpc.aio.AioRpcError, match="OVERLOADED"):
                await call(control_request("register", image=image))
            assert b"workers" in await call(control_request("status"))
            for worker in workers:
                worker.holds_registrations.set()
            await asyncio.gather(first, second)
        assert router.admission.bytes == 0


async def test_compressed_messages_are_refused_before_they_are_inflated():
    async with cluster() as (router, workers):
        target = f"127.0.0.1:{router.grpc.port}"
        async with grpc.aio.insecure_channel(target, compression=grpc.Compression.Gzip) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as refusal:
                await channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")(edit())
        assert refusal.value.code() is grpc.StatusCode.UNIMPLEMENTED
        assert not workers[0].requests


SERVED = Served(1024, 16, 28, True)


@pytest.mark.parametrize("side", [7000, 4096])
def test_a_mask_of_many_pixels_costs_the_router_little(side: int):
    """One of 49 megapixels with a feather of 512 cost 4 s and 1 GB; eight stopped all new masks."""
    mask = png_file(
        side, side, 1, 0, (b"\0" + b"\xff" * (side // 8) + b"\0" * (side % 8 > 0)) * side
    )
    settings = parse_settings(b'{"mask_feather": 512}')
    tracemalloc.start()
    tokens = count_tokens(mask, settings, SERVED, LimitsConfig())
    assert tracemalloc.get_traced_memory()[1] < 64 * MIB
    tracemalloc.stop()
    assert tokens == MaskTokens(
        4096, 4096, cover_a_side=True, inner=4096, ring=0, pixels=tokens.pixels
    )


# Connections


@asynccontextmanager
async def idle(port: int, count: int, sent: bytes = b"") -> AsyncIterator[None]:
    """So many connections that say nothing, or begin a request and no more."""
    opened = []
    for _ in range(count):
        opened.append(await asyncio.open_connection("127.0.0.1", port))
        opened[-1][1].write(sent)
    try:
        yield
    finally:
        for _, writer in opened:
            writer.close()


@pytest.mark.parametrize("sent", [b"", b"POST /v2/models/edit/infer HTTP/1.1\r\nHost: x\r\n"])
async def test_connections_that_say_nothing_leave_places_to_others(sent: bytes):
    """1,200 without a key timed out edits and the operators' health."""
    async with (
        cluster(http={"max_connections": 8}) as (router, _),
        idle(router.http.port, 40, sent),
        idle(router.admin.port, 80),
    ):
        for port in 3 * (router.http.port, router.admin.port):
            async with (
                aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session,
                session.get("/readyz") as response,
            ):
                assert response.status == 200
        async with aiohttp.ClientSession(url_of(router)) as session:
            body, headers = http_parts(http_edit())
            for _ in range(2):  # on one connection, which is silent between
                async with session.post(
                    "/v2/models/edit/infer", data=body, headers=headers
                ) as answer:
                    assert answer.status == 200


async def test_a_connection_with_a_request_under_way_does_not_give_way():
    async with cluster(hardware=FAST, http={"max_connections": 4}) as (router, workers):
        for worker in workers:
            worker.hold()
        async with aiohttp.ClientSession(url_of(router)) as session:
            body, headers = http_parts(http_edit())
            under_way = asyncio.create_task(
                session.post("/v2/models/edit/infer", data=body, headers=headers)
            )
            await until("a worker has it", lambda: any(worker.requests for worker in workers))
            async with idle(router.http.port, 20):
                for worker in workers:
                    worker.let_go()
                assert (await under_way).status == 200


async def test_grpc_connections_that_say_nothing_end():
    bounds = {"grpc": {"max_connections": 8, "idle_s": 0.3}, "http": {"header_timeout_s": 0.3}}
    async with (
        cluster(**bounds) as (router, _),
        idle(router.grpc.port, 30),
        calling(router) as call,
    ):
        assert await asyncio.wait_for(call(edit(), wait_for_ready=True), 30)


def test_connections_are_as_many_as_descriptors_bear(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 524_288))
    assert connections(4096) == 384
    limit_calls: list[Any] = []
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: limit_calls.append(limits))
    raise_limit()
    assert limit_calls == [(65_536, 524_288)]
    monkeypatch.setattr(resource, "getrlimit", lambda _: (65_536, 65_536))
    assert connections(4096) == 4096
    raise_limit()
    assert len(limit_calls) == 1


def test_lines_that_strangers_cause_are_limited(caplog: Any):
    """Connections that could not be accepted logged 51 MB a minute."""
    lines: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = lines.append  # type: ignore[method-assign]
    handler.addFilter(Repeats())

    def say(text: str, at: float, level: int = logging.ERROR) -> None:
        record = logging.LogRecord("asyncio", level, "", 0, text, None, None)
        record.created = at
        handler.handle(record)

    for number in range(1000):
        say(f"accept failed, fd={number} at 0x7f{number:02x}", 100.0 + number / 1000)
        say("edit OK", 100.0, logging.INFO)
    say("something else", 101.0)
    errors = [line for line in lines if line.levelno == logging.ERROR]
    assert len(errors) == 21
    assert len(lines) == 1021
    say("accept failed, fd=7 at 0x7f", 120.0)
    assert lines[-1].fields == {"left_out": 980}  # type: ignore[attr-defined]


# Clients that do not read


@asynccontextmanager
async def buffer(router: Router, count: int, **settings: Any) -> AsyncIterator[Any]:
    """A stream with so many edits, whose answers nobody reads."""
    async with grpc.aio.insecure_channel(f"127.0.0.1:{router.grpc.port}") as channel:
        call = channel.stream_stream(STREAM)()
        for _ in range(count):
            message = pb.ModelInferRequest.FromString(edit(**settings))
            message.model_name = "edit_stream"
            await call.write(message.SerializeToString())
        yield call
        call.cancel()


def at_workers(router: Router) -> int:
    return sum(len(worker.sent) for worker in router.pool.workers.values())


async def test_an_attempt_ends_at_the_workers_last_message(monkeypatch: pytest.MonkeyPatch):
    """Streams that do not read held places at workers, and with them a drain, without end."""
    async with cluster() as (router, workers):
        for worker in workers:
            worker._answer = bytes(8 * MIB)
            worker.progress = 40
        async with buffer(router, 12):
            await until("all are sent", lambda: sum(len(w.requests) for w in workers) == 12)
            await until("no worker holds one", lambda: at_workers(router) == 0)
            assert router.admission.edits > 0
            # Its stream counts an answer a little after the worker has ended its attempt.
            await until("answers are held", lambda: router.admission.bytes > 8 * MIB)
            url = f"http://127.0.0.1:{router.admin.port}"
            async with aiohttp.ClientSession(url) as session:
                for worker in workers:
                    async with session.post(f"/workers/{worker.address}/drain?wait=60") as response:
                        assert (await response.json())["in_flight"] == 0
        await until("all are given up", lambda: router.admission.edits == 0)
        await until("nothing is held", lambda: router.admission.bytes == 0)


async def test_who_does_not_read_is_given_up(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(grpc_server, "_PATIENCE_S", 0.2)
    monkeypatch.setattr(grpc_server, "_LEAST_PACE", 2**40)
    monkeypatch.setattr(http_server, "_PATIENCE_S", 0.2)
    async with cluster() as (router, workers):
        for worker in workers:
            worker._answer = bytes(16 * MIB)
        _, writer = await asyncio.open_connection("127.0.0.1", router.http.port, limit=1024)
        writer.write(http_edit())
        async with buffer(router, 4):
            await until("all are sent", lambda: sum(len(w.requests) for w in workers) == 5)
            await until("they are given up", lambda: router.admission.edits == 0)
            await until("nothing is held", lambda: router.admission.bytes == 0)
        await until("the connection is closed", lambda: not router.http.server_state.connections)
        writer.close()


async def test_a_client_that_has_gone_is_no_error_of_the_router() -> None:
    """So a write ends whose patience is over while the connection is lost."""
    context = AsyncMock()
    context.write.side_effect = grpc.aio.InternalError('Failed "execute_batch"')
    with pytest.raises(Cancelled):
        await grpc_server._write(context, b"answer")


def test_progress_that_nobody_reads_is_forgotten_and_the_answer_is_not():
    buffer = StreamBuffer()
    for number in range(200):
        buffer.put(Message(b"%d" % number, passing=True))
    buffer.put(Message(b"answer"))
    for _ in range(100):
        buffer.put(Message(b"late", passing=True))
    buffer.put(Message(bytes(8 * MIB), passing=True))
    buffer.put(Message(b""))
    buffer.end()
    contents = [message.content for message in buffer._messages]
    assert contents == [b"answer", b""]
    assert buffer.size == 6


async def test_a_client_that_reads_gets_every_event():
    async with cluster() as (router, workers):
        for worker in workers:
            worker.progress = 50
        async with buffer(router, 1) as call:
            await call.done_writing()
            events = [pb.ModelStreamInferResponse.FromString(raw) async for raw in call]
        assert len(events) == 51


async def test_large_answers_are_written_off_the_loop(monkeypatch: pytest.MonkeyPatch):
    """Base64 and JSON of a picture of 50 megapixels held the loop for half a second."""
    threads: dict[str, threading.Thread] = {}

    def watch(module: Any, name: str) -> None:
        real = getattr(module, name)

        def record_thread(*args: Any) -> Any:
            threads[name] = threading.current_thread()
            return real(*args)

        monkeypatch.setattr(module, name, record_thread)

    answer = pb.ModelInferResponse(model_name="edit")
    bytes_tensor.add_output(answer, "IMAGE", [b"x" * MIB])
    bytes_tensor.add_output(answer, "META", [b"{}"])

    class Front:
        models = MODELS

        def client(self, headers: object) -> KeyHolder:
            return holder("a")

        def room(self, client: KeyHolder) -> EditRoom:
            return Admission(AdmissionBounds(), Metrics()).room(client)

        def rooms(self, client: KeyHolder) -> PictureRooms:
            return PictureRooms(Admission(AdmissionBounds(), Metrics()), client)

        async def infer(self, *_: Any) -> bytes:
            return answer.SerializeToString()

        async def stream(self, *_: Any) -> AsyncIterator[bytes]:
            yield pb.ModelStreamInferResponse(infer_response=answer).SerializeToString()

    watch(http_inference, "generate_response")
    any_front: Any = Front()
    none: Any = None
    generated = http_inference.HttpInference(none, any_front, FairShare(1))
    context = CallContext(holder("a"), 2 * MIB, {}, "any")
    for model in ("edit", "edit_stream"):
        message = ModelRequest(pb.ModelInferRequest(model_name=model))
        room = any_front.room(holder("a"))
        assert len([chunk async for chunk in generated._answers(message, context, room)]) == 1
        assert threads.pop("generate_response") is not threading.current_thread()
    for name in ("_edit_message", "_picture_of"):
        watch(form_pictures, name)
    form = EditForm(Fields(prompt="a"), b"i" * MIB, b"m", {})
    call = form_pictures.FormCall(form, context, "r")
    maker = form_pictures.FormPictures(any_front, FairShare(1), {})
    pictures = maker.make(call)
    assert [len(picture) async for picture, _ in pictures] == [MIB]
    assert threads.pop("_picture_of") is not threading.current_thread()
    room = any_front.room(holder("a"))
    events = await maker.stream(call, {}, room)
    assert [len(picture) async for picture, _ in events] == [MIB]
    assert sorted(threads) == ["_edit_message", "_picture_of"]
    assert threading.current_thread() not in threads.values()
