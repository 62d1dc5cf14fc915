"""A stream whose worker fails after it has sent events: the edit begins anew elsewhere."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import grpc
import grpc.aio
import pytest
from tritonclient.grpc import service_pb2 as pb

from maskserve_client.events import Progress
from maskserve_client.wire import stream_event
from maskserve_router.router import Router
from tests.support.router import Faulty, cluster, edit

STREAM = "/inference.GRPCInferenceService/ModelStreamInfer"


async def streamed(router: Router) -> list[pb.ModelStreamInferResponse]:
    """The answers of one edit's stream."""
    message = pb.ModelInferRequest.FromString(edit(seed=7))
    message.model_name = "edit_stream"

    async def requests() -> Any:
        yield message.SerializeToString()

    async with grpc.aio.insecure_channel(f"127.0.0.1:{router.grpc.port}") as channel:
        call = channel.stream_stream(STREAM)(requests())
        return [pb.ModelStreamInferResponse.FromString(raw) async for raw in call]


def metas(answers: list[pb.ModelStreamInferResponse]) -> list[dict[str, Any]]:
    return [json.loads(answer.infer_response.raw_output_contents[1][4:]) for answer in answers]


def _first(workers: list[Faulty]) -> Faulty:
    for worker in workers:
        worker.progress = 2
    return workers[0]


@pytest.mark.parametrize("how", ["an error", "no answer", "the worker dies"])
async def test_a_stream_that_fails_after_an_event_begins_anew_elsewhere(how: str):
    async with cluster(routing={"policy": "round_robin"}) as (router, workers):
        first = _first(workers)
        first.fails = how == "an error"
        first.hangs_up = how == "no answer"
        if how == "the worker dies":
            first.hold()
            asyncio.get_running_loop().call_later(0.3, first.freeze)
        # One of two goes to the worker that fails.
        answers = max([await asyncio.wait_for(streamed(router), 20) for _ in range(2)], key=len)
        events = metas(answers)
        first.let_go()
        first.thaw()
        assert [(e["event"], e.get("restarts", 0)) for e in events] == [
            ("progress", 0),
            ("progress", 0),
            ("progress", 1),
            ("progress", 1),
            ("final", 1),
        ]
        assert [e["step"] for e in events[:4]] == [1, 2, 1, 2]
        assert events[4]["seed"] == 7
        assert stream_event(answers[2]) == Progress(1, 2, restarts=1)


async def test_an_answer_is_given_once_whatever_comes_behind_it():
    async with cluster() as (router, workers):
        for worker in workers:
            worker.progress, worker.fails_answered = 1, True
        for _ in range(4):
            events = metas(await streamed(router))
            assert [e["event"] for e in events] == ["progress", "final"]
        assert sum(len(worker.requests) for worker in workers) == 4


async def test_a_stream_begins_anew_once():
    async with cluster() as (router, workers):
        for worker in workers:
            worker.progress, worker.fails = 1, 9
        *events, error = await streamed(router)
        assert [e.get("restarts", 0) for e in metas(events)] == [0, 1]
        assert "ENGINE_FAILED" in error.error_message
