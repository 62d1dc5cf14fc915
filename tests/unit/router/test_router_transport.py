"""Connections that are silent for minutes, pings, and pages of other origins."""

from __future__ import annotations

import asyncio
import json
import socket
from pathlib import Path

import aiohttp
import grpc.aio
import pytest

from maskserve_common import transport
from maskserve_common.config import Config, ConfigError
from maskserve_router.config import router_config_of
from maskserve_serving.command import command
from maskserve_serving.options import ServeOptions
from maskserve_serving.ports import Ports
from maskserve_serving.runtime import Runtime
from tests.support.router import FAST, calling, cluster, edit

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\4\0\0\0\0\0"  # and empty settings
PING, GOAWAY = 6, 7


def ping(number: int) -> bytes:
    return b"\0\0\10\6\0\0\0\0\0" + number.to_bytes(8, "big")


async def answers(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    """The next ping's acknowledgement, or GOAWAY: (type, body)."""
    while True:
        head = await reader.readexactly(9)
        body = await reader.readexactly(int.from_bytes(head[:3], "big"))
        if head[3] == GOAWAY or (head[3] == PING and head[4] & 1):
            return head[3], body


async def test_pings_as_load_balancers_want_them_end_no_connection():
    """GRPC's own servers end it at the third ping within five minutes."""
    async with cluster(hardware=FAST) as (router, _):
        reader, writer = await asyncio.open_connection("127.0.0.1", router.grpc.port)
        writer.write(PREFACE)
        for number in range(8):
            writer.write(ping(number))
            assert await answers(reader) == (PING, number.to_bytes(8, "big"))
            await asyncio.sleep(1.2 * transport.LEAST_PING_INTERVAL_MS / 1e3)  # a client's pace
        writer.close()


async def test_a_flood_of_pings_ends_its_connection_alone():
    async with cluster(hardware=FAST) as (router, _), calling(router) as call:
        reader, writer = await asyncio.open_connection("127.0.0.1", router.grpc.port)
        writer.write(PREFACE + b"".join(map(ping, range(10_000))))
        kind = PING
        while kind == PING:  # those that came at once are answered
            kind, body = await answers(reader)
        assert b"too_many_pings" in body
        await call(edit())
        writer.close()


async def test_an_edit_outlives_the_pings_of_its_client():
    options = (("grpc.keepalive_time_ms", 300), ("grpc.keepalive_permit_without_calls", 1))
    options += (("grpc.http2.max_pings_without_data", 0),)
    async with cluster(hardware=FAST) as (router, workers):
        for worker in workers:
            worker.hold()
        address = f"127.0.0.1:{router.grpc.port}"
        async with grpc.aio.insecure_channel(address, options) as channel:
            method = "/inference.GRPCInferenceService/ModelInfer"
            under_way = asyncio.ensure_future(channel.unary_unary(method)(edit()))
            await asyncio.sleep(2)  # six pings
            assert not under_way.done()
            for worker in workers:
                worker.let_go()
            await under_way


def test_a_worker_takes_the_same_pings() -> None:
    runtime = Runtime(Path("/triton"), None, (), "2.51.0")
    command_line = command(ServeOptions(model="m"), Config(), runtime, Ports(1, 2, 3), "x")
    assert set(transport.TRITON) <= set(command_line)
    assert "--grpc-http2-min-recv-ping-interval-without-data=250" in command_line


async def test_silent_connections_are_kept_alive_and_idle_ones_kept():
    async with cluster(hardware=FAST) as (router, _):
        listener = router.http._socket
        assert listener is not None
        assert listener.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert listener.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 30
        assert router.http.config.timeout_keep_alive == 620


async def test_pages_of_other_origins_call_only_where_they_are_listed():
    preflight_headers = {
        "Origin": "https://app.example.com",
        "Access-Control-Request-Method": "POST",
    }
    preflight_headers["Access-Control-Request-Headers"] = "authorization,x-stainless-lang"
    allowed = "access-control-allow-origin"
    http = {"cors_origins": ["https://app.example.com"]}
    for tables, expected in (({}, None), ({"http": http}, "https://app.example.com")):
        async with cluster(hardware=FAST, **tables) as (router, _), aiohttp.ClientSession() as web:
            url = f"http://127.0.0.1:{router.http.port}/v1/models"
            async with web.options(url, headers=preflight_headers) as answer:
                assert answer.headers.get(allowed) == expected
                assert (answer.status == 200) == (expected is not None)
                assert "access-control-allow-credentials" not in answer.headers
                if expected:
                    named = answer.headers["access-control-allow-headers"]
                    assert "x-stainless-lang" in named
                    assert "authorization" in named
            async with web.get(url, headers={"Origin": preflight_headers["Origin"]}) as answer:
                assert answer.status == (200 if expected else 401)
                assert answer.headers.get(allowed) == expected
            async with web.get(url, headers={"Origin": "https://evil.example.com"}) as answer:
                assert answer.status == 401
                assert "Origin: 'https://evil.example.com' is another" in await answer.text()
                assert allowed not in answer.headers


async def test_no_page_of_another_site_edits_or_drains():
    """A browser sends simple requests for any page; without keys none is let in."""
    simple = {"Origin": "https://evil.example", "Content-Type": "text/plain"}
    operation = json.dumps({"op": "evict", "template_id": "0" * 32})
    tensor = {"name": "OP", "datatype": "BYTES", "shape": [1], "data": [operation]}
    evict = {"inputs": [tensor]}
    async with cluster(hardware=FAST) as (router, workers), aiohttp.ClientSession() as web:
        operators = f"http://127.0.0.1:{router.admin.port}"
        clients = f"http://127.0.0.1:{router.http.port}/v2/models/control/infer"
        drains = [f"{operators}/workers/{worker.address}/drain" for worker in workers]
        rebound = {"Host": f"evil.example:{router.admin.port}"}
        for url in (*drains, f"{operators}/reload"):
            for headers in (simple, rebound, {**simple, "Origin": "null"}):
                async with web.post(url, headers=headers) as answer:
                    assert answer.status == 403
                    assert "admin_names" in (await answer.json())["error"]
        for path in ("/workers", "/metrics", "/healthz"):
            async with web.get(operators + path, headers=rebound) as answer:
                assert answer.status == 403
        assert not any(worker.draining for worker in router.pool.workers.values())
        async with web.post(clients, data=json.dumps(evict), headers=simple) as answer:
            assert (answer.status, "another site" in await answer.text()) == (401, True)
        same_origin = {"Origin": clients.removesuffix("/v2/models/control/infer")}
        async with web.post(clients, data=json.dumps(evict), headers=same_origin) as answer:
            assert answer.status == 200
        async with web.post(drains[0]) as answer:
            assert answer.status == 200
    listed = {"listen": {"admin_names": ["evil.example"]}}
    async with cluster(hardware=FAST, **listed) as (router, _), aiohttp.ClientSession() as web:
        url = f"http://127.0.0.1:{router.admin.port}/workers"
        async with web.get(url, headers={"Host": "evil.example"}) as answer:
            assert answer.status == 200


def test_an_origin_is_an_origin() -> None:
    for wrong in ("app.example.com", "https://app.example.com/", "https://*.example.com", ""):
        with pytest.raises(ConfigError, match=r"cors_origins.*an origin such as"):
            router_config_of({"http": {"cors_origins": [wrong]}})
