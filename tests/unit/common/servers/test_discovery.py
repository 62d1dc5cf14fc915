"""Servers behind names that change, in one loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import pytest

from maskserve_common.servers.discovery import Discovery
from maskserve_common.servers.pool import Server, ServerPool
from maskserve_common.servers.upstream import Upstream


async def test_a_reload_is_not_undone_by_a_resolution_under_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    goes_on, servers = threading.Event(), set[str]()

    def addresses_of(host: str, port: int, **more: Any) -> Any:
        if host == "old":
            assert goes_on.wait(60)
        return [(None, None, None, "", (f"{host}-1", port))]

    def changed(new: Sequence[str], removed: Sequence[str]) -> None:
        servers.update(new)
        servers.difference_update(removed)

    monkeypatch.setattr("socket.getaddrinfo", addresses_of)
    discovery = Discovery(["dns:old:9"], 60.0, changed)
    ready = asyncio.create_task(discovery.ready())
    await asyncio.sleep(0)
    await discovery.reload(["dns:new:9", "b:1"], 60.0)
    assert servers == {"new-1:9", "b:1"}
    goes_on.set()
    await ready
    assert servers == {"new-1:9", "b:1"}
    await discovery.close()


async def test_a_resolution_that_fails_keeps_nobody_waiting() -> None:
    def changed(new: Sequence[str], removed: Sequence[str]) -> None:
        raise ValueError("not an address")

    discovery = Discovery(["a:1"], 60.0, changed)
    await asyncio.wait_for(discovery.ready(), 5.0)
    await discovery.close()


class Pool(ServerPool[Server]):
    """A pool whose servers finish when the test says so."""

    def __init__(self, *addresses: str) -> None:
        super().__init__(addresses, 60.0)
        self.finishing, self.goes_on = list[Server](), asyncio.Event()

    def _add_server(self, address: str) -> Server:
        return Server(address)

    async def _ask(self, server: Server) -> str:
        server.up = True
        return ""

    def _interval_s(self, server: Server) -> float:
        return 60.0

    async def _finish(self, server: Server) -> None:
        self.finishing.append(server)
        await self.goes_on.wait()


async def test_an_address_that_comes_back_has_a_new_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Server, "kind", "server", raising=False)
    pool = Pool("a:1", "b:1")
    await pool._discovery.ready()
    first = pool.servers["b:1"]
    for addresses in (["a:1"], ["b:1", "a:1"]):
        await pool._discovery.reload(addresses, 60.0)
        await asyncio.sleep(0)
    assert pool.finishing == [first]
    assert pool.servers["b:1"] is not first
    closed: list[str] = []

    async def close(upstream: Upstream, grace_s: float | None = None) -> None:
        closed.append(next(s.address for s in (first, *servers) if s.upstream is upstream))

    servers = list(pool.servers.values())
    monkeypatch.setattr(Upstream, "close", close)
    await pool.close()  # does not wait for calls
    assert sorted(closed) == ["a:1", "b:1", "b:1"]
