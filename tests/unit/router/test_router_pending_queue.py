"""The router's waiting queue, without sockets."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

import pytest

from maskserve_common.contracts.status_record import NodeStatus, RowStatus, ValuesHeld
from maskserve_common.errors import DeadlineExceeded
from maskserve_common.routing import Edit, EncodingPlace, NoWorkerAvailable, make_policy
from maskserve_router.config import router_config_of
from maskserve_router.scheduling.pending_queue import PendingQueue
from maskserve_router.workers.pool import Pool
from maskserve_router.workers.worker import PolledStatus, Worker


def full_pool(places: int) -> tuple[Pool, Worker]:
    """One worker of one row, at which so many may wait."""
    config = router_config_of({"admission": {"waiting_per_worker": places}})
    pool = Pool(config, lambda: None)
    worker = pool.join("w:1")
    worker.take_status(PolledStatus("w", "m", "ready", max_rows=1, max_waiting=99), 0.0)
    return pool, worker


async def test_a_worker_takes_edits_once_all_its_nodes_are_ready() -> None:
    _, worker = full_pool(1)
    assert worker.ready
    node = NodeStatus("upscaler", "big", "loading")
    worker.take_status(PolledStatus("w", "m", "ready", 1, 99, nodes=(node,)), 0.0)
    assert not worker.ready
    node.state = "ready"
    assert worker.ready
    await worker.upstream.close()


async def test_a_low_priority_that_has_waited_is_not_overtaken_for_ever():
    pool, worker = full_pool(1)
    queue = PendingQueue(pool, make_policy("mask_aware"), 5.0, lambda _: None)
    plain, urgent = Edit(4, 1, 9, model="m"), Edit(4, 1, 9, priority=2, model="m")
    first = await queue.enter("first", plain, 0.0, None)
    order: list[str] = []

    async def wait(name: str, edit: Edit, arrival: float) -> None:
        sent_edit = await queue.enter(name, edit, arrival, None)
        order.append(name)
        queue.leave(sent_edit)

    waiting = [
        asyncio.ensure_future(wait(*arguments))
        for arguments in (
            ("old", plain, 0.0),
            ("urgent", urgent, 9.0),
            ("late urgent", urgent, 11.0),
        )
    ]
    await asyncio.sleep(0)
    assert len(queue) == 3
    queue.leave(first)
    await asyncio.gather(*waiting)
    # Two steps of priority are worth ten seconds: the one that came after that waits.
    assert order == ["urgent", "old", "late urgent"]
    await worker.upstream.close()


async def test_who_has_to_begin_first_to_be_in_time_goes_first():
    pool, worker = full_pool(1)
    queue = PendingQueue(pool, make_policy("mask_aware"), 5.0, lambda _: None)
    plain = Edit(4, 1, 9, model="m")
    first = await queue.enter("first", plain, 0.0, None)
    order: list[str] = []

    async def wait(name: str, arrival: float, starts_by: float | None) -> None:
        sent_edit = await queue.enter(name, plain, arrival, None, starts_by=starts_by)
        order.append(name)
        queue.leave(sent_edit)

    waits = (("never", 0.0, None), ("later", 1.0, 50.0), ("soon", 2.0, 9.0), ("late", 9.0, 300.0))
    waiting = [asyncio.ensure_future(wait(*arguments)) for arguments in waits]
    await asyncio.sleep(0)
    queue.leave(first)
    await asyncio.gather(*waiting)
    # Without a due time it counts as one of two minutes, and so does who could begin later.
    assert order == ["soon", "later", "never", "late"]
    await worker.upstream.close()


async def test_nobody_waits_where_nobody_serves():
    pool, worker = full_pool(1)
    queue = PendingQueue(pool, make_policy("mask_aware"), 5.0, lambda _: None)
    worker.up = False
    with pytest.raises(NoWorkerAvailable):
        await queue.enter("x", Edit(1, 1, 1), 0.0, None)
    assert len(queue) == 0
    await worker.upstream.close()


async def test_an_edit_whose_client_leaves_the_room_leaves_no_trace():
    pool, worker = full_pool(1)
    queue = PendingQueue(pool, make_policy("mask_aware"), 5.0, lambda _: None)
    first = await queue.enter("first", Edit(4, 1, 9), 0.0, None)
    second = asyncio.ensure_future(queue.enter("second", Edit(4, 1, 9), 0.0, None))
    await asyncio.sleep(0)
    second.cancel()
    await asyncio.gather(second, return_exceptions=True)
    assert len(queue) == 0
    # Its place came in the same moment in which its client left.
    third = asyncio.ensure_future(queue.enter("third", Edit(4, 1, 9), 0.0, None))
    await asyncio.sleep(0)
    queue.leave(first)
    third.cancel()
    await asyncio.gather(third, return_exceptions=True)
    assert not worker.sent
    await worker.upstream.close()


async def test_waits_that_end_as_a_place_comes_free_take_no_place():
    """Too late, or cancelled: each in the very moment of a dispatch."""
    pool, worker = full_pool(1)
    queue = PendingQueue(pool, make_policy("mask_aware"), 5.0, lambda _: None)
    first = await queue.enter("first", Edit(4, 1, 9), 0.0, None)
    late, cancelled = (
        asyncio.ensure_future(queue.enter(name, Edit(4, 1, 9), 0.0, None))
        for name in ("late", "cancelled")
    )
    await asyncio.sleep(0)
    queue._expire(next(queue._queue.order()).item)
    cancelled.cancel()
    queue.leave(first)
    ends = await asyncio.gather(late, cancelled, return_exceptions=True)
    assert [type(end) for end in ends] == [DeadlineExceeded, asyncio.CancelledError]
    assert (len(queue), len(worker.sent)) == (0, 0)
    await worker.upstream.close()


async def test_forty_urgent_edits_of_one_key_do_not_hold_up_another_keys_one():
    pool, worker = full_pool(1)
    queue = PendingQueue(pool, make_policy("mask_aware"), 5.0, lambda _: None)
    urgent, plain = Edit(4, 1, 9, priority=100, model="m"), Edit(4, 1, 9, model="m")
    first = await queue.enter("greedy!first", urgent, 0.0, None)
    spare = [await queue.enter(f"{key}!one", plain, 0.0, None) for key in "ab"]
    order: list[str] = []

    async def wait(name: str, edit: Edit, arrival: float) -> None:
        sent_edit = await queue.enter(name, edit, arrival, None)
        order.append(name)
        queue.leave(sent_edit)

    waiting = [asyncio.ensure_future(wait(f"greedy!{n}", urgent, 0.0)) for n in range(40)]
    waiting.append(asyncio.ensure_future(wait("modest!one", plain, 1.0)))
    waiting.append(asyncio.ensure_future(wait("modest!two", plain, 2.0)))
    await asyncio.sleep(0)
    assert len(queue) == 42
    for sent_edit in (first, *spare):
        queue.leave(sent_edit)
    await asyncio.gather(*waiting)
    assert order.index("modest!one") == 0
    assert order.index("modest!two") <= 2
    await worker.upstream.close()


async def test_a_key_with_nothing_at_a_worker_does_not_wait_for_edits_of_a_busy_key():
    pool, worker = full_pool(1)
    queue = PendingQueue(pool, make_policy("mask_aware"), 5.0, lambda _: None)
    edit = Edit(4, 1, 9, model="m")
    busy = await queue.enter("busy!1", edit, 0.0, None)
    busy_again = asyncio.ensure_future(queue.enter("busy!2", edit, 0.0, None))
    await asyncio.sleep(0)
    assert not busy_again.done()
    spare = [await asyncio.wait_for(queue.enter(f"{key}!1", edit, 0.0, None), 30) for key in "ab"]
    # Spare places are few: the next key waits, and so does a second edit of one that has an edit.
    waiting = [asyncio.ensure_future(queue.enter(name, edit, 0.0, None)) for name in ("c!1", "a!2")]
    await asyncio.sleep(0)
    assert not any(place.done() for place in waiting)
    for sent_edit in (busy, *spare):
        queue.leave(sent_edit)
    for sent_edit in await asyncio.gather(busy_again, *waiting):
        queue.leave(sent_edit)
    assert not worker.sent
    await worker.upstream.close()


async def test_an_edit_goes_where_its_picture_is_encoded_if_that_pays() -> None:
    pool = Pool(router_config_of({}), lambda: None)
    now_s = time.monotonic()
    for name, rows in (("busy", 1), ("idle", 0)):
        status = PolledStatus("w", "m", "ready", max_rows=1, max_waiting=99)
        status.values = ValuesHeld(host=name)
        status.running = (RowStatus("other", "dense", 9, 9, 300),) * rows
        pool.join(f"{name}:1").take_status(status, now_s)
    queue = PendingQueue(pool, make_policy("mask_aware"), 5.0, lambda _: None)
    edit = Edit(4, 1, 9, model="m")
    busy, idle = (pool.workers[f"{name}:1"].predict(edit, now_s) for name in ("busy", "idle"))
    longer_s = busy.denoised_s - idle.denoised_s
    assert longer_s > 0
    for share, host in ((0.0, "idle"), (0.5, "idle"), (2.0, "busy")):
        encoded = EncodingPlace("busy", share * longer_s)
        sent_edit = await queue.enter("e", replace(edit, encoded=encoded), now_s, None)
        assert sent_edit.worker.host == host
        queue.leave(sent_edit)
    elsewhere = replace(edit, encoded=EncodingPlace("elsewhere", 100.0))
    assert (await queue.enter("e", elsewhere, now_s, None)).worker.host == "idle"
    for worker in pool.workers.values():
        await worker.upstream.close()
