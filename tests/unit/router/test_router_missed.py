"""Templates that are registered or evicted while a worker is down."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import grpc
import pytest
from tritonclient.grpc import service_pb2 as pb

from maskserve_router.router import Router
from tests.support.router import Faulty, calling, cluster, control_request, picture, until


async def control(router: Router, op: str, **fields: str) -> dict[str, Any]:
    async with calling(router) as call:
        answer = pb.ModelInferResponse.FromString(await call(control_request(op, **fields)))
    result: dict[str, Any] = json.loads(answer.raw_output_contents[0][4:])
    return result


async def _goes_down(router: Router, worker: Faulty) -> None:
    worker.silent = True
    await until("it is down", lambda: not router.pool.workers[worker.address].up)


async def test_a_template_registered_while_a_worker_is_down_reaches_it():
    async with cluster() as (router, (first, second)):
        await _goes_down(router, second)
        answer = await control(router, "register", image=picture("a picture"))
        assert answer["workers"] == [first.address]
        assert answer["pending"] == [second.address]
        (listed,) = (await control(router, "templates"))["templates"]
        assert (listed["workers"], listed["pending"]) == ([first.address], [second.address])
        second.silent = False
        await until("it has the template", lambda: second.templates == first.templates)
        (listed,) = (await control(router, "templates"))["templates"]
        assert (listed["workers"], listed["pending"]) == (
            sorted((first.address, second.address)),
            [],
        )


async def test_what_was_evicted_meanwhile_is_gone_everywhere():
    async with cluster() as (router, (first, second)):
        kept_id = (await control(router, "register", image=picture("there before")))["template_id"]
        await _goes_down(router, second)
        new = (await control(router, "register", image=picture("evicted again")))["template_id"]
        for name in (kept_id, new):
            assert (await control(router, "evict", template_id=name))["pending"] == [second.address]
        await control(router, "register", image=picture("another"))
        second.silent = False
        await until("it has the other alone", lambda: second.templates == first.templates)
        assert len(second.templates) == 1


async def test_an_eviction_that_meets_a_registration_on_its_way_wins():
    async with cluster() as (router, (_, second)):
        await _goes_down(router, second)
        name = (await control(router, "register", image=picture("a picture")))["template_id"]
        second.holds_registrations.clear()
        second.silent = False
        await until("it is on its way", lambda: second.registering == 1)
        assert second.address in (await control(router, "evict", template_id=name))["pending"]
        second.holds_registrations.set()
        await until("all is brought", lambda: not router._control.replication_queue._missed)
        assert not second.templates


async def test_images_are_kept_within_a_bound_and_the_answer_says_which_are_not():
    async with cluster() as (router, (_, second)):
        router._control.replication_queue._max_bytes = 25
        await _goes_down(router, second)
        assert (await control(router, "register", image=picture("a" * 7)))["pending"] == [
            second.address
        ]
        assert (await control(router, "register", image=picture("b" * 7)))["pending"] == []
        second.silent = False
        await until("it has what was kept", lambda: len(second.templates) == 1)
        assert (await control(router, "register", image=picture("b" * 7)))["pending"] == []
        assert len(second.templates) == 2


@pytest.mark.parametrize(
    ("status", "again"),
    [(grpc.StatusCode.INTERNAL, True), (grpc.StatusCode.INVALID_ARGUMENT, False)],
)
async def test_a_worker_that_fails_is_tried_again_and_one_that_refuses_is_not(
    status: grpc.StatusCode, again: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("maskserve_router.operations.replication_queue._RETRY_S", 0.05)
    async with cluster() as (router, (first, second)):
        second.refuses = status
        answer = await control(router, "register", image=picture("a picture"))
        assert answer["workers"] == [first.address]
        assert answer["pending"] == ([second.address] if again else [])
        second.refuses = None
        if again:
            await until("it has the template", lambda: second.templates == first.templates)


async def test_images_that_wait_for_a_worker_leave_room_to_other_keys():
    keys = [
        {"name": n, "sha256": hashlib.sha256(n.encode()).hexdigest()} for n in ("greedy", "modest")
    ]
    async with cluster(keys=keys, workers={"missed_bytes": 130}) as (router, (_, second)):
        await _goes_down(router, second)
        pending = {}
        async with calling(router) as call:
            for key, letter in (("greedy", "a"), ("greedy", "b"), ("modest", "c")):
                request = control_request("register", image=picture(22 * letter))
                answer = await call(request, metadata=(("x-api-key", key),))
                (raw,) = pb.ModelInferResponse.FromString(answer).raw_output_contents
                pending[letter] = json.loads(raw[4:])["pending"]
    assert {letter: bool(to) for letter, to in pending.items()} == {
        "a": True,
        "b": False,
        "c": True,
    }
