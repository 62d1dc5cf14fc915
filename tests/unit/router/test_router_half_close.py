"""HTTP clients that shut their sending side, and those that have left."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest

from maskserve_router.router import Router
from tests.support.router import FAST, cluster, http_edit, until

INTERIM = b"HTTP/1.1 100 Continue\r\n\r\n"


async def _send(router: Router, request: bytes) -> tuple[asyncio.StreamReader, Any]:
    reader, writer = await asyncio.open_connection("127.0.0.1", router.http.port)
    writer.write(request)
    await writer.drain()
    await until("the edits are taken", lambda: router.admission.edits)
    return reader, writer


@pytest.mark.parametrize("version", ["1.1", "1.0"])
async def test_a_client_that_shuts_its_sending_side_gets_its_answer(version: str):
    async with cluster(FAST, ("flux",)) as (router, workers):
        workers[0].hold()
        reader, writer = await _send(router, http_edit(version=version))
        writer.write_eof()
        if version == "1.1":
            interim_bytes = await asyncio.wait_for(reader.readexactly(2 * len(INTERIM)), 10)
            assert interim_bytes == 2 * INTERIM
        else:
            await asyncio.sleep(0.6)  # longer than it takes to look again
        workers[0].let_go()
        answer = await asyncio.wait_for(reader.read(), 10)
        writer.close()
        interim, final = answer.rsplit(b"HTTP/1.1 200 OK\r\n", 1)
        assert interim.replace(INTERIM, b"") == b""
        assert version == "1.1" or not interim
        assert b"connection: close" in final
        assert b'"IMAGE"' in final


async def test_requests_in_a_row_are_all_answered():
    async with cluster(FAST, ("flux",)) as (router, workers):
        workers[0].hold()
        reader, writer = await _send(router, http_edit() * 3)
        writer.write_eof()
        await asyncio.sleep(0.2)
        workers[0].let_go()
        answer = await asyncio.wait_for(reader.read(), 10)
        writer.close()
        assert answer.count(b"HTTP/1.1 200 OK") == 3


@pytest.mark.parametrize("first", ["leaves", "half-closes and leaves", "leaves by RST"])
async def test_a_client_that_has_left_cancels_its_edit(first: str):
    async with cluster(FAST, ("flux",)) as (router, workers):
        workers[0].hold()
        _, writer = await _send(router, http_edit())
        if first == "half-closes and leaves":
            writer.write_eof()
            await asyncio.sleep(0.2)
            assert router.admission.edits == 1
        if first == "leaves by RST":
            linger = b"\1\0\0\0\0\0\0\0"
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        writer.close()
        await until("its edit is cancelled", lambda: not router.admission.edits)


async def test_a_client_that_shuts_its_sending_side_amid_its_request_has_left():
    async with cluster(FAST, ("flux",)) as (router, _):
        reader, writer = await asyncio.open_connection("127.0.0.1", router.http.port)
        writer.write(http_edit()[:-1])
        writer.write_eof()
        assert await asyncio.wait_for(reader.read(), 5) == b""
        writer.close()
        assert router.admission.edits == 0
