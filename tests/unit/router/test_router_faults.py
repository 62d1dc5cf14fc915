"""Routers and workers that fail, fall silent or come back, and cancels."""

from __future__ import annotations

import asyncio
import time

import grpc
import grpc.aio
import pytest

from maskserve_benchmarks.emulator.worker import RESULT_ID
from maskserve_benchmarks.simulator.hardware import Hardware
from maskserve_common.servers.failure import Failure
from maskserve_router.key_holder import KeyHolder
from maskserve_router.messages.model_answer import ModelAnswer
from maskserve_router.messages.model_request import ModelRequest
from maskserve_router.operations.control import cluster_status
from tests.support.router import SIDE, calling, cluster, control_request, edit, until
from tests.support.router_requests import edit_request, mask_of


async def test_an_edit_that_a_worker_fails_is_done_by_another_with_the_same_seed():
    async with cluster() as (router, workers), calling(router) as call:
        for worker in workers:
            worker.fails = 1
        with pytest.raises(grpc.aio.AioRpcError, match="ENGINE_FAILED"):
            await call(edit())  # both failed it: one retry, and no more
        assert [len(worker.requests) for worker in workers] == [1, 1]
        first_request, second_request = sorted(
            (worker.requests[0] for worker in workers), key=lambda e: e["request_id"]
        )
        assert second_request == {**first_request, "request_id": f"{first_request['request_id']}~2"}
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
        assert sum(len(worker.requests) for worker in workers) == tries


async def test_workers_that_did_not_take_an_edit_cost_no_retry():
    """Two that had just ended, before their polls failed, failed it though a third was idle."""
    faults = {"retry_floor": 0, "retry_share": 0.0}
    running = cluster(models=("flux",) * 3, faults=faults)
    async with running as (router, workers), calling(router) as call:
        for worker in workers[:2]:
            worker.fails, worker.status = 9, grpc.StatusCode.UNAVAILABLE
            worker.text = "failed to connect to all addresses; last error: refused"
        for _ in range(4):
            await call(edit())
        assert len(workers[2].requests) == 4


def of_result() -> bytes:
    """An edit of a kept result."""
    return edit_request(b"", mask_of(100, SIDE), template_id=RESULT_ID)


async def test_edits_of_a_kept_result_go_to_the_worker_that_made_it():
    async with cluster(models=("flux",) * 4) as (router, workers), calling(router) as call:
        first = router.pool.workers[workers[0].address]
        first.draining = True  # it would be taken otherwise, where all are idle
        await call(edit(keep_result=True))
        first.draining = False
        (home,) = [worker for worker in workers if worker.requests]
        for worker in workers:
            worker.missing = None if worker is home else RESULT_ID
        for _ in range(5):
            await call(of_result())
        assert [len(worker.requests) for worker in workers if worker is not home] == [0, 0, 0]


async def test_edits_of_a_kept_result_go_to_any_worker_of_the_host_that_has_it():
    async with cluster(models=("flux",) * 3) as (router, workers), calling(router) as call:
        for worker in workers[:2]:
            worker.host = "of both"
        places = [router.pool.workers[worker.address] for worker in workers]
        await until("they have said so", lambda: [w.host for w in places] == ["of both"] * 2 + [""])
        places[2].draining = True
        await call(edit(keep_result=True))
        places[2].draining = False
        for worker in workers:
            worker.requests.clear()
            worker.hold()
        calls = [asyncio.ensure_future(call(of_result())) for _ in range(4)]
        await until("all have come", lambda: sum(len(worker.requests) for worker in workers) == 4)
        assert [len(worker.requests) for worker in workers] == [2, 2, 0]
        for worker in workers:
            worker.let_go()
        await asyncio.gather(*calls)


async def test_a_result_that_is_registered_or_evicted_has_no_home():
    async with cluster(models=("flux",) * 2) as (router, workers), calling(router) as call:
        first = router.pool.workers[workers[0].address]
        first.draining = True  # it would be taken otherwise, where all are idle
        await call(edit(keep_result=True))
        first.draining = False
        (other_worker,) = [worker for worker in workers if not worker.requests]
        await call(control_request("evict", template_id=RESULT_ID))
        for worker in workers:
            worker.hold()
        calls = [asyncio.ensure_future(call(of_result())) for _ in range(4)]
        await until("both workers have some", lambda: len(other_worker.requests) > 0)
        for worker in workers:
            worker.let_go()
        await asyncio.gather(*calls)


async def test_a_router_that_did_not_see_it_made_finds_a_result_once():
    async with cluster(models=("flux",) * 4) as (router, workers), calling(router) as call:
        for worker in workers[:3]:
            worker.missing = RESULT_ID
        for _ in range(4):
            await call(of_result())
        assert len(workers[3].requests) == 4
        assert max(len(worker.requests) for worker in workers[:3]) <= 1


async def test_a_result_whose_worker_takes_no_edits_is_asked_of_the_others():
    async with cluster() as (router, workers), calling(router) as call:
        await call(edit(keep_result=True))
        (home,) = [worker for worker in workers if worker.requests]
        (other_worker,) = [worker for worker in workers if worker is not home]
        router.pool.workers[home.address].draining = True
        await call(of_result())
        assert len(other_worker.requests) == 1
        router.pool.workers[home.address].draining = False
        home.missing = RESULT_ID  # it has expired there
        await call(of_result())
        assert len(other_worker.requests) == 2


async def test_retries_stop_at_their_budget():
    faults = {"retry_floor": 0, "retry_share": 0.0}
    async with cluster(faults=faults) as (router, workers), calling(router) as call:
        for worker in workers:
            worker.fails = 1
        with pytest.raises(grpc.aio.AioRpcError):
            await call(edit())
        assert sum(len(worker.requests) for worker in workers) == 1


async def test_a_worker_that_keeps_failing_is_ejected_and_comes_back():
    faults = {"failures_to_eject": 2, "eject_s": 60.0}
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
        assert len(workers[0].requests) == 2
        bad.breaker._until = time.monotonic()  # a minute later
        for _ in range(4):
            await call(edit())
        assert not bad.breaker.ejected


async def test_what_a_silent_worker_holds_goes_to_another():
    running = cluster(hardware=Hardware(dense_seconds=0.05))
    async with running as (router, workers), calling(router) as call:
        pending = [asyncio.ensure_future(call(edit(active=4096))) for _ in range(4)]
        workers_by_address = router.pool.workers
        await until("they run", lambda: sum(len(w.sent) for w in workers_by_address.values()) == 4)
        silent = next(w for w in workers if workers_by_address[w.address].sent)
        silent.freeze()
        await asyncio.wait_for(asyncio.gather(*pending), 60)
        assert not workers_by_address[silent.address].up
        status = cluster_status("router", workers_by_address.values(), router.metrics.predictions)
        assert status["alive"]
        assert status["workers"][silent.address]["state"] == "down"
        assert "running" not in status["workers"][silent.address]  # what it last said is over


async def test_an_encoding_ends_with_a_worker_that_falls_silent() -> None:
    """A run waited a minute for it."""
    async with cluster() as (router, workers):
        owner = KeyHolder("anybody", 64, admin=True)

        def encode() -> asyncio.Task[bytes]:
            message = ModelRequest.parse(edit())
            return asyncio.create_task(router._dispatcher.encode(message, owner))

        answer = await asyncio.wait_for(encode(), 30)
        assert ModelAnswer.parse(answer).outputs()
        assert sum(len(worker.requests) for worker in workers) == 1
        for worker in workers:
            worker.freeze()
        pending = encode()
        with pytest.raises(Failure, match="the worker no longer answers"):
            await asyncio.wait_for(pending, 30)
        assert not any(worker.sent for worker in router.pool.workers.values())


async def test_an_edit_waits_for_a_worker_that_is_late_to_say_it_is_ready():
    """The other one missed its polls in the moment in which the first one died."""
    async with cluster() as (router, workers), calling(router) as call:
        first_worker, second_worker = (router.pool.workers[worker.address] for worker in workers)
        workers[0].fails = 1
        workers[1].freeze()
        second_worker.up = False
        pending = asyncio.ensure_future(call(edit()))
        await until(
            "the first one has failed it", lambda: workers[0].requests and not first_worker.sent
        )
        assert not pending.done()
        workers[1].thaw()
        await asyncio.wait_for(pending, 10)
        assert [len(worker.requests) for worker in workers] == [1, 1]


async def test_what_no_worker_takes_in_time_fails_as_its_worker_failed_it():
    faults = {"retry_wait_s": 0.1}
    async with cluster(faults=faults) as (router, workers), calling(router) as call:
        workers[0].fails = 1
        await workers[1].stop()
        await until("the other is down", lambda: len(router.pool.up()) == 1)
        with pytest.raises(grpc.aio.AioRpcError, match="denoiser has died"):
            await call(edit())
        assert router.admission.edits == len(router.pending) == 0


async def test_an_edit_goes_back_to_its_worker_once_that_has_come_back():
    """Which was but slow to say how it is: what it was sent before may still be there."""
    slow = Hardware(dense_seconds=0.05)
    async with cluster(slow, models=("flux",)) as (router, workers), calling(router) as call:
        workers[0].keeps_ids = True
        pending = asyncio.ensure_future(call(edit(active=4096)))
        (worker,) = router.pool.workers.values()
        await until("it runs", lambda: workers[0].requests)
        workers[0].freeze()
        await until("it is given up", lambda: not worker.up)
        workers[0].thaw()
        await asyncio.wait_for(pending, 30)
        names = [request["request_id"] for request in workers[0].requests]
        assert names == [names[0], f"{names[0]}~2"]


@pytest.mark.parametrize("where", ["router", "worker"])
async def test_an_edit_is_cancelled_wherever_it_is(where: str):
    slow = Hardware(dense_seconds=0.2)
    running = cluster(slow, ("flux",), max_rows=1, admission={"waiting_per_worker": 1})
    async with running as (router, workers), calling(router) as call:
        pending = {
            name: asyncio.ensure_future(call(edit(active=4096, request_id=name)))
            for name in ("a", "b", "c", "d")
        }
        (worker,) = router.pool.workers.values()
        await until("some wait", lambda: len(router.pending) >= 1 and worker.sent)
        sent_names = set(worker.sent)
        name = sorted(set(pending) - sent_names if where == "router" else sent_names)[0]
        cancel = control_request("cancel", request_id=name)
        assert b'{"cancelled":true}' in await call(cancel)
        with pytest.raises(grpc.aio.AioRpcError, match=r"\[CANCELLED\]") as cancelled:
            await pending[name]
        assert cancelled.value.code() is grpc.StatusCode.CANCELLED
        await until("its row is free", lambda: name not in workers[0].edit_ids())
        assert b'{"cancelled":false}' in await call(cancel)
        for call_task in pending.values():
            call_task.cancel()
        await asyncio.gather(*pending.values(), return_exceptions=True)
