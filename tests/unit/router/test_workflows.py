"""Runs at a router, with nodes and edits that the tests answer."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
import logging
import math
import socket
import threading
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import ExitStack
from typing import Any

import grpc
import pytest
from tritonclient.grpc import service_pb2 as pb

from maskserve_common.config import LimitsConfig
from maskserve_common.contracts import bytes_tensor
from maskserve_common.errors import Cancelled, DeadlineExceeded, EngineFailed, InvalidRequest
from maskserve_common.servers import call_tries
from maskserve_common.servers.failure import Failure
from maskserve_common.servers.upstream import Upstream, failures
from maskserve_router.config import AdmissionBounds, RouterConfig, WorkflowFiles
from maskserve_router.fair_share import FairShare
from maskserve_router.key_holder import KeyHolder
from maskserve_router.messages.edit_call import MODELS, check_request
from maskserve_router.messages.failures import RetryLater
from maskserve_router.messages.model_request import ModelRequest
from maskserve_router.metrics import Metrics
from maskserve_router.nodes import node_pool
from maskserve_router.nodes.node_messages import NodeAnswer
from maskserve_router.nodes.node_pool import NodePool
from maskserve_router.nodes.node_server import NodeServer
from maskserve_router.scheduling.admission import Admission
from maskserve_router.scheduling.served_workflows import ServedWorkflows
from maskserve_router.workflows import run_driver
from maskserve_router.workflows import workflows as served_workflows
from maskserve_router.workflows.run_driver import RunServices
from maskserve_router.workflows.run_times import RunTimes
from maskserve_router.workflows.workflows import Workflows
from maskserve_workflows.definition import Workflow, each
from maskserve_workflows.nodes import best, edit, enlarge, generate, shows
from maskserve_workflows.passes import compiled
from maskserve_workflows.plan import NodeCall, WorkflowPlan
from maskserve_workflows.run import Task, seed_of
from maskserve_workflows.values import Judgement
from maskserve_workflows.wire import NOT_HOSTED, OTHER_VERSION
from tests.support.router import until
from tests.support.router_requests import context_of

CLIENT = KeyHolder("anybody", 64, admin=True)

with Workflow("pair", "The better of two, enlarged.") as flow:
    image, mask, prompt = flow.picture("image"), flow.mask("mask"), flow.text("prompt")
    with each(2) as one:
        edits = edit(image, mask, prompt, strength=0.5)
        pictures, verdicts = one.all(edits), one.all(shows(edits, mask, prompt))
    chosen = best(pictures, verdicts)
    flow.gives(image=enlarge(chosen.picture), verdict=chosen.verdict)
PLAN = compiled(flow.plan)


class Nodes:
    """A node pool; fails its first calls of some node types."""

    def __init__(self, **fails: int) -> None:
        self.fails, self.keys = fails, []

    def seconds(self, node: str) -> float | None:
        return None

    async def check(self, nodes: Any) -> None:
        assert nodes <= {"shows", "best", "enlarge"}

    async def call(
        self, task: Any, client: KeyHolder, due: float = math.inf, run: str = ""
    ) -> NodeAnswer:
        self.keys.append(task.key)
        await asyncio.sleep(0)
        if self.fails.get(task.call.node, 0):
            self.fails[task.call.node] -= 1
            raise EngineFailed("its server has died")
        outputs = {
            "shows": lambda inputs: {"verdict": Judgement(len(inputs["picture"]) / 100, True)},
            "best": lambda inputs: {
                "picture": inputs["pictures"][0], "verdict": inputs["verdicts"][0],
            },
            "enlarge": lambda inputs: {"picture": b"large " + inputs["picture"]},
        }[task.call.node](task.inputs)  # fmt: skip
        return NodeAnswer(outputs, "here:1", 0.25, 1)


class Edits:
    """Answers edits, at once or never."""

    def __init__(self, *, never: bool = False, alone_s: float | None = None) -> None:
        self.never, self.calls, self.left, self.seconds = never, [], 0, alone_s
        self.measured: list[bytes] = []
        self.pictures: list[bytes] = []

    async def alone_s(self, message: Any, client: KeyHolder, kind: str) -> float | None:
        self.measured.append(message.read("IMAGE" if kind == "edit" else "MASK"))
        return self.seconds

    async def infer(self, message: Any, context: Any, room: Any) -> bytes:
        return (await self._answer(message)).SerializeToString()

    async def stream(self, message: Any, context: Any, room: Any) -> AsyncGenerator[bytes, None]:
        assert message.head.model_name == "edit_stream"
        events = [
            answer_of(b"", event="progress", step=1, steps=2),
            answer_of(b"half", event="preview", step=1, steps=2),
            await self._answer(message),
            pb.ModelInferResponse(model_name="edit_stream"),  # it ends the request
        ]
        for event in events:
            yield pb.ModelStreamInferResponse(infer_response=event).SerializeToString()

    async def _answer(self, message: Any) -> Any:
        check_request(message)
        inputs = dict(zip((x.name for x in message.head.inputs), message.contents, strict=True))
        settings = json.loads(inputs["SETTINGS"][4:])
        self.calls.append(settings)
        if self.never:
            try:
                await asyncio.Event().wait()
            finally:
                self.left += 1
        picture = b"made of %d" % settings["seed"]
        self.pictures.append(picture)
        return answer_of(picture, worker="w", seed=settings["seed"], cache="hit", steps=3)


def answer_of(picture: bytes, **meta: Any) -> Any:
    answer = pb.ModelInferResponse(model_name="edit")
    bytes_tensor.add_output(answer, "IMAGE", [picture])
    bytes_tensor.add_output(answer, "META", [json.dumps(meta).encode()])
    return answer


def made_answer(kind: str, seconds: float = 0.1, output: bytes = b"made") -> bytes:
    """A node server's, of one output."""
    answer = pb.ModelInferResponse()
    result = {"outputs": [{"name": kind, "kind": kind}], "seconds": seconds}
    bytes_tensor.add_output(answer, "RESULT", [json.dumps(result).encode()])
    bytes_tensor.add_output(answer, "MADE", [output])
    return answer.SerializeToString()


def request(prompt: bytes = b"a star", **settings: Any) -> Any:
    message = ModelRequest(pb.ModelInferRequest(model_name="pair"))
    values = {"IMAGE": b"i", "MASK": b"m", "PROMPT": prompt}
    for name, value in {**values, "SETTINGS": json.dumps(settings).encode()}.items():
        message.add(name, [value])
    return message


def workflows(
    nodes: Any,
    edits: Any,
    plan: WorkflowPlan = PLAN,
    most_bytes: int = 2**20,
    workers: Any = list,
) -> Workflows:
    config = RouterConfig()
    times = RunTimes(config, getattr(nodes, "seconds", lambda node: None), lambda: [0.0])
    bounds = AdmissionBounds(max_edits=4, max_bytes=most_bytes)
    admission = Admission(bounds, Metrics())
    services = RunServices(edits, nodes, admission, FairShare(2), times)
    return Workflows([plan], services, workers, LimitsConfig())


async def run(nodes: Nodes, edits: Edits, message: Any) -> tuple[dict[str, bytes], dict[str, Any]]:
    served = workflows(nodes, edits)
    check_request(message, served.models)
    raw = await served.infer(message, context_of(CLIENT))
    outputs = bytes_tensor.outputs(pb.ModelInferResponse.FromString(raw))
    return {name: bytes(value) for name, value in outputs.items() if name != "META"}, json.loads(
        bytes(outputs["META"])
    )


async def test_edits_have_the_settings_of_the_request_and_a_seed_and_id_of_their_own() -> None:
    edits = Edits()
    outputs, meta = await run(Nodes(), edits, request(seed=7, request_id="mine", strength=0.9))
    seeds = {seed_of(7, f"each-1[{i}]/edit-1") for i in range(2)}
    assert {settings["seed"] for settings in edits.calls} == seeds
    assert {settings["request_id"] for settings in edits.calls} == {
        "mine/each-1.0/edit-1", "mine/each-1.1/edit-1",
    }  # fmt: skip
    assert {settings["strength"] for settings in edits.calls} == {0.5}
    assert outputs["IMAGE"] == b"large made of %d" % seed_of(7, "each-1[0]/edit-1")
    assert json.loads(outputs["VERDICT"])["passed"] is True
    assert (meta["request_id"], meta["seed"], meta["digest"]) == ("mine", 7, PLAN.digest)
    assert len(meta["nodes"]) == 7
    nodes_by_key = {node_record["key"]: node_record for node_record in meta["nodes"]}
    assert nodes_by_key["each-1[0]/edit-1"]["worker"] == "w"
    assert nodes_by_key["enlarge-1"]["server"] == "here:1"


async def test_a_node_that_was_lost_alone_runs_again() -> None:
    edits, nodes = Edits(), Nodes(best=2)
    _, meta = await run(nodes, edits, request())
    assert nodes.keys.count("best-1") == 3
    assert (len(edits.calls), nodes.keys.count("enlarge-1")) == (2, 1)
    assert {
        node_record["tries"] for node_record in meta["nodes"] if node_record["key"] == "best-1"
    } == {3}
    with pytest.raises(EngineFailed, match="its server has died"):
        await run(Nodes(best=3), Edits(), request())


async def test_a_run_of_which_a_node_runs_nowhere_is_refused_before_its_edits() -> None:
    """`outline` without a model that enlarges painted, and then threw it away."""
    hosted, down = [{"name": "find"}, {"name": "pictures"}], set[str]()

    class Pool(NodePool):
        async def _ask(self, server: NodeServer, settings: Any = None) -> str:
            if server.address in down:
                raise Failure(grpc.StatusCode.UNAVAILABLE, "gone")
            server.take_record({"models": list(hosted)})
            return ""

    pool, edits = Pool(WorkflowFiles(nodes=("a:1", "b:1")), FairShare(1)), Edits()
    with pytest.raises(EngineFailed, match="enlarge: no node server runs enlarge"):
        await run(pool, edits, request())  # type: ignore[arg-type]
    assert not edits.calls
    await pool.check({"shows", "best"})
    down.add("b:1")
    await pool.poll(pool.servers["b:1"])
    await pool.check({"enlarge"})  # it may be there
    down.clear()
    hosted.append({"name": "enlarge"})
    await pool.poll(pool.servers["b:1"])
    await pool.check({"enlarge"})
    await pool.close()


async def test_what_a_node_refuses_names_the_node() -> None:
    class Refusing(Nodes):
        async def call(self, task: Any, client: KeyHolder, due: float, run: str) -> NodeAnswer:
            text = "[INVALID_REQUEST] name: 'a boat' is not found in the picture"
            raise Failure(grpc.StatusCode.INVALID_ARGUMENT, text)

    with pytest.raises(InvalidRequest) as refused:
        await run(Refusing(), Edits(), request())
    assert refused.value.message == (
        "each-1[0]/shows-1: name: 'a boat' is not found in the picture"
    )


async def test_edits_are_due_as_long_before_the_run_as_what_lies_behind_them_takes() -> None:
    edits = Edits()
    await run(Nodes(), edits, request(deadline_ms=3_600_000))
    behind_ms = 100 + 1 + 300  # shows, best, enlarge, as they are declared
    for settings in edits.calls:
        assert 3_000_000 < settings["deadline_ms"] <= 3_600_000 - behind_ms
        assert settings["on_late"] == "finish"  # the run ends them, if it is to end
    edits = Edits()
    await run(Nodes(), edits, request())
    assert all("deadline_ms" not in settings for settings in edits.calls)


async def test_a_run_is_judged_by_what_its_masks_cost() -> None:
    """The time of an edit whose mask the client sends is known as the run comes; times of recent
    runs do not count.
    """
    large = Edits(alone_s=30.0)
    with pytest.raises(
        DeadlineExceeded, match=r"are too short for pair, which takes about 30\.\d s"
    ):
        await run(Nodes(), large, request(deadline_ms=10_000))
    assert (large.measured, large.calls) == ([b"m"], [])
    await run(Nodes(), Edits(alone_s=3.0), request(deadline_ms=10_000))


with Workflow("kinds", "An edit of each kind.") as flow:
    image, mask, prompt = flow.picture("image"), flow.mask("mask"), flow.text("prompt")
    picture = generate(prompt, size="96x64")
    flow.gives(
        one=edit(image, None, prompt, strength=0.5),
        two=edit(picture, None, prompt),
        three=edit(picture, mask, prompt),
    )
KINDS = compiled(flow.plan)


async def test_edits_without_a_mask_have_a_price_and_the_settings_of_their_kind() -> None:
    """Each has those of the run's settings that have an effect; known at the start are the prices
    of the generation, and of edits whose masks or pictures are inputs.
    """
    edits = Edits(alone_s=1.0)
    message = request(size="64x64", mask_dilate=4, cache="own", strength=0.75)
    message.head.model_name = "kinds"
    served = workflows(Nodes(), edits, KINDS)
    check_request(message, served.models)
    await served.infer(message, context_of(CLIENT))
    assert edits.measured == [b"", b"i", b"m", edits.pictures[0]]
    by_name = {settings["request_id"].rpartition("/")[2]: settings for settings in edits.calls}
    keys = ("size", "mask_dilate", "cache", "strength")
    settings_by_name = {
        name: {key: s[key] for key in keys if key in s} for name, s in by_name.items()
    }
    assert settings_by_name == {
        "generate-1": {"size": "96x64"},
        "edit-1": {"size": "64x64", "strength": 0.5},
        "edit-2": {"size": "64x64", "strength": 0.75},
        "edit-3": {"mask_dilate": 4, "cache": "own", "strength": 0.75},
    }


async def test_a_cancel_or_deadline_ends_every_node() -> None:
    edits = Edits(never=True)
    served = workflows(Nodes(), edits)
    work = asyncio.create_task(served.infer(request(request_id="mine"), context_of(CLIENT)))
    await until("both edits are asked", lambda: len(edits.calls) == 2)
    with pytest.raises(InvalidRequest, match="names an edit that is in flight"):
        await served.infer(request(request_id="mine"), context_of(CLIENT))
    assert served.cancel("mine")
    with pytest.raises(Cancelled, match="the workflow was cancelled"):
        await work
    assert edits.left == 2
    assert not served.cancel("mine")
    with pytest.raises(DeadlineExceeded, match="passed before pair ended"):
        await served.infer(request(deadline_ms=20), context_of(CLIENT))
    assert edits.left == len(edits.calls)  # none where the machine was too busy to ask
    count_before = len(edits.calls)
    cancelled_call = asyncio.create_task(served.infer(request(), context_of(CLIENT)))
    await until("both edits are asked", lambda: len(edits.calls) == count_before + 2)
    cancelled_call.cancel()
    await asyncio.gather(cancelled_call, return_exceptions=True)
    assert edits.left == count_before + 2


async def test_of_two_runs_with_one_id_that_come_together_one_is_refused() -> None:
    """The second came while the first stored its pictures, and both ran under one id."""
    served = workflows(Nodes(), Edits(), most_bytes=2**23)

    def large() -> Any:
        message = request(request_id="mine")
        message.contents[0] = bytes_tensor.pack([bytes(2**17)])  # a thread reads it
        return message

    ends = await asyncio.gather(
        *(served.infer(large(), context_of(CLIENT)) for _ in range(2)), return_exceptions=True
    )
    refused = [end for end in ends if isinstance(end, Exception)]
    assert [str(end) for end in refused] == [
        "[INVALID_REQUEST] SETTINGS.request_id: names an edit that is in flight; "
        "accepted: a fresh id"
    ]


async def test_a_run_ends_by_the_first_of_its_clients_limits() -> None:
    """KServe's parameter `timeout`, which edits obeyed, was accepted and did nothing."""
    message = request(deadline_ms=3_600_000)
    message.head.parameters["timeout"].int64_param = 20_000  # microseconds
    with pytest.raises(DeadlineExceeded, match=r" 0\.0 s passed before pair ended"):
        await workflows(Nodes(), Edits(never=True)).infer(message, context_of(CLIENT, 9.0))


async def test_a_stream_tells_of_each_node() -> None:
    served = workflows(Nodes(), Edits())
    events = served.stream(request(progress=True), context_of(CLIENT))
    metas = [json.loads(bytes(bytes_tensor.outputs(event)["META"])) async for event in events]
    assert [meta["event"] for meta in metas if meta["event"] != "progress"] == [
        "node", *["preview"] * 2, *["node"] * 6, "final",
    ]  # fmt: skip


async def test_edits_own_progress_and_previews_are_in_the_stream() -> None:
    events = workflows(Nodes(), Edits()).stream(request(preview_every=1), context_of(CLIENT))
    event_outputs = [bytes_tensor.outputs(event) async for event in events]
    metas = [json.loads(bytes(item["META"])) for item in event_outputs]
    assert [item["event"] for item in metas] == [*["progress", "preview"] * 2, "final"]
    assert [bytes(item["IMAGE"]) for item in event_outputs if "IMAGE" in item][:2] == [b"half"] * 2
    assert {item["key"] for item in metas[:-1]} == {"each-1[0]/edit-1", "each-1[1]/edit-1"}
    assert metas[-1]["outputs"] == {"image": "picture", "verdict": "verdict"}
    assert (metas[0]["step"], metas[0]["steps"]) == (1, 2)
    single_answer = await workflows(Nodes(), Edits()).infer(
        request(progress=True, preview_every=1), context_of(CLIENT)
    )
    assert b"final" in single_answer


async def test_what_cannot_be_read_is_named() -> None:
    with pytest.raises(InvalidRequest, match="PROMPT: is not UTF-8"):
        await run(Nodes(), Edits(), request(prompt=b"\xff"))
    with pytest.raises(InvalidRequest, match=r"SETTINGS\.steps"):
        await run(Nodes(), Edits(), request(steps=3))
    with pytest.raises(InvalidRequest, match="PROMPT: is 32001 characters long"):
        await run(Nodes(), Edits(), request(prompt=b"x" * 32_001))


# What one key's runs cannot do to others.


def holder(name: str) -> KeyHolder:
    return KeyHolder(name, 64, admin=False, scope=name)


async def test_of_calls_at_node_servers_each_key_has_its_turn() -> None:
    """A server answers in the order in which it was asked: one key's hundred stood before all."""
    goes_on, sent_texts = asyncio.Event(), []

    class Slow(NodePool):
        async def _sent(self, server: NodeServer, request: bytes, kind: Any) -> bytes:
            message = pb.ModelInferRequest.FromString(request)
            sent_texts.append(bytes(message.raw_input_contents[1][4:]))
            await goes_on.wait()
            return made_answer("mask")

    pool = Slow(WorkflowFiles(nodes=("127.0.0.1:1",)), FairShare(1))

    def call(key: str) -> asyncio.Task[NodeAnswer]:
        task = Task("invert-1", NodeCall("invert-1", "invert"), {"mask": key.encode()})
        return asyncio.create_task(pool.call(task, holder(key.split()[0])))

    greedy = [call(f"greedy {i}") for i in range(100)]
    await until("the server is busy", lambda: len(sent_texts) == 2)
    modest = call("modest")
    goes_on.set()
    answer = await modest
    assert answer.outputs == {"mask": b"made"}
    assert answer.server == "nodes-0"  # its address is the operators'
    operator = dataclasses.replace(holder("operator"), admin=True)
    assert list(await pool.records(operator)) == ["127.0.0.1:1"]
    assert list(await pool.records(holder("modest"))) == ["nodes-0"]
    assert sent_texts.index(b"modest") == 2
    await asyncio.gather(*greedy)
    await pool.close()


async def test_servers_behind_a_name_are_found_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    call_addresses, host_addresses, goes_on = [], ["10.0.0.1"], asyncio.Event()

    def resolve(host: str, port: int, **more: Any) -> Any:
        if not host_addresses:
            raise OSError("no such name")
        return [(None, None, None, "", (address, port)) for address in host_addresses]

    monkeypatch.setattr("socket.getaddrinfo", resolve)
    monkeypatch.setattr(node_pool, "_RESOLVE_S", 0.001)

    class Served(NodePool):
        async def _sent(self, server: NodeServer, request: bytes, kind: Any) -> bytes:
            call_addresses.append(server.address)
            with server.busy(1.0):
                await goes_on.wait()
            return made_answer("mask", seconds=30.0)

    pool = Served(WorkflowFiles(nodes=("dns:nodes:9",), kept_bytes=0), FairShare(1))

    def call(name: str) -> asyncio.Task[NodeAnswer]:
        task = Task("find-1", NodeCall("find-1", "find"), {"picture": b"p", "name": name})
        return asyncio.create_task(pool.call(task, CLIENT))

    calls = [call("a")]
    await until("the one is asked", lambda: call_addresses == ["10.0.0.1:9"])
    host_addresses[:] = ["10.0.0.1", "10.0.0.2"]
    calls += [call("b"), call("c"), call("d")]
    await until("both have two", lambda: len(call_addresses) == 4)
    assert sorted(call_addresses) == ["10.0.0.1:9"] * 2 + ["10.0.0.2:9"] * 2
    host_addresses.clear()  # what is known stays
    calls.append(call("e"))
    host_addresses[:] = ["10.0.0.2"]
    await until("the one has gone", lambda: call("f") and list(pool.servers) == ["10.0.0.2:9"])
    goes_on.set()
    assert {answer.server for answer in await asyncio.gather(*calls)} == {
        "10.0.0.1:9",
        "10.0.0.2:9",
    }
    await pool.close()


async def test_calls_go_where_their_model_is_placed() -> None:
    """Two servers, as they tell of themselves; one is full of `find` and is relieved of it."""
    states = {
        "a:1": {"find": "ready", "enlarge": "ready"},
        "b:1": {"find": "absent", "enlarge": "absent"},
    }
    ended, call_addresses, dead = dict.fromkeys(states, 0), [], set[str]()
    placed: dict[str, list[str]] = {}

    class Pool(NodePool):
        async def _ask(self, server: NodeServer, settings: Any = None) -> str:
            address = server.address
            if address in dead:
                raise Failure(grpc.StatusCode.UNAVAILABLE, "gone")
            for name in (settings or {}).get("placed", ()):
                placed.setdefault(address, []).append(name)
                states[address][name] = "ready"
            models = [
                {"name": name, "state": state, "bytes": 9, "ended": ended[address], "seconds": 1.0}
                for name, state in states[address].items()
            ]
            server.take_record({"device_bytes": 18, "models": models})
            return ""

        async def place(self) -> None:
            for server in self.servers.values():
                await self.poll(server)
            await super().place()

        async def _sent(self, server: NodeServer, request: bytes, kind: Any) -> bytes:
            call_addresses.append(server.address)
            if server.address in dead:
                raise Failure(grpc.StatusCode.UNAVAILABLE, "gone")
            server.load_s += 1.0  # as if it had not answered yet
            return made_answer("picture")

    pool = Pool(WorkflowFiles(nodes=tuple(states), kept_bytes=0), FairShare(1))
    calls = itertools.count()

    async def call() -> str:
        task = Task("enlarge-1", NodeCall("enlarge-1", "enlarge"), {"picture": b"%d" % next(calls)})
        answer = await pool.call(task, CLIENT)
        return answer.server

    await pool.place()
    assert [await call() for _ in range(4)] == ["a:1"] * 4, "it lies there alone"
    ended["a:1"] = 10_000
    await pool.place()
    assert set(placed) == {"b:1"}
    assert min(pool.busy().values()) > 2
    for server in pool.servers.values():
        server.load_s = 0.0
    assert [await call() for _ in range(4)] == ["a:1", "b:1"] * 2
    dead.add("b:1")
    call_addresses.clear()
    assert [await call() for _ in range(2)] == ["a:1"] * 2
    assert "b:1" in call_addresses
    await pool.place()
    call_addresses.clear()
    assert [await call() for _ in range(2)] == ["a:1"] * 2
    assert "b:1" not in call_addresses, "whoever does not answer is not tried first"
    await pool.close()


class AnsweringPool(NodePool):
    """A pool of servers without records that answer calls of `enlarge` or fail them.

    Args:
        servers: their addresses.
        words: by which one fails the next call; None: it answers.
        status: of its failures.
    """

    def __init__(
        self, servers: Sequence[str], words: Callable[[str], str | None], status: str = "INTERNAL"
    ) -> None:
        super().__init__(WorkflowFiles(nodes=tuple(servers), kept_bytes=0), FairShare(1))
        self.words, self.status, self.calls = words, grpc.StatusCode[status], list[str]()

    async def _ask(self, server: NodeServer, settings: Any = None) -> str:
        raise Failure(grpc.StatusCode.UNAVAILABLE, "it has no record")

    async def _sent(self, server: NodeServer, request: bytes, kind: Any) -> bytes:
        self.calls.append(server.address)
        if (words := self.words(server.address)) is not None:
            raise Failure(self.status, words)
        return made_answer("picture")

    async def enlarged(self) -> NodeAnswer:
        task = Task("enlarge-1", NodeCall("enlarge-1", "enlarge"), {"picture": b"p"})
        return await self.call(task, CLIENT)


async def test_a_call_that_a_server_cannot_do_is_the_next_ones() -> None:
    """A load failed there, or there is no room. What a call lacks is told at once."""
    errors_by_address = {"a:1": "[ENGINE_FAILED] nodes: model enlarge could not be loaded"}
    pool = AnsweringPool(["a:1", "b:1"], errors_by_address.get)
    assert (await pool.enlarged()).outputs == {"picture": b"made"}
    assert pool.calls == ["a:1", "b:1"]
    errors_by_address["b:1"] = (
        "[ENGINE_FAILED] nodes: model enlarge has 9 bytes, and there is room for 8"
    )
    with pytest.raises(Failure, match="there is room for 8"):
        await pool.enlarged()
    pool.calls.clear()
    errors_by_address["a:1"] = "[TEMPLATE_NOT_FOUND] value 0123 is not known here"
    with pytest.raises(Failure, match="not known"):
        await pool.enlarged()
    assert pool.calls == ["a:1"]
    await pool.close()


async def test_a_server_with_another_version_of_a_node_is_left_out(
    caplog: pytest.LogCaptureFixture,
) -> None:
    sentence = f"TASK.node: enlarge {OTHER_VERSION}: enlarge.py has () -> mask: mask"
    errors_by_address = {"a:1": f"[INVALID_REQUEST] {sentence}"}
    pool = AnsweringPool(["a:1", "b:1"], errors_by_address.get)
    for _ in range(3):
        assert (await pool.enlarged()).server == "b:1"
    assert [record.getMessage() for record in caplog.records].count(
        f"node server a:1 is left out: [INVALID_REQUEST] {sentence}"
    ) == 1
    errors_by_address["b:1"] = f"[INVALID_REQUEST] TASK.node: enlarge {NOT_HOSTED}"
    with pytest.raises(EngineFailed) as refused:
        await pool.enlarged()
    assert refused.value.message == sentence
    await pool.close()


async def test_of_servers_with_two_revisions_of_a_model_those_of_the_first_get_calls(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Answers depended on which server had less to do."""
    pool = AnsweringPool(["a:1", "b:1", "c:1"], lambda _: None)
    revisions = {"a:1": "old", "b:1": "new", "c:1": "old"}

    def heard(*addresses: str) -> None:
        for address in addresses:
            models = [{"name": "enlarge", "revision": revisions[address]}]
            pool.servers[address].take_record({"models": models})

    await pool.all_polled()
    heard("a:1", "b:1", "c:1")
    pool.servers["a:1"].load_s = pool.servers["c:1"].load_s = 9.0
    assert {(await pool.enlarged()).server for _ in range(4)} <= {"a:1", "c:1"}
    left_out = "node server b:1 is left out: its model enlarge is another than that of a:1"
    assert [record.getMessage() for record in caplog.records].count(left_out) == 1
    pool.servers["a:1"].up = pool.servers["c:1"].up = False  # they are updated one by one
    assert (await pool.enlarged()).server == "b:1"
    revisions["a:1"] = "new"
    heard("a:1")
    assert {server.address for server in pool.able("enlarge")} == {"a:1", "b:1"}
    pool.servers["a:1"].up = pool.servers["b:1"].up = False  # a call may wait for any of them
    assert (await pool.enlarged()).server == "b:1"
    await pool.close()


SERVERS = ("a:1", "b:1", "c:1")
_REFUSED = "failed to connect to all addresses; last error: UNKNOWN: connect: refused (111)"
_STUB_DIED = "Failed to process the request(s) for model 'nodes_0_0', message: Stub process died"


@pytest.mark.parametrize(
    ("status", "answers", "servers", "ends"),
    [
        ("INTERNAL", {"a:1": _STUB_DIED}, ["a:1", "b:1"], ""),
        # The call may be what kills them: it is not sent round.
        ("INTERNAL", dict.fromkeys(("a:1", "b:1"), _STUB_DIED), ["a:1", "b:1"], "server failed"),
        ("UNKNOWN", {"a:1": "reset"}, ["a:1", "b:1"], ""),
        ("INVALID_ARGUMENT", {"a:1": "unexpected shape"}, ["a:1"], "server failed"),
        ("INTERNAL", {"a:1": "[INVALID_REQUEST] picture: is none"}, ["a:1"], "is none"),
        # Nor where it may have ended the whole server: it went round all, again and again.
        ("UNAVAILABLE", dict.fromkeys(SERVERS, "Socket closed"), ["a:1", "b:1"], "server failed"),
        ("UNAVAILABLE", {"a:1": "Socket closed"}, ["a:1", "b:1"], ""),
        ("UNAVAILABLE", dict.fromkeys(("a:1", "b:1"), _REFUSED), ["a:1", "b:1", "c:1"], ""),
        ("UNAVAILABLE", {"a:1": "Server is stopping, and"}, ["a:1", "b:1"], ""),
        ("UNAVAILABLE", {"a:1": "[OVERLOADED] it is stopping"}, ["a:1", "b:1"], ""),
    ],
)
async def test_a_failure_without_a_word_is_tried_at_one_other(
    status: str,
    answers: dict[str, str],
    servers: list[str],
    ends: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    pool = AnsweringPool(SERVERS, answers.get, status)
    if ends:
        with pytest.raises((Failure, EngineFailed), match=ends):
            await pool.enlarged()
    else:
        assert (await pool.enlarged()).tries == 2
    assert pool.calls == servers
    if status == "INTERNAL" and "[" not in answers["a:1"]:
        assert _STUB_DIED in caplog.text
    await pool.close()


@pytest.mark.parametrize(
    ("answers", "patience_s", "ends"),
    [
        (["Socket closed", _REFUSED, _REFUSED, None], 120.0, ""),
        (["Socket closed", _REFUSED, "Socket closed"], 120.0, "server failed"),
        ([_REFUSED], 0.0, "no node server can be reached"),
    ],
)
async def test_a_server_that_was_lost_has_the_call_once_more(
    answers: list[str | None], patience_s: float, ends: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The only one, once it is back. Those that do not have the call do not count."""
    monkeypatch.setattr(call_tries, "_WAIT_S", 1e-4)
    monkeypatch.setattr(node_pool, "_PATIENCE_S", patience_s)
    words = iter(answers)
    pool = AnsweringPool(["a:1"], lambda _: next(words), "UNAVAILABLE")
    if ends:
        with pytest.raises(EngineFailed, match=ends):
            await pool.enlarged()
    else:
        assert (await pool.enlarged()).tries == 2
    assert len(pool.calls) == len(answers)
    await pool.close()


@pytest.mark.parametrize("unable", ["could not be loaded", "has 9 bytes, and there is room for 8"])
async def test_a_lost_server_that_alone_can_run_a_call_is_waited_for(
    unable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another's error is neither the call's end nor its second loss."""
    monkeypatch.setattr(call_tries, "_WAIT_S", 1e-4)
    losses = iter(["Socket closed", _REFUSED, None])

    def words(address: str) -> str | None:
        pool.status = grpc.StatusCode.UNAVAILABLE if address == "a:1" else grpc.StatusCode.INTERNAL
        return next(losses) if address == "a:1" else f"[ENGINE_FAILED] model enlarge {unable}"

    pool = AnsweringPool(["a:1", "b:1"], words)
    assert (await pool.enlarged()).tries == 2
    assert pool.calls == ["a:1", "b:1", "a:1", "a:1"]
    await pool.close()


async def test_a_server_that_failed_a_call_is_not_asked_while_another_comes_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(call_tries, "_WAIT_S", 1e-4)
    refusals = iter([_REFUSED, _REFUSED, None])

    def words(address: str) -> str | None:
        pool.status = grpc.StatusCode.INTERNAL if address == "a:1" else grpc.StatusCode.UNAVAILABLE
        return _STUB_DIED if address == "a:1" else next(refusals)

    pool = AnsweringPool(["a:1", "b:1"], words)
    assert (await pool.enlarged()).tries == 2
    assert pool.calls == ["a:1", "b:1", "b:1", "b:1"]
    await pool.close()


async def test_a_call_at_a_server_that_misses_polls_goes_to_another() -> None:
    """A call at a frozen server waited until gRPC's pings had failed, for 50 s."""
    with socket.socket() as mute:  # takes connections and never says a word
        mute.bind(("127.0.0.1", 0))
        mute.listen()
        frozen, silent, sent = f"127.0.0.1:{mute.getsockname()[1]}", False, list[str]()

        class Pool(NodePool):
            async def _ask(self, server: NodeServer, settings: Any = None) -> str:
                if silent and server.address == frozen:
                    raise Failure(grpc.StatusCode.DEADLINE_EXCEEDED, "")
                server.take_record({"models": [{"name": "enlarge"}]})
                return ""

            async def _sent(self, server: NodeServer, request: bytes, kind: Any) -> bytes:
                sent.append(server.address)
                if server.address == frozen:
                    return await super()._sent(server, request, kind)
                return made_answer("picture")

        files = WorkflowFiles(nodes=(frozen, "other:1"), kept_bytes=0)
        pool = Pool(files, FairShare(1))
        await pool.all_polled()
        pool.servers["other:1"].load_s = 9.0
        task = Task("enlarge-1", NodeCall("enlarge-1", "enlarge"), {"picture": b"p"})
        call = asyncio.create_task(pool.call(task, CLIENT))
        server = pool.servers[frozen]
        await until("it is under way", lambda: server.calls)
        silent = True
        for _ in range(pool._lost_misses):
            assert not call.done()
            await pool.poll(server)
        answer = await call
        assert (answer.outputs, answer.tries, sent) == (
            {"picture": b"made"}, 2, [frozen, "other:1"],
        )  # fmt: skip
        await pool.close()


async def test_words_of_a_port_that_nobody_listens_at_are_known() -> None:
    with socket.socket() as bound_socket:
        bound_socket.bind(("127.0.0.1", 0))
        server = Upstream(f"127.0.0.1:{bound_socket.getsockname()[1]}")
        with pytest.raises(Failure) as refused, failures():
            await server.infer(b"", 60.0)
    assert refused.value.status is grpc.StatusCode.UNAVAILABLE
    assert refused.value.untaken
    assert not refused.value.coded
    await server.close()


async def test_a_look_that_fails_is_not_the_last(caplog: pytest.LogCaptureFixture) -> None:
    looked = 0

    class Pool(NodePool):
        async def place(self) -> None:
            nonlocal looked
            looked += 1
            raise ValueError("a record that cannot be read")

    pool = Pool(WorkflowFiles(nodes=("127.0.0.1:1",)), FairShare(1), place_s=0.001)
    pool.start()
    await until("it looks again", lambda: looked >= 2)
    await pool.close()
    assert "placing the models of node servers" in caplog.text


async def test_answers_of_nodes_are_kept_for_their_key() -> None:
    """One picture and name, five edit prompts: one `find`, also of runs at once."""
    node_names, goes_on = [], asyncio.Event()

    class Served(NodePool):
        async def _sent(self, server: NodeServer, request: bytes, kind: Any) -> bytes:
            node_names.append(kind.name)
            await goes_on.wait()
            if node_names.count("find") == 1:
                raise Failure(grpc.StatusCode.INVALID_ARGUMENT, "[INVALID_REQUEST] no")
            return made_answer("mask", output=bytes(1000))

    pool = Served(WorkflowFiles(nodes=("127.0.0.1:1",), kept_bytes=20_000), FairShare(1))

    def call(name: str, key: str = "a", **settings: float) -> asyncio.Task[NodeAnswer]:
        node = NodeCall("find-1", "find", settings=settings)
        task = Task("find-1", node, {"picture": b"p", "name": name})
        return asyncio.create_task(pool.call(task, holder(key)))

    first, other_calls = call("star"), [call("star") for _ in range(4)]
    await until("it is asked", lambda: len(node_names) == 1)
    goes_on.set()
    with pytest.raises(Failure, match="no"):  # it alone: who waited for it asks again
        await first
    assert [(await other_call).reused for other_call in other_calls] == [False, True, True, True]
    assert node_names == ["find", "find"]
    for distinct_call in (call("boat"), call("star", key="b"), call("star", threshold=0.4)):
        assert not (await distinct_call).reused
    assert (await call("star")).reused
    assert node_names.count("find") == 5
    for i in range(20):
        await call(f"cat {i}")  # there is no room for all
    assert pool._answers.nbytes <= 20_000
    assert (await call("star", key="b")).reused
    await pool.close()


async def test_runs_and_what_they_make_count_with_their_key() -> None:
    """Pictures between nodes were bytes that nobody counted, and runs had no bound."""
    edits = Edits(never=True)
    served = workflows(Nodes(), edits, most_bytes=2**20)
    runs = [
        asyncio.create_task(served.infer(request(), context_of(holder("greedy")))) for _ in range(3)
    ]
    await until("they run or are refused", lambda: any(run_task.done() for run_task in runs))
    refused = [run_task for run_task in runs if run_task.done()]
    with pytest.raises(RetryLater, match="key greedy has its share: 2 operations are under way"):
        await refused[0]
    assert len(refused) == 1
    edits.never = False
    assert await served.infer(request(), context_of(holder("modest")))
    for task in runs:
        task.cancel()
    await asyncio.gather(*runs, return_exceptions=True)

    class Large(Nodes):
        async def call(self, task: Any, client: KeyHolder, due: float, run: str) -> NodeAnswer:
            answer = await super().call(task, client)
            return answer._replace(outputs={**answer.outputs, "more": bytes(300_000)})

    with pytest.raises(RetryLater, match="bytes of requests and answers are under way"):
        await workflows(Large(), Edits()).infer(request(), context_of(holder("greedy")))
    assert served._services.admission.bytes == 0


async def test_a_router_without_workflows_says_what_one_with_none_says() -> None:
    pool = NodePool(WorkflowFiles(), FairShare(1))
    admission = Admission(AdmissionBounds(), Metrics())
    times = RunTimes(RouterConfig(), pool.seconds, lambda: [0.0])
    services = RunServices(Edits(), pool, admission, FairShare(1), times)  # type: ignore[arg-type]
    answers = []
    for served in (ServedWorkflows(), Workflows([], services, list, LimitsConfig())):
        served.start()
        listed, servers = await served.listed(CLIENT), await served.node_servers(CLIENT)
        needed = served.node_servers_needed()
        answers.append((listed, servers, needed, dict(served.busy()), served.cancel("mine")))
        assert (served.models, list(served.names)) == (MODELS, [])
        await served.close()
    assert answers[0] == answers[1]
    with pytest.raises(InvalidRequest, match="there is no model 'pair'"):
        await ServedWorkflows().infer(request(), context_of(CLIENT))


async def test_a_refused_run_has_the_log_line_of_a_refused_edit(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A run that was refused at once had no log line."""
    caplog.set_level(logging.INFO, "maskserve.router")
    served, client = workflows(Nodes(), Edits(alone_s=30.0)), holder("greedy")

    async def refused_line(**settings: Any) -> Any:
        caplog.clear()
        with pytest.raises((InvalidRequest, DeadlineExceeded, RetryLater)) as refused:
            await served.infer(request(request_id="mine", **settings), context_of(client))
        [line] = [item for item in caplog.records if vars(item).get("event") == "workflow"]
        fields = vars(line)["fields"]
        assert (fields["client"], fields["workflow"], fields["nodes"]) == ("greedy", "pair", 0)
        assert fields["code"] == refused.value.code
        assert fields["error"] == str(refused.value)
        return line

    assert "too short for pair" in str(vars(await refused_line(deadline_ms=10_000)))
    with ExitStack() as under_way:
        for _ in range(2):
            under_way.enter_context(served._services.admission.operation(client, 0))
        assert "greedy has its share" in str(vars(await refused_line()))
    served._services.edits.never = True  # type: ignore[attr-defined]
    first = asyncio.create_task(served.infer(request(request_id="mine"), context_of(client)))
    await until("it runs", lambda: served._calls)
    assert "is in flight" in str(vars(await refused_line()))
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    assert client.served["pair"].failed == 4


async def test_large_pictures_of_runs_are_copied_off_the_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads: dict[str, threading.Thread] = {}

    def watched(module: Any, name: str) -> Callable[..., Any]:
        real = getattr(module, name)

        def record_thread(*args: Any) -> Any:
            threads[name] = threading.current_thread()
            return real(*args)

        return record_thread

    copying = dict.fromkeys(("edit_request", "edit_answer", "run_event"), run_driver)
    copying["_inputs"] = served_workflows
    for name, module in copying.items():
        monkeypatch.setattr(module, name, watched(module, name))
    message = request()
    message.contents[0] = bytes_tensor.pack([bytes(2**17)])

    class Same(Edits):
        async def _answer(self, message: Any) -> Any:
            await super()._answer(message)
            return answer_of(bytes(2**17))

    await workflows(Nodes(), Same(), most_bytes=2**23).infer(message, context_of(CLIENT))
    assert sorted(threads) == sorted(copying)
    assert threading.current_thread() not in threads.values()


async def test_a_lora_of_later_nodes_is_loaded_once_at_a_time() -> None:
    """Each run had all hosts load it: as many operations at workers as runs."""
    requests, goes_on = [], asyncio.Event()

    class Worker:
        class upstream:  # noqa: N801
            @staticmethod
            async def control(raw: bytes, seconds: float) -> bytes:
                requests.append(raw)
                await goes_on.wait()
                return b"{}"

    with Workflow("twice") as later:
        image, mask = later.picture("image"), later.mask("mask")
        first = edit(image, mask, "a star")
        later.gives(image=edit(first, mask, "a cat", loras=[{"name": "x"}]))
    plan, edits = compiled(later.plan), Edits(never=True)
    served = workflows(Nodes(), edits, plan, workers=lambda: [Worker, Worker])
    message = request()
    message.head.model_name = "twice"
    runs = [asyncio.create_task(served.infer(message, context_of(CLIENT))) for _ in range(4)]
    await until("hosts are asked", lambda: len(requests) >= 2)
    assert len(requests) == 2
    for task in runs:
        task.cancel()
    await asyncio.gather(*runs, return_exceptions=True)
