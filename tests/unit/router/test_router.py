"""A router over emulated workers: protocols, bounds, keys, models, and what it tells."""

from __future__ import annotations

import asyncio
import base64
import gzip
import hashlib
import json
import math
import re
import socket
import ssl
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import grpc.aio
import pytest
import trustme
from grpc_health.v1 import health_pb2, health_pb2_grpc

from maskserve_benchmarks.simulator.hardware import Hardware
from maskserve_common.routing import Edit
from maskserve_router.config import router_config_of
from maskserve_router.key_holder import KeyHolder
from maskserve_router.messages.model_request import ModelRequest
from maskserve_router.router import Router
from tests.fakes.collector import collector
from tests.support.router import FAST, SIDE, calling, cluster, control_request, edit, until
from tests.support.router_requests import INFER, edit_request, mask_of


async def test_a_deadline_that_cannot_be_met_is_refused_at_once():
    async with cluster(hardware=FAST) as (router, workers), calling(router) as call:
        with pytest.raises(grpc.aio.AioRpcError, match=r"deadline_ms: 10 ms are too") as never:
            await call(edit(active=4096, deadline_ms=10))
        assert never.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert re.search(r"it takes about [1-9]\d+ ms", never.value.details() or "")
        await call(edit(active=4096, deadline_ms=10_000))
        assert sum(len(worker.requests) for worker in workers) == 1


async def test_an_edit_that_has_its_picture_primed_is_not_judged_as_one_without_a_template():
    """It was refused for what it would take dense, which it never runs."""
    async with (
        cluster(hardware=Hardware(dense_seconds=0.2)) as (router, _),
        calling(router) as call,
    ):
        mask = mask_of(16, SIDE)
        with pytest.raises(
            grpc.aio.AioRpcError, match=r"2000 ms are too short .* about 5\d\d\d ms"
        ):
            await call(edit_request(b"", mask, template_id="0" * 32, deadline_ms=2000))
        await call(edit_request(b"", mask, template_id="0" * 32, deadline_ms=2000, cache="require"))


async def test_a_deadline_that_cannot_be_met_now_is_refused_until_later():
    async with cluster(hardware=FAST) as (router, workers), calling(router) as call:
        for worker in workers:
            worker.hold()
        pending = [asyncio.ensure_future(call(edit(active=4096))) for _ in range(8)]
        await until("they are sent", lambda: sum(len(w.requests) for w in workers) == 8)
        alone_s = workers_alone_s(router)
        with pytest.raises(
            grpc.aio.AioRpcError, match=r"deadline_ms: the edit would take"
        ) as refusal:
            await call(edit(active=4096, deadline_ms=int(1.1e3 * alone_s)))
        assert refusal.value.code() is grpc.StatusCode.UNAVAILABLE
        assert int(dict(refusal.value.trailing_metadata())["retry-after"]) >= 1
        soft = edit(active=4096, deadline_ms=1, on_late="finish")
        pending.append(asyncio.ensure_future(call(soft)))
        for worker in workers:
            worker.let_go()
        await asyncio.gather(*pending)
        counted = router.metrics.registry.get_sample_value
        ends = {
            outcome: counted("maskserve_router_slo_total", {"outcome": outcome})
            for outcome in ("met", "late", "deadline", "refused", "failed")
        }
        assert ends == {"met": 0, "late": 1, "deadline": 0, "refused": 1, "failed": 0}
        assert counted("maskserve_router_slack_seconds_count") == 1


@pytest.mark.parametrize("order", ["slack", "fcfs"])
async def test_a_deadline_is_judged_by_the_soonest_place_where_none_is_free(order: str):
    """It waited in vain until it could not be in time any more."""
    tables: Any = {"admission": {"waiting_per_worker": 0}, "routing": {"order": order}}
    async with (
        cluster(Hardware(dense_seconds=2.0), max_rows=1, **tables) as (router, workers),
        calling(router) as call,
    ):
        for worker in workers:
            worker.hold()
        pending = [asyncio.ensure_future(call(edit(active=4096))) for _ in workers]
        await until("they are sent", lambda: sum(len(w.requests) for w in workers) == 2)
        alone_ms = 1e3 * workers_alone_s(router)  # half as much again is allowed for

        async def told_at_once(deadline_ms: float) -> None:
            with pytest.raises(grpc.aio.AioRpcError, match=r"the edit would take about") as refusal:
                await call(edit(active=4096, deadline_ms=int(deadline_ms)))
            assert refusal.value.code() is grpc.StatusCode.UNAVAILABLE

        await told_at_once(1.2 * alone_ms)  # behind one
        pending += [asyncio.ensure_future(call(edit(active=4096))) for _ in range(4)]
        await until("they wait", lambda: len(router.pending) == 4)
        if order == "fcfs":
            await told_at_once(2.4 * alone_ms)  # behind three
        else:  # those before it are due at no time
            urgent = edit(active=4096, deadline_ms=int(2.4 * alone_ms))
            pending.append(asyncio.ensure_future(call(urgent)))
            await until("it waits", lambda: len(router.pending) == 5)
            pending += [
                asyncio.ensure_future(call(edit(active=4096, deadline_ms=int(n * alone_ms))))
                for n in (2.42, 2.44, 2.46)
            ]
            await until("they wait", lambda: len(router.pending) == 8)
            await told_at_once(2.5 * alone_ms)  # behind those that are due before it
        for pending_call in pending:
            pending_call.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
        for worker in workers:
            worker.let_go()


def workers_alone_s(router: Router) -> float:
    """Seconds of the fastest idle worker for an edit of all tokens."""
    now_s = time.monotonic()
    whole_edit = Edit(28, 4096, 4096, model="flux")
    return min(worker.least_s(whole_edit, now_s, alone=True) for worker in router.pool.ready())


async def test_an_edit_whose_source_is_not_known_yet_has_a_price():
    """A workflow's edit with a mask of the client and a picture that a node makes: it had none."""
    async with cluster(hardware=FAST) as (router, _):
        client = KeyHolder("anybody", 64, admin=True)
        messages = map(ModelRequest.parse, (edit_request(b"", mask_of(100, SIDE)), edit(100)))
        price, known_price = [
            await router._dispatcher.alone_s(message, client, "inpaint") for message in messages
        ]
        assert price == known_price > 0


async def test_an_elastic_edit_is_refused_by_what_its_level_takes():
    async with cluster(hardware=FAST) as (router, workers), calling(router) as call:
        for worker in workers:
            served = worker._status.served
            assert served is not None
            worker._status.served = replace(served, skipping="fill", mask_ring=1)
        pool = router.pool.workers.values()
        await until("they say so", lambda: all(w.served and w.served.skipping for w in pool))
        deadline_ms = math.ceil(0.3e3 * workers_alone_s(router))  # and half as much is allowed for
        elastic = {"reuse": "elastic", "deadline_ms": deadline_ms}
        for settings in ({"deadline_ms": deadline_ms}, {**elastic, "reuse_floor": 45.0}):
            with pytest.raises(grpc.aio.AioRpcError, match="are too short for this edit"):
                await call(edit(active=4096, **settings))
        assert not any(worker.requests for worker in workers)
        with suppress(grpc.aio.AioRpcError):  # the emulated worker leaves nothing out, and is late
            await call(edit(active=4096, **elastic, reuse_floor=30.0))
        assert sum(len(worker.requests) for worker in workers) == 1


async def test_overload_is_refused_and_every_edit_is_answered():
    admission = {"max_edits": 20, "waiting_per_worker": 2}
    async with cluster(admission=admission) as (router, workers), calling(router) as call:
        for worker in workers:
            worker.hold()
        pending = [asyncio.ensure_future(call(edit())) for _ in range(60)]
        await until("what is too much is refused", lambda: sum(p.done() for p in pending) == 40)
        for worker in workers:
            worker.let_go()
        answers = await asyncio.gather(*pending, return_exceptions=True)
        refused = [a.details() or "" for a in answers if isinstance(a, grpc.aio.AioRpcError)]
        assert ["[OVERLOADED]" in why for why in refused] == [True] * 40
        assert (router.admission.edits, router.admission.bytes, len(router.pending)) == (0, 0, 0)


async def test_two_edits_of_one_request_id_are_not_under_way_together():
    async with cluster(hardware=FAST) as (router, workers), calling(router) as call:
        for worker in workers:
            worker.hold()
        first = asyncio.ensure_future(call(edit(request_id="same")))
        await until("it is under way", lambda: any(worker.requests for worker in workers))
        with pytest.raises(grpc.aio.AioRpcError, match="in flight"):
            await call(edit(request_id="same"))
        for worker in workers:
            worker.let_go()
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
            status = control_request("status")
            assert await call(status, metadata=(("authorization", "Bearer open sesame"),))
        url = f"https://localhost:{router.http.port}/v2/models/edit/"
        trust = ssl.create_default_context()
        authority.configure_trust(trust)
        async with aiohttp.ClientSession(url) as session:
            for call in ("infer", "generate", "generate_stream"):
                for headers, status in (({}, 401), ({"x-api-key": "open sesame"}, 400)):
                    # Who may not call is told so before the body is looked at.
                    answer = session.post(call, data=b"{", headers=headers, ssl=trust)
                    async with answer as answered:
                        assert answered.status == status
        context = ssl.create_default_context()
        authority.configure_trust(context)
        reader, writer = await asyncio.open_connection("localhost", router.http.port, ssl=context)
        writer.write(b"GET /readyz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        assert (await reader.read()).startswith(b"HTTP/1.1 200")
        writer.close()


async def test_it_is_ready_over_http_once_it_listens_over_grpc():
    ports = dict.fromkeys(("http_port", "grpc_port", "admin_port"), 0)
    router = Router(router_config_of({"listen": ports}))
    starts = []
    for listener in (router.grpc, router.http, router.admin):

        async def start(listener=listener, begin=listener.start):
            await begin()
            starts.append(listener)

        listener.start = start
    async with router:
        assert starts[0] is router.grpc


async def test_the_model_that_settings_name_chooses_among_workers():
    async with cluster(models=("one", "two")) as (router, workers), calling(router) as call:
        for _ in range(3):
            await call(edit(model="two"))
        assert [len(worker.requests) for worker in workers] == [0, 3]
        with pytest.raises(grpc.aio.AioRpcError, match="is not served here; accepted: one, two"):
            await call(edit(model="three"))
        with pytest.raises(grpc.aio.AioRpcError, match=r"SETTINGS\.model: is needed"):
            await call(edit())
    async with cluster(models=("one", "odd", "one")) as (router, workers), calling(router) as call:
        for _ in range(3):
            await call(edit())
        assert not workers[1].requests
    routing = {"default_model": "one"}
    running = cluster(models=("one", "two"), routing=routing)
    async with running as (router, workers), calling(router) as call:
        await call(edit())
        assert [len(worker.requests) for worker in workers] == [1, 0]


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


@pytest.mark.parametrize("busy_port", ["http_port", "grpc_port"])
async def test_a_port_that_is_taken_is_said_in_a_sentence(busy_port):
    """That of gRPC was had as a router was made, and refused by a stack trace."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ports = {
            "http_port": 0,
            "grpc_port": 0,
            "admin_port": 0,
            busy_port: listener.getsockname()[1],
        }
        config = {"listen": {"host": "127.0.0.1", **ports}, "workers": {"addresses": ["w:9"]}}
        router = Router(router_config_of(config))
        with pytest.raises(OSError, match=r"gRPC cannot listen at 127\.0\.0\.1:|in use"):
            await router.__aenter__()


async def test_routers_side_by_side_see_each_others_edits():
    async with cluster(hardware=Hardware(dense_seconds=0.05)) as (router, workers):
        config = {
            "listen": {"http_port": 0, "grpc_port": 0, "admin_port": 0},
            "workers": {"addresses": [worker.address for worker in workers]},
        }
        async with Router(router_config_of(config)) as other_router, calling(router) as call:
            pending = asyncio.ensure_future(call(edit(active=4096)))
            await until("it runs", lambda: any(worker._running for worker in workers))
            busy = next(worker for worker in workers if worker._running)
            await until(
                "the other has read of it",
                lambda: bool(other_router.pool.workers[busy.address].view(0.0).running),
            )
            async with calling(other_router) as elsewhere:
                await elsewhere(edit())
            assert [len(worker.requests) for worker in workers] == [1, 1]
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
