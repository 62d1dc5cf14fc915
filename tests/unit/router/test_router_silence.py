"""gRPC calls that say nothing: what they may hold, and that others get in all the same."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager, suppress
from typing import Any

import grpc
import grpc.aio
import pytest
from tritonclient.grpc import service_pb2 as pb

from maskserve_router.config import Grpc
from maskserve_router.listeners.open_calls import OpenCall, OpenCalls
from maskserve_router.messages.failures import RetryLater
from maskserve_router.metrics import Metrics
from maskserve_router.router import Router
from tests.support.draws import fresh_random
from tests.support.router import calling, cluster, control_request, edit, until
from tests.support.router_requests import INFER

STREAM = "/inference.GRPCInferenceService/ModelStreamInfer"
SECRET = "open sesame"
KEYS = [{"name": "a", "sha256": hashlib.sha256(SECRET.encode()).hexdigest(), "max_edits": 500}]
WITH_KEY = (("x-api-key", SECRET),)


@asynccontextmanager
async def silent(
    router: Router, count: int, method: str = STREAM, metadata: Any = ()
) -> AsyncIterator[list[Any]]:
    """So many calls that have begun and send no message."""
    async with grpc.aio.insecure_channel(f"127.0.0.1:{router.grpc.port}") as channel:
        start = channel.stream_stream(method)
        calls = [start(metadata=metadata) for _ in range(count)]
        await asyncio.gather(*(call.wait_for_connection() for call in calls))
        try:
            yield calls
        finally:
            for call in calls:
                call.cancel()


@pytest.mark.parametrize("method", [STREAM, INFER])
async def test_silent_calls_without_a_key_end_at_once_and_take_no_place(method: str):
    async with cluster(keys=KEYS) as (router, _), silent(router, 700, method) as calls:
        codes = await asyncio.wait_for(asyncio.gather(*(call.code() for call in calls)), 20)
        assert set(codes) == {grpc.StatusCode.UNAUTHENTICATED}
        async with calling(router) as call:
            assert await call(edit(), metadata=WITH_KEY)


@pytest.mark.parametrize("method", [STREAM, INFER])
async def test_silent_calls_with_a_key_leave_places_to_others(method: str):
    bounds = {"max_calls": 60}
    keys = [*KEYS, {"name": "b", "sha256": hashlib.sha256(b"other").hexdigest()}]
    async with (
        cluster(keys=keys, grpc=bounds) as (router, _),
        silent(router, 35, method, WITH_KEY) as calls,
        calling(router) as call,
    ):
        await until("five are refused", lambda: sum(call_task.done() for call_task in calls) == 5)
        for _ in range(4):
            assert await call(edit(), metadata=(("x-api-key", "other"),))


async def test_a_call_that_stays_silent_is_ended_and_one_that_is_served_is_not():
    async with cluster(grpc={"silence_s": 1.0}) as (router, workers):
        for worker in workers:
            worker.hold()
        target = f"127.0.0.1:{router.grpc.port}"
        async with silent(router, 1) as calls, grpc.aio.insecure_channel(target) as channel:
            served = channel.stream_stream(STREAM)()
            message = pb.ModelInferRequest.FromString(control_request("status"))
            await served.write(message.SerializeToString())
            answer = pb.ModelStreamInferResponse.FromString(await served.read())
            assert answer.infer_response.outputs
            under_way = asyncio.ensure_future(channel.unary_unary(INFER)(edit()))
            assert await asyncio.wait_for(calls[0].code(), 20) is grpc.StatusCode.DEADLINE_EXCEEDED
            assert "sent nothing for 1 s" in await calls[0].details()
            assert await asyncio.wait_for(served.code(), 20) is grpc.StatusCode.DEADLINE_EXCEEDED
            for worker in workers:
                worker.let_go()
            assert await asyncio.wait_for(under_way, 10)


async def test_the_longest_silent_call_of_who_has_most_gives_way():
    calls = OpenCalls(Grpc(max_calls=6), Metrics())

    async def never() -> None:
        await asyncio.Event().wait()

    full = "6 calls are open"
    with calls.enter("a", never) as oldest, calls.enter("a", never) as busy, busy.working():
        reading = asyncio.ensure_future(anext(oldest))
        await asyncio.sleep(0)
        with calls.enter("a", never), calls.enter("b", never), calls.enter("c", never):
            error_text = "3 calls of this client are open"
            with pytest.raises(RetryLater, match=error_text), calls.enter("a", never):
                pass
            with calls.enter("d", never):
                with pytest.raises(RetryLater, match=full), calls.enter("a", never):
                    pass
                with calls.enter("e", never):
                    with pytest.raises(RetryLater, match="needed its place"):
                        await reading
                    with pytest.raises(RetryLater, match=full), calls.enter("b", never):
                        pass


async def test_a_client_beyond_its_share_takes_no_silent_calls_place_when_all_are_taken():
    rng = fresh_random("places of calls")

    async def never() -> None:
        await asyncio.Event().wait()

    for _ in range(20):
        bounds = Grpc(max_calls=rng.randint(2, 24))
        calls, is_full = OpenCalls(bounds, Metrics()), False
        with ExitStack() as stack:
            opened: dict[str, list[OpenCall]] = {}
            while not is_full:
                client = str(rng.randint(0, bounds.max_calls))
                with suppress(RetryLater):
                    call = stack.enter_context(calls.enter(client, never))
                    if rng.random() < 0.5:
                        stack.enter_context(call.working())
                    opened.setdefault(client, []).append(call)
                is_full = sum(map(len, opened.values())) == bounds.max_calls
            for client in opened:
                with pytest.raises(RetryLater), calls.enter(client, never):
                    pass
            assert not any(
                call._ended_for for client_calls in opened.values() for call in client_calls
            )
