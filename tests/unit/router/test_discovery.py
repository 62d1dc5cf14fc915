"""Servers behind names that change, in one loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import pytest

from maskserve_router.dns import Discovery


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
