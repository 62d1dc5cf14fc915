"""The tries of a call at the servers of a pool."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest

from maskserve_common.errors import EngineFailed
from maskserve_common.servers import call_tries
from maskserve_common.servers.call_tries import CallTries
from maskserve_common.servers.failure import Failure, Status
from maskserve_common.servers.pool import Server, ServerPool

_CRASHED = Failure(Status.INTERNAL, "Stub process died")
_FAILED = Failure(Status.INTERNAL, "[ENGINE_FAILED] there is no room")
_ABSENT = Failure(Status.UNAVAILABLE, "failed to connect to all addresses")


class Named(Server):
    kind = "server"


class Pool(ServerPool[Server]):
    """Servers that are never polled.

    Args:
        names: their addresses.
    """

    def __init__(self, names: str) -> None:
        super().__init__(names, 60.0)
        self.servers.update({name: self._add_server(name) for name in names})

    def _add_server(self, address: str) -> Server:
        return Named(address)

    async def _ask(self, server: Server) -> str:
        raise NotImplementedError

    def _interval_s(self, server: Server) -> float:
        raise NotImplementedError

    async def _finish(self, server: Server) -> None:
        raise NotImplementedError


async def tried(
    pool: Pool, failures: Sequence[Failure], patience_s: float = 9.0
) -> tuple[str, CallTries[Server]]:
    """Return the servers that a call with these failures is tried at, the last in vain or not."""
    tries, names = CallTries(pool, "blur", patience_s), ""
    for failure in (*failures, None):
        server = await tries.next_server(lambda server: server.address)
        if server is None:
            break
        names += server.address
        if failure is not None:
            tries.record_failure(server, failure)
    return names, tries


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_tries, "_WAIT_S", 1e-4)


@pytest.mark.parametrize(
    ("servers", "failures", "names"),
    [
        ("abc", [_CRASHED], "ab"),
        ("abc", [_FAILED], "ab"),
        ("ab", [_ABSENT, _ABSENT, _ABSENT], "abab"),
        ("ab", [_CRASHED, _ABSENT, _ABSENT], "abbb"),  # what failed it is not asked again
        ("a", [_CRASHED], "aa"),  # unless it is alone: its supervisor restarts it
        ("a", [_FAILED], "a"),  # but an error of ours stays
    ],
)
async def test_servers_are_tried_in_rounds(
    servers: str, failures: list[Failure], names: str
) -> None:
    pool = Pool(servers)
    assert (await tried(pool, failures))[0] == names
    await pool.close()


async def test_two_lost_servers_end_a_call() -> None:
    pool = Pool("abc")
    with pytest.raises(EngineFailed, match="blur: its server failed the call"):
        await tried(pool, [_CRASHED, _CRASHED])
    await pool.close()


async def test_a_call_waits_for_servers_no_longer_than_they_take_to_come_back() -> None:
    pool = Pool("a")
    names, tries = await tried(pool, [_ABSENT] * 10_000, 0.05)
    assert (len(names) > 1, tries.returning, tries.failure) == (True, True, None)
    pool.servers["a"].answered_at = time.monotonic() - 10.0
    assert (await tried(pool, [_ABSENT] * 3))[0] == "a"  # it has been gone for too long
    await pool.close()


async def test_a_server_is_left_out_of_one_name_until_it_has_been_away(
    caplog: pytest.LogCaptureFixture,
) -> None:
    pool = Pool("ab")
    server = pool.servers["a"]
    for _ in range(2):
        pool.leave_out(server, "blur", "is of another version")
    assert [record.getMessage() for record in caplog.records] == [
        "server a is left out: is of another version"
    ]
    server.record_poll()
    assert (await tried(pool, []))[0] == "b"
    assert await CallTries(pool, "find", 9.0).next_server(lambda x: x.address) is server
    server.misses += 1
    server.record_poll()
    assert (await tried(pool, []))[0] == "a"
    await pool.close()
