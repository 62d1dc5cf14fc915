"""Plans with due times over emulated servers: what is asked for, and what the servers do."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence

import grpc
import grpc.aio
import pytest

from maskserve_benchmarks.emulator.server import SERVICE
from maskserve_benchmarks.emulator.worker import EmulatedWorker
from maskserve_benchmarks.simulator.hardware import Hardware
from maskserve_router.config import WorkflowFiles
from maskserve_router.fair_share import FairShare
from maskserve_router.key_holder import KeyHolder
from maskserve_router.nodes.node_pool import NodePool
from maskserve_studies.workflow_plans.chains import (
    KINDS,
    NODES,
    RULES,
    SECONDS,
    WORKERS,
    draw_chains,
    simulate_chains,
)
from maskserve_studies.workflows.due_plans import Cluster, Figures
from maskserve_studies.workflows.node_server import EmulatedNodes
from maskserve_workflows.plan import NodeCall
from maskserve_workflows.run import Task
from maskserve_workflows.values import Judgement
from tests.support.router_requests import edit_request, mask_of


def test_requests_of_two_loads_differ_in_their_gaps_alone() -> None:
    few, many = (draw_chains(40, load, 1, Hardware()) for load in (0.8, 1.6))
    assert {request.kind for request in few} == set(KINDS)
    for rare_request, frequent_request in zip(few, many, strict=True):
        assert rare_request.edits == frequent_request.edits
        assert rare_request.at == pytest.approx(2 * frequent_request.at)


def test_the_simulator_has_the_nodes_of_the_shipped_plans() -> None:
    for drawn_request in draw_chains(40, 0.8, 1, Hardware()):
        plan_request = drawn_request.plan_request()
        edits = [n for n in plan_request.nodes if n.only == frozenset(WORKERS)]
        assert len(edits) == drawn_request.tries * len(drawn_request.edits)
        assert all(n.only == frozenset(NODES) for n in plan_request.nodes if n not in edits)
        assert plan_request.known is not None
        assert (plan_request.known < len(plan_request.nodes)) == (drawn_request.tries > 1)
        assert plan_request.due - plan_request.arrival > 2 * max(drawn_request.edits)


def test_little_is_done_in_time_and_all_is_late_where_it_comes_at_once() -> None:
    idle, full = (draw_chains(30, load, 1, Hardware()) for load in (0.05, 100.0))
    assert all(
        simulate_chains(idle, rules) > 0.9 for rules in RULES.values()
    )  # tries again are late
    assert all(simulate_chains(full, rules) < 0.6 for rules in RULES.values())


async def test_a_cluster_knows_nothing_of_the_tries_at_the_one_before() -> None:
    """In the second order tries passed that had failed in the first."""
    plan_request = next(item for item in draw_chains(200, 1.0, 1, Hardware()) if item.tries == 2)
    for order in RULES:
        cluster = Cluster(order, Hardware())
        cluster.requests[plan_request.name] = plan_request
        verdicts = [
            cluster.outputs_of("shows", {"name": plan_request.name})["verdict"] for _ in range(16)
        ]
        assert [item.passed for item in verdicts] == [False] * 8 + [True] * 8


async def test_a_script_runs_every_plan() -> None:
    """Plans encode for edits ahead, which no node server and no script does."""
    edits = Counter[str]()

    class Scripts(Cluster):
        async def edit(
            self, mask: bytes, prompt: str, settings: Figures, control: Sequence[bytes] = ()
        ) -> bytes:
            edits[prompt] += 1
            return b""

    cluster = Scripts("fcfs", Hardware())
    cluster.nodes = [EmulatedNodes(dict.fromkeys(SECONDS, 0.0), cluster.outputs_of)]
    requests = {request.kind: request for request in draw_chains(40, 0.8, 1, Hardware())}.values()
    assert len(requests) == len(KINDS)
    for request in requests:
        assert await cluster.run(request, 60.0, scripted=True)
        assert edits[request.name] == request.tries * len(request.edits)


async def test_an_edit_that_is_withdrawn_leaves_its_row() -> None:
    """It kept the row for good, and all behind it waited."""
    worker = EmulatedWorker("w", Hardware(dense_seconds=0.05), max_rows=1)
    await worker.start()
    try:
        async with grpc.aio.insecure_channel(worker.address) as channel:
            call = channel.unary_unary(f"/{SERVICE}/ModelInfer")
            first = asyncio.ensure_future(
                call(edit_request(b"", mask_of(4096, 64), request_id="first"))
            )
            while b'"first"' not in worker.control_answer({"op": "status"}):
                await asyncio.sleep(0.01)
            first.cancel()
            quick = edit_request(b"", mask_of(1, 64), request_id="next", num_inference_steps=1)
            await asyncio.wait_for(call(quick), 60.0)
            assert b'"first"' not in worker.control_answer({"op": "status"})
    finally:
        await worker.stop()


async def test_an_emulated_node_server_answers_a_router() -> None:
    server = EmulatedNodes(
        {"best": 0.0},
        lambda node, inputs: {"picture": inputs["pictures"][1], "verdict": Judgement(1.0, True)},
    )
    await server.start()
    pool = NodePool(WorkflowFiles(nodes=(server.address,)), FairShare(1))
    try:
        await pool.check({"best"})
        verdicts = (Judgement(0.0, False), Judgement(1.0, True))
        task = Task(
            "best-1", NodeCall("best-1", "best"), {"pictures": (b"a", b"b"), "verdicts": verdicts}
        )
        answer = await pool.call(task, KeyHolder("anybody", 64, admin=True))
        assert answer.outputs == {"picture": b"b", "verdict": Judgement(1.0, True)}
    finally:
        await pool.close()
        await server.stop()
