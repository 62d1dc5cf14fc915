"""One key does not hurt the others at a router, whatever it sends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import ExitStack

import pytest

import maskserve_router.api.http_body as http_body
import maskserve_router.fair_share as turns
from maskserve_common.errors import InvalidRequest
from maskserve_router.api.http_body import Bodies
from maskserve_router.config import AdmissionBounds, Http, Key
from maskserve_router.fair_share import FairPlaces, FairShare
from maskserve_router.key_holder import KeyHolder
from maskserve_router.keys import KeyRing
from maskserve_router.messages.failures import RetryLater
from maskserve_router.metrics import Metrics
from maskserve_router.scheduling.admission import Admission

MIB = 2**20


def client(name: str) -> KeyHolder:
    return KeyHolder(name, 64, admin=False, scope=name)


def bodies(admission: Admission) -> Bodies:
    return Bodies(Http(), admission, FairShare(1))


class Body:
    """A request whose body comes in these parts, and then stands still or ends."""

    def __init__(self, *parts: bytes, stalls: bool) -> None:
        self.headers: dict[str, str] = {}
        self._parts, self._stalls = parts, stalls

    async def stream(self) -> AsyncIterator[bytes]:
        for part in self._parts:
            yield part
        if self._stalls:
            await asyncio.Event().wait()


async def test_bodies_of_one_key_that_stand_still_leave_bytes_to_others():
    """Six of 160 MiB held all of max_bytes, each for 45 hours; others were refused."""
    admission = Admission(AdmissionBounds(max_bytes=1024 * MIB), Metrics())
    begun: list[asyncio.Task[bytes]] = []
    with ExitStack() as stack:
        for _ in range(6):
            body = Body(bytes(159 * MIB), stalls=True)
            reading = bodies(admission).read(body, client("greedy"), stack)  # type: ignore[arg-type]
            begun.append(asyncio.create_task(reading))
        await asyncio.sleep(0)
        while not any(task.done() for task in begun):
            await asyncio.sleep(0)
        with ExitStack() as modest_stack:
            whole = Body(bytes(100 * MIB), stalls=False)
            assert await bodies(admission).read(whole, client("modest"), modest_stack)  # type: ignore[arg-type]
        for task in begun:
            task.cancel()
        ends = await asyncio.gather(*begun, return_exceptions=True)
        assert sum(isinstance(end, RetryLater) for end in ends) == 3
    assert admission.bytes == 0


async def test_a_body_that_came_fast_may_not_stand_still_behind_that(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(http_body, "_PATIENCE_S", 0.05)
    admission = Admission(AdmissionBounds(), Metrics())
    with ExitStack() as stack:
        body = Body(bytes(64 * MIB), stalls=True)
        reading = bodies(admission).read(body, client("slow"), stack)  # type: ignore[arg-type]
        with pytest.raises(InvalidRequest, match="came too slowly"):
            await asyncio.wait_for(reading, 30)
    assert admission.bytes == 0


async def test_a_key_that_uses_much_of_the_router_is_read_from_at_its_pace(
    monkeypatch: pytest.MonkeyPatch,
):
    """Registrations of 40 MiB, four at a time, held the loop for half of the time."""
    now_s, slept = 0.0, 0
    monkeypatch.setattr(turns.time, "monotonic", lambda: now_s)

    async def sleep(seconds: float) -> None:
        nonlocal now_s, slept
        now_s, slept = now_s + seconds, slept + 1

    monkeypatch.setattr(turns.asyncio, "sleep", sleep)
    paced, greedy = FairShare(1), client("greedy")

    async def messages(until: float, seconds: float) -> int:
        """The number of messages of 40 MiB that are read by then."""
        read, end = 0, now_s + until
        while now_s < end:
            await paced.may_read(greedy)
            paced.book_bytes(greedy, 40 * MIB)
            read += 1
            await sleep(seconds)
        return read

    assert await messages(60.0, 0.1) > 550  # alone it has all of it
    await paced.may_read(client("modest"))
    assert slept > 550
    assert await messages(15.0, 0.1) < 16
    slept_before = slept
    for _ in range(9):
        await paced.may_read(client("modest"))
        await paced.may_read(KeyRing((), 3).client({}))
    assert slept == slept_before  # who uses little waits for nobody
    now_s += 60.0
    await paced.may_read(greedy)
    assert slept == slept_before  # nor does anybody by what is long ago


def test_edits_of_one_key_leave_places_to_others():
    admission = Admission(AdmissionBounds(max_edits=12), Metrics())
    with ExitStack() as stack:
        for _ in range(6):
            stack.enter_context(admission.edit(client("greedy")))
        with pytest.raises(RetryLater, match="key greedy has its share: 6 edits"):
            stack.enter_context(admission.edit(client("greedy")))
        stack.enter_context(admission.edit(client("modest")))


def test_without_keys_everybody_may_have_all():
    admission = Admission(AdmissionBounds(max_edits=3), Metrics())
    keyless_client = KeyRing((), 3).client({})
    with ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(admission.edit(keyless_client))


def test_keys_are_told_apart_by_name_and_keep_their_counts():
    first = Key(name="a", sha256="0" * 64)
    ring = KeyRing((first,), 9)
    assert ring._clients[0][1].scope
    ring.change((Key(name="a", sha256="1" * 64), Key(name="b", sha256="2" * 64)))
    assert [holder.name for _, holder in ring._clients] == ["a", "b"]


async def test_a_call_that_leaves_as_a_place_comes_free_holds_none():
    places, entered = FairPlaces(1), list[str]()

    async def call(key: str) -> None:
        await places.enter(key)
        entered.append(key)

    await places.enter("first")
    early, late, last = (asyncio.create_task(call(key)) for key in ("early", "late", "last"))
    await asyncio.sleep(0)
    early.cancel()  # its wait ends before the place comes free
    places.leave("first")
    late.cancel()  # it has the place already
    await asyncio.gather(early, late, return_exceptions=True)
    await asyncio.wait_for(last, 30)
    assert entered == ["last"]
    assert (len(places._queue), places._queue.places.total) == (0, 1)


async def test_calls_of_a_key_go_by_urgency_and_keys_by_turns():
    places, entered = FairPlaces(1), list[str]()

    async def call(key: str, name: str, urgency: float) -> None:
        async with places.place(key, urgency):
            entered.append(name)

    await places.enter("a")
    calls = [("a", "a late", 2.0), ("a", "a soon", 1.0), ("b", "b", 9.0)]
    tasks = [asyncio.create_task(call(*arguments)) for arguments in calls]
    await asyncio.sleep(0)
    places.leave("a")
    await asyncio.gather(*tasks)
    assert entered == ["b", "a soon", "a late"]
    places.resize(3)
    for key in "abc":
        await asyncio.wait_for(places.enter(key), 30)
