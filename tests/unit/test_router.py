"""A whole router over emulated workers: real sockets, and workers that answer, fail or die."""

from __future__ import annotations

import asyncio
import base64
import gzip
import hashlib
import json
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import grpc.aio
import pytest
import trustme
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tritonclient.grpc import service_pb2 as pb

from maskserve_core.routing import Edit, NoWorkerAvailable, make_policy
from maskserve_harness.cluster.emulated import EmulatedWorker
from maskserve_harness.cluster.requests import INFER, edit_request, mask_of
from maskserve_harness.simulator.hardware import Hardware
from maskserve_router.config import router_config_of
from maskserve_router.control import cluster_status
from maskserve_router.pool import Pool
from maskserve_router.room import Room
from maskserve_router.router import Router
from maskserve_router.worker import PolledStatus, Worker
from tests.fakes.collector import collector

SIDE = 64
FAST = Hardware(dense_seconds=0.01)


class Faulty(EmulatedWorker):
    """Fails the first so many edits, in a way that the test chooses."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.fails = 0
        self.status = grpc.StatusCode.INTERNAL
        self.text = "[ENGINE_FAILED] the process of its denoiser has died"
        self.seen: list[dict[str, Any]] = []
        self.headers: list[dict[str, Any]] = []
        self._frozen = False

    def freeze(self) -> None:
        """Answer nothing any more, as a stopped process does."""
        self._frozen = True

    async def _infer(self, raw: bytes, context: Any) -> bytes:
        if self._frozen:
            await asyncio.Event().wait()
        message = pb.ModelInferRequest.FromString(raw)
        if message.model_name != "control":
            self.headers.append(dict(context.invocation_metadata()))
            self.seen.append(json.loads(message.raw_input_contents[3][4:]))
            if self.fails:
                self.fails -= 1
                await context.abort(self.status, self.text)
        answer = await super()._infer(raw, context)
        if self._frozen:
            await asyncio.Event().wait()
        return answer


@asynccontextmanager
async def cluster(
    hardware: Hardware | None = None, models: tuple[str, ...] = ("flux", "flux"), **tables: Any
) -> AsyncIterator[tuple[Router, list[Faulty]]]:
    workers = [Faulty(f"w{i}", hardware, model=model) for i, model in enumerate(models)]
    for worker in workers:
        await worker.start()
    try:
        config = {
            "listen": {"http_port": 0, "grpc_port": 0, "admin_port": 0},
            **tables,
            "workers": {"addresses": [worker.address for worker in workers], "poll_timeout_s": 2.0},
        }
        listen = {"http_port": 0, "grpc_port": 0, "admin_port": 0, **tables.get("listen", {})}
        async with Router(router_config_of({**config, "listen": listen})) as router:
            yield router, workers
    finally:
        for worker in workers:
            await worker.stop()


def edit(active: int = 100, **settings: Any) -> bytes:
    return edit_request(b"", mask_of(active, SIDE), template_id="0" * 32, **settings)


@asynccontextmanager
async def calling(router: Router) -> AsyncIterator[Any]:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{router.grpc.port}") as channel:
        yield channel.unary_unary(INFER)


async def until(what: str, holds: Any) -> None:
    for _ in range(500):
        if holds():
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"never: {what}")


async def test_an_edit_that_a_worker_fails_is_done_by_another_with_the_same_seed():
    async with cluster() as (router, workers), calling(router) as call:
        for worker in workers:
            worker.fails = 1
        with pytest.raises(grpc.aio.AioRpcError, match="ENGINE_FAILED"):
            await call(edit())  # both failed it: one retry, and no more
        assert [len(worker.seen) for worker in workers] == [1, 1]
        seeds = {json.dumps(worker.seen[0], sort_keys=True) for worker in workers}
        assert len(seeds) == 1
        workers[0].fails = 1
        workers[1].fails = 0
        await call(edit())
        assert router.admission.edits == 0
        assert all(not worker.sent for worker in router.pool.workers.values())


@pytest.mark.parametrize(
    ("status", "text", "tries"),
    [
        (grpc.StatusCode.INVALID_ARGUMENT, "[INVALID_REQUEST] MASK: no", 1),
        (grpc.StatusCode.UNAVAILABLE, "[DEADLINE_EXCEEDED] late", 1),
        (grpc.StatusCode.UNAVAILABLE, "[OVERLOADED] draining", 2),
        (grpc.StatusCode.NOT_FOUND, "[TEMPLATE_NOT_FOUND] not here", 2),
        (grpc.StatusCode.UNAVAILABLE, "Socket closed", 2),
    ],
)
async def test_what_is_tried_again(status: grpc.StatusCode, text: str, tries: int):
    async with cluster() as (router, workers), calling(router) as call:
        for worker in workers:
            worker.fails, worker.status, worker.text = 9, status, text
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await call(edit())
        assert failed.value.code() is status
        assert sum(len(worker.seen) for worker in workers) == tries


async def test_retries_stop_at_their_budget():
    faults = {"retry_floor": 0, "retry_share": 0.0}
    async with cluster(faults=faults) as (router, workers), calling(router) as call:
        for worker in workers:
            worker.fails = 1
        with pytest.raises(grpc.aio.AioRpcError):
            await call(edit())
        assert sum(len(worker.seen) for worker in workers) == 1


async def test_a_worker_that_keeps_failing_is_ejected_and_comes_back():
    faults = {"failures_to_eject": 2, "eject_s": 0.4}
    routing = {"policy": "round_robin"}
    running = cluster(faults=faults, routing=routing)
    async with running as (router, workers), calling(router) as call:
        workers[0].fails = 2
        for _ in range(4):
            await call(edit())
        bad = router.pool.workers[workers[0].address]
        assert bad.breaker.ejected
        for _ in range(4):
            await call(edit())
        assert len(workers[0].seen) == 2
        await asyncio.sleep(0.5)
        for _ in range(4):
            await call(edit())
        assert not bad.breaker.ejected


async def test_what_a_silent_worker_holds_goes_to_another():
    running = cluster(hardware=Hardware(dense_seconds=0.2))
    async with running as (router, workers), calling(router) as call:
        pending = [asyncio.ensure_future(call(edit(active=4096))) for _ in range(4)]
        held = router.pool.workers
        await until("they run", lambda: sum(len(w.sent) for w in held.values()) == 4)
        silent = next(w for w in workers if held[w.address].sent)
        silent.freeze()
        await asyncio.wait_for(asyncio.gather(*pending), 60)
        assert not held[silent.address].up
        status = cluster_status("router", held.values())
        assert status["alive"]
        assert status["workers"][silent.address]["state"] == "down"
        assert "running" not in status["workers"][silent.address]  # what it last said is over


async def test_a_deadline_that_cannot_be_met_is_refused_at_once():
    async with cluster(hardware=FAST) as (router, workers), calling(router) as call:
        with pytest.raises(grpc.aio.AioRpcError, match=r"deadline_ms: the edit would take") as late:
            await call(edit(active=4096, deadline_ms=10))
        assert late.value.code() is grpc.StatusCode.UNAVAILABLE
        assert dict(late.value.trailing_metadata())["retry-after"] == "1"
        await call(edit(active=4096, deadline_ms=10_000))
        assert sum(len(worker.seen) for worker in workers) == 1


async def test_overload_is_refused_and_every_edit_is_answered():
    admission = {"max_edits": 20, "waiting_per_worker": 2}
    async with cluster(hardware=FAST, admission=admission) as (router, _):
        async with calling(router) as call:
            answers = await asyncio.gather(
                *(call(edit()) for _ in range(60)), return_exceptions=True
            )
        refused = [a for a in answers if isinstance(a, grpc.aio.AioRpcError)]
        assert 0 < len(refused) <= 40
        assert all("[OVERLOADED]" in (error.details() or "") for error in refused)
        assert (router.admission.edits, router.admission.bytes, len(router.room)) == (0, 0, 0)


async def test_two_edits_of_one_request_id_are_not_under_way_together():
    async with cluster(hardware=FAST) as (router, _), calling(router) as call:
        first = asyncio.ensure_future(call(edit(request_id="same")))
        await asyncio.sleep(0.05)
        with pytest.raises(grpc.aio.AioRpcError, match="in flight"):
            await call(edit(request_id="same"))
        await first
        await call(edit(request_id="same"))


async def test_keys_and_tls(tmp_path: Path):
    authority = trustme.CA()
    certificate = authority.issue_cert("localhost")
    certificate.private_key_pem.write_to_path(str(tmp_path / "key.pem"))
    for i, blob in enumerate(certificate.cert_chain_pems):
        blob.write_to_path(str(tmp_path / "cert.pem"), append=i > 0)
    listen = {"tls_cert": str(tmp_path / "cert.pem"), "tls_key": str(tmp_path / "key.pem")}
    keys = [{"name": "a", "sha256": hashlib.sha256(b"open sesame").hexdigest()}]
    async with cluster(listen=listen, keys=keys) as (router, _):
        trusted = authority.cert_pem.bytes()
        credentials = grpc.ssl_channel_credentials(trusted)
        target = f"localhost:{router.grpc.port}"
        async with grpc.aio.secure_channel(target, credentials) as channel:
            call = channel.unary_unary(INFER)
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call(edit())
            assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
            assert await call(edit(), metadata=(("x-api-key", "open sesame"),))
            evict = control_request("evict", template_id="0" * 32)
            with pytest.raises(grpc.aio.AioRpcError, match="may not evict"):
                await call(evict, metadata=(("authorization", "Bearer open sesame"),))
        context = ssl.create_default_context()
        authority.configure_trust(context)
        reader, writer = await asyncio.open_connection("localhost", router.http.port, ssl=context)
        writer.write(b"GET /readyz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        assert (await reader.read()).startswith(b"HTTP/1.1 200")
        writer.close()


def control_request(op: str, **fields: str) -> bytes:
    message = pb.ModelInferRequest(model_name="control")
    message.inputs.add(name="OP", datatype="BYTES", shape=[1])
    value = json.dumps({"op": op, **fields}).encode()
    message.raw_input_contents.append(len(value).to_bytes(4, "little") + value)
    encoded: bytes = message.SerializeToString()
    return encoded


async def test_the_model_that_settings_name_chooses_among_workers():
    async with cluster(models=("one", "two")) as (router, workers), calling(router) as call:
        for _ in range(3):
            await call(edit(model="two"))
        assert [len(worker.seen) for worker in workers] == [0, 3]
        with pytest.raises(grpc.aio.AioRpcError, match="is not served here; accepted: one, two"):
            await call(edit(model="three"))
        with pytest.raises(grpc.aio.AioRpcError, match=r"SETTINGS\.model: is needed"):
            await call(edit())
    routing = {"default_model": "one"}
    running = cluster(models=("one", "two"), routing=routing)
    async with running as (router, workers), calling(router) as call:
        await call(edit())
        assert [len(worker.seen) for worker in workers] == [1, 0]


async def test_http_says_how_things_stand_by_its_status():
    admission = {"max_edits": 1}
    async with cluster(hardware=FAST, admission=admission) as (router, workers):
        url = f"http://127.0.0.1:{router.http.port}"
        body = {
            "inputs": [
                {"name": name, "datatype": "BYTES", "shape": [1], "data": [text]}
                for name, text in (
                    ("IMAGE", ""),
                    ("MASK", base64.b64encode(mask_of(100, SIDE)).decode()),
                    ("PROMPT", "x"),
                    ("SETTINGS", json.dumps({"template_id": "0" * 32})),
                )
            ]
        }
        async with aiohttp.ClientSession(url) as session:

            async def infer(model: str = "edit") -> tuple[int, str | None, Any]:
                path = f"/v2/models/{model}/infer"
                async with session.post(path, data=json.dumps(body)) as answer:
                    return answer.status, answer.headers.get("retry-after"), await answer.json()

            answers = await asyncio.gather(infer(), infer())
            assert sorted(status for status, _, _ in answers) == [200, 429]
            refused = max(answers)
            assert refused[1] == "1"
            assert refused[2]["error"].startswith("[OVERLOADED] 1 edits are under way")
            assert (await infer("denoiser"))[0] == 404
            async with session.get("/v2/models/denoiser/ready") as answer:
                assert answer.status == 400
            for worker in workers:
                worker.fails, worker.text = 1, "[ENGINE_FAILED] broken"
            assert (await infer())[0] == 503
            gzipped = gzip.compress(json.dumps(body).encode())
            headers = {"content-encoding": "gzip"}
            path = "/v2/models/edit/infer"
            async with session.post(path, data=gzipped, headers=headers) as answer:
                assert answer.status == 200
            bomb = gzip.compress(bytes(200 * 2**20))
            async with session.post(path, data=bomb, headers=headers) as answer:
                assert answer.status == 400
            for worker in workers:
                await worker.stop()
            await until("both are down", lambda: not router.pool.up())
            assert (await infer())[0] == 503
            async with session.get("/readyz") as answer:
                assert answer.status == 503
            async with session.get("/healthz") as answer:
                assert answer.status == 200


async def test_grpcs_own_health_check_follows_the_workers():
    states = health_pb2.HealthCheckResponse
    async with (
        cluster() as (router, workers),
        grpc.aio.insecure_channel(f"127.0.0.1:{router.grpc.port}") as channel,
    ):
        check = health_pb2_grpc.HealthStub(channel).Check
        await until("a worker serves", router.pool.ready)
        assert (await check(health_pb2.HealthCheckRequest())).status == states.SERVING
        for worker in workers:
            await worker.stop()
        await until("both are down", lambda: not router.pool.up())
        assert (await check(health_pb2.HealthCheckRequest())).status == states.NOT_SERVING


async def test_routers_side_by_side_see_each_others_edits():
    async with cluster(hardware=Hardware(dense_seconds=0.05)) as (router, workers):
        config = {
            "listen": {"http_port": 0, "grpc_port": 0, "admin_port": 0},
            "workers": {"addresses": [worker.address for worker in workers]},
        }
        async with Router(router_config_of(config)) as other, calling(router) as call:
            pending = asyncio.ensure_future(call(edit(active=4096)))
            await until("it runs", lambda: any(worker._running for worker in workers))
            busy = next(worker for worker in workers if worker._running)
            await until(
                "the other has read of it",
                lambda: bool(other.pool.workers[busy.address].view(0.0).running),
            )
            async with calling(other) as elsewhere:
                await elsewhere(edit())
            assert [len(worker.seen) for worker in workers] == [1, 1]
            await pending


async def test_the_routers_span_stands_between_the_clients_and_the_workers():
    with collector() as collected:
        trace = {"otlp_url": collected.url, "interval_s": 0.05}
        async with cluster(trace=trace) as (router, workers), calling(router) as call:
            trace_id, parent = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
            await call(edit(), metadata=(("traceparent", f"00-{trace_id}-{parent}-01"),))
            (headers,) = [h for worker in workers for h in worker.headers]
            await until("the span has come", lambda: collected.trace(trace_id))
    (span,) = collected.trace(trace_id)
    assert (span.name, span.parent_id) == ("route", parent)
    assert headers["traceparent"] == f"00-{trace_id}-{span.span_id}-01"
    assert span.attributes["maskserve.code"] == "OK"


# The waiting room, without sockets.


def full_pool(places: int) -> tuple[Pool, Worker]:
    """One worker of one row, at which so many may wait."""
    config = router_config_of({"admission": {"waiting_per_worker": places}})
    pool = Pool(config, lambda: None)
    worker = pool.workers["w:1"] = Worker("w:1", config)
    worker.heard(PolledStatus("w", "m", "ready", max_rows=1, max_waiting=99), 0.0)
    return pool, worker


async def test_a_low_priority_that_has_waited_is_not_overtaken_for_ever():
    pool, worker = full_pool(1)
    room = Room(pool, make_policy("mask_aware"), 5.0, lambda _: None)
    plain, urgent = Edit(4, 1, 9, model="m"), Edit(4, 1, 9, priority=2, model="m")
    first = await room.enter("first", plain, 0.0, None)
    order: list[str] = []

    async def wait(name: str, edit: Edit, arrival: float) -> None:
        sent = await room.enter(name, edit, arrival, None)
        order.append(name)
        worker.remove(sent)
        room.dispatch()

    waiting = [
        asyncio.ensure_future(wait(*one))
        for one in (("old", plain, 0.0), ("urgent", urgent, 9.0), ("late urgent", urgent, 11.0))
    ]
    await asyncio.sleep(0)
    assert len(room) == 3
    worker.remove(first)
    room.dispatch()
    await asyncio.gather(*waiting)
    # Two steps of priority are worth ten seconds: the one that came after that waits.
    assert order == ["urgent", "old", "late urgent"]
    await worker.upstream.close()


async def test_nobody_waits_where_nobody_serves():
    pool, worker = full_pool(1)
    room = Room(pool, make_policy("mask_aware"), 5.0, lambda _: None)
    worker.up = False
    with pytest.raises(NoWorkerAvailable):
        await room.enter("x", Edit(1, 1, 1), 0.0, None)
    assert len(room) == 0
    await worker.upstream.close()


async def test_an_edit_whose_client_leaves_the_room_leaves_no_trace():
    pool, worker = full_pool(1)
    room = Room(pool, make_policy("mask_aware"), 5.0, lambda _: None)
    first = await room.enter("first", Edit(4, 1, 9), 0.0, None)
    second = asyncio.ensure_future(room.enter("second", Edit(4, 1, 9), 0.0, None))
    await asyncio.sleep(0)
    second.cancel()
    await asyncio.gather(second, return_exceptions=True)
    assert len(room) == 0
    # Its place came in the same moment in which its client left.
    third = asyncio.ensure_future(room.enter("third", Edit(4, 1, 9), 0.0, None))
    await asyncio.sleep(0)
    worker.remove(first)
    room.dispatch()
    third.cancel()
    await asyncio.gather(third, return_exceptions=True)
    assert not worker.sent
    await worker.upstream.close()
