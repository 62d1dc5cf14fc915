"""Runs whose values lie in files: who shares them is given names, any other the values."""

from __future__ import annotations

import gc
import hashlib
import io
import json
import math
import os
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from msgspec import structs
from PIL import Image
from tritonclient.grpc import service_pb2 as pb

from maskserve_common.config import LimitsConfig, ValuesConfig
from maskserve_common.contracts import bytes_tensor
from maskserve_common.contracts.settings import REFERENCE_SETTINGS, parse_settings
from maskserve_common.errors import TemplateNotFound
from maskserve_common.files.values import ENCODING, MAKE, RUN, TAKE, Values
from maskserve_common.imaging.images import plain_picture
from maskserve_common.routing import EncodingPlace
from maskserve_common.servers.failure import Failure
from maskserve_router.config import AdmissionBounds, RouterConfig, WorkflowFiles
from maskserve_router.fair_share import IN_A_THREAD, FairShare
from maskserve_router.key_holder import KeyHolder
from maskserve_router.messages.edit_call import make_edit_call
from maskserve_router.messages.model_request import ModelRequest
from maskserve_router.metrics import Metrics
from maskserve_router.nodes.node_messages import NodeAnswer
from maskserve_router.nodes.node_pool import NodePool
from maskserve_router.nodes.node_server import NodeServer
from maskserve_router.scheduling.admission import Admission
from maskserve_router.workflows.run_driver import RunServices
from maskserve_router.workflows.run_messages import edit_request, encode_request
from maskserve_router.workflows.run_times import RunTimes
from maskserve_router.workflows.run_values import RunValues
from maskserve_router.workflows.workflows import Workflows
from maskserve_workflows.definition import Workflow
from maskserve_workflows.nodes import edit, invert, outline
from maskserve_workflows.passes import PASSES, compiled
from maskserve_workflows.plan import NodeCall, WorkflowPlan
from maskserve_workflows.run import Task
from maskserve_workflows.values import Areas, Judgement, NamedValue, map_parts
from tests.support.router_requests import context_of

CLIENT = KeyHolder("somebody", 64, admin=False, scope="k1")
PICTURE, MASK = b"a picture of some size", b"and its mask"

with Workflow("inverted") as flow:
    image, mask = flow.picture("image"), flow.mask("mask")
    flow.gives(image=edit(image, invert(mask), "a star"))
PLAN = compiled(flow.plan)


@pytest.fixture
def values(tmp_path: Path) -> Values:
    return Values(ValuesConfig(str(tmp_path / "values"), least_bytes=1))


def left(values: Values) -> int:
    return values.stored().count


class Served(NodePool):
    """Servers that answer in this process: `here:1` shares the folder, `far:1` has none."""

    def __init__(self, *addresses: str, values: Values, kept_bytes: int = 2**20) -> None:
        files = WorkflowFiles(nodes=addresses, kept_bytes=kept_bytes)
        super().__init__(files, FairShare(1), values=values)
        self.far_values, self.calls = values, list[list[bytes]]()

    async def _ask(self, server: NodeServer, settings: Any = None) -> str:
        host = self._values.host if server.address == "here:1" else ""
        server.take_record({"models": [], "values": {"host": host}})
        return ""

    async def _sent(self, server: NodeServer, request: bytes, kind: Any) -> bytes:
        message = pb.ModelInferRequest.FromString(request)
        raw_task, raw_values = message.raw_input_contents
        task = json.loads(bytes(bytes_tensor.only(raw_task)))
        elements = bytes_tensor.elements(raw_values, 16)
        self.calls.append(elements)
        assert bool(task["run"]) == (server.address == "here:1")
        [value] = [bytes(self.far_values.read(element, task["scope"])) for element in elements]
        output = value[::-1]
        put = self.far_values.put([output], task["scope"], task["run"]) or output
        answer = pb.ModelInferResponse()
        result = {"outputs": [{"name": "mask", "kind": "mask"}], "seconds": 0.1}
        bytes_tensor.add_output(answer, "RESULT", [json.dumps(result).encode()])
        bytes_tensor.add_output(answer, "MADE", [put])
        return bytes(answer.SerializeToString())


def call(mask: Any) -> Task:
    return Task("invert-1", NodeCall("invert-1", "invert"), {"mask": mask})


async def inverted(pool: NodePool, files: RunValues) -> NodeAnswer:
    inputs = files.store_inputs(PLAN, {"image": PICTURE, "mask": MASK})
    return await pool.call(call(inputs["mask"]), CLIENT, run=files.run)


async def test_a_server_of_another_host_is_given_values_and_gives_them(values: Values) -> None:
    files, far = RunValues(values, "k1"), Served("far:1", values=values)
    assert (await inverted(far, files)).outputs == {"mask": MASK[::-1]}
    assert far.calls == [[MASK]]
    near_pool = Served("here:1", values=values)
    mask_value = (await inverted(near_pool, files)).outputs["mask"]
    assert isinstance(mask_value, NamedValue)
    assert bytes(files.read({"": mask_value})[""]) == MASK[::-1]
    [[sent_element]] = near_pool.calls
    assert sent_element.startswith(b"value:")
    files.end()
    for pool in (far, near_pool):
        await pool.close()
    assert left(values) == 0


async def test_of_servers_that_have_nothing_to_do_one_of_this_host_is_asked(
    values: Values,
) -> None:
    files, pool = RunValues(values, "k1"), Served("far:1", "here:1", values=values, kept_bytes=0)
    await pool.all_polled()
    servers = [(await inverted(pool, files)).server for _ in range(3)]
    assert servers == ["nodes-1"] * 3
    files.end()
    await pool.close()


async def test_bytes_to_another_host_cost_what_earlier_ones_took(values: Values) -> None:
    """An idle server of another host got the call, whatever its inputs weighed."""
    files, pool = RunValues(values, "k1"), Served("far:1", "here:1", values=values, kept_bytes=0)
    for _ in range(2):
        await inverted(pool, files)
    pool.servers["here:1"].load_s = 0.1
    assert (await inverted(pool, files)).server == "nodes-0"
    pool._learn_transfer(100, 100.0)  # too few to learn from
    assert (await inverted(pool, files)).server == "nodes-0"
    pool._learn_transfer(2**20, 2**20 * 0.1 / len(MASK) / 2)
    assert (await inverted(pool, files)).server == "nodes-0"
    pool._learn_transfer(2**20, 2**20 * 20 * 0.1 / len(MASK))
    assert (await inverted(pool, files)).server == "nodes-1"
    files.end()
    await pool.close()


async def test_kept_answers_serve_other_runs_and_callers_until_they_are_lost(
    values: Values,
) -> None:
    pool = Served("here:1", values=values)
    for is_kept in (False, True):
        files = RunValues(values, "k1")
        answer = await inverted(pool, files)
        assert answer.reused is is_kept
        files.end()
    assert left(values) == 1  # the kept one
    files = RunValues(values, "k1")
    plain = await pool.call(call(files.store_inputs(PLAN, {"mask": MASK})["mask"]), CLIENT)
    assert plain.outputs == {"mask": MASK[::-1]}  # who has no run is given the value itself
    drawn = np.zeros((3, 5), np.uint8)
    put = b"".join(plain_picture(drawn))[::-1]
    first = await pool.call(
        call(files.store_inputs(PLAN, {"mask": put})["mask"]), CLIENT, run=files.run
    )
    assert not first.reused
    plain = await pool.call(call(files.store_inputs(PLAN, {"mask": put})["mask"]), CLIENT)
    assert plain.reused
    with Image.open(io.BytesIO(plain.outputs["mask"])) as file:  # whose deflated bytes may differ
        assert (file.format, np.asarray(file).tolist()) == ("PNG", drawn.tolist())
    for name in values.ids():
        values.remove(name)
    answer = await inverted(pool, files)
    assert not answer.reused
    assert bytes(files.read(answer.outputs)["mask"]) == MASK[::-1]
    files.end()
    other_values = RunValues(values, "k2")
    inputs = other_values.store_inputs(PLAN, {"mask": MASK})
    answer = await pool.call(
        call(inputs["mask"]), KeyHolder("b", 64, admin=False, scope="k2"), run=other_values.run
    )
    assert not answer.reused
    other_values.end()
    await pool.close()
    assert left(values) == 0


async def test_kept_answers_that_make_room_leave_no_files(values: Values) -> None:
    pool, files = Served("here:1", values=values, kept_bytes=2000), RunValues(values, "k1")
    for i in range(12):
        inputs = files.store_inputs(PLAN, {"mask": b"mask %d" % i})
        await pool.call(call(inputs["mask"]), CLIENT, run=files.run)
    files.end()
    assert 0 < left(values) < 12
    await pool.close()
    assert left(values) == 0


@pytest.mark.parametrize("how", ["ends", "has no room"])
async def test_what_a_router_keeps_no_other_lets_go(values: Values, how: str) -> None:
    """Two routers share the folder and have kept the same answer."""
    first_pool = Served("here:1", values=values, kept_bytes=2000)
    second_pool = Served("here:1", values=values)

    async def is_reused(pool: NodePool, mask: bytes = MASK) -> bool:
        files = RunValues(values, "k1")
        inputs = files.store_inputs(PLAN, {"mask": mask})
        answer = await pool.call(call(inputs["mask"]), CLIENT, run=files.run)
        files.end()
        return answer.reused

    assert [await is_reused(first_pool), await is_reused(second_pool)] == [False, False]
    if how == "ends":
        await first_pool.close()
    else:
        for i in range(12):
            await is_reused(first_pool, b"mask %d" % i)
    assert await is_reused(second_pool)
    for pool in (first_pool, second_pool):
        await pool.close()
    assert left(values) == 0


async def test_what_a_router_that_died_has_kept_goes_though_another_keeps_on(
    values: Values, tmp_path: Path
) -> None:
    died, other_pool = (Served("here:1", values=values) for _ in range(2))
    files = RunValues(values, "k1")
    mask_value = files.store_inputs(PLAN, {"mask": MASK})["mask"]
    await died.call(call(mask_value), CLIENT, run=files.run)
    files.end()
    assert left(values) == 1
    for mark in (tmp_path / "values").glob(".open/*"):
        os.utime(mark, (1, 1))  # long ago
    for mask in (b"some mask", b"another mask"):  # the second one finds it gone
        files = RunValues(values, "k1")
        mask_value = files.store_inputs(PLAN, {"mask": mask})["mask"]
        await other_pool.call(call(mask_value), CLIENT, run=files.run)
        files.end()
    assert left(values) == 2
    await other_pool.close()
    assert left(values) == 0


@pytest.mark.parametrize("by", ["runs", "callers"])
async def test_kept_answers_that_are_only_read_do_not_expire(
    values: Values, tmp_path: Path, by: str
) -> None:
    """Nothing was put for an hour, and another router took the one that reads for dead."""
    pool = Served("here:1", values=values)
    for is_kept in (False, True, True, True):
        files = RunValues(values, "k1")
        mask_value = files.store_inputs(PLAN, {"mask": MASK})["mask"]
        run = "" if is_kept and by == "callers" else files.run
        assert (await pool.call(call(mask_value), CLIENT, run=run)).reused is is_kept
        files.end()
        for mark in (tmp_path / "values").glob(".open/*"):
            mtime = mark.stat().st_mtime - 40 * 60
            os.utime(mark, (mtime, mtime))
        values.begin("k2", "another")
        values.share([], "k2", "another")  # ends what has expired
    await pool.close()
    assert left(values) == 0


def test_references_follow_the_image_and_stand_in_for_it_in_an_encoding(values: Values) -> None:
    files = RunValues(values, "k1")
    settings = structs.replace(parse_settings(b"{}"), request_id="k1!run", seed=7)
    lamp, style = b"a picture of a lamp", b"a picture of a style"
    stored = files.store_inputs(PLAN, {"image": PICTURE})
    inputs = {**stored, "prompt": "a star", "references": (lamp, style)}
    task = Task("edit-1", NodeCall("edit-1", "edit", {"image": "inputs.image"}), inputs)
    message = edit_request(task, settings, False, math.inf, files)
    assert message.count("IMAGE") == 3
    edited = make_edit_call(message, message.size, KeyHolder("k1", 64, admin=False, scope="k1"))
    assert edited.references == 2
    encoding = NodeCall("encode-1", "encode", {"references": ("inputs.lamp", "inputs.style")})
    sized = structs.replace(settings, size="64x64", negative_prompt="blur")
    task = Task("encode-1", encoding, {"references": (lamp, style)})
    message = encode_request(task, sized, files)
    content = message.contents[message._place("IMAGE")]
    assert bytes_tensor.elements(bytes(content), 3) == [lamp, lamp, style]
    assert json.loads(message.read("SETTINGS")).keys() <= {*REFERENCE_SETTINGS, "request_id"}
    files.end()


def test_an_edit_for_another_host_has_values_in_place_of_names(values: Values) -> None:
    files = RunValues(values, "k1")
    inputs = files.store_inputs(PLAN, {"image": PICTURE, "mask": MASK})
    settings = structs.replace(parse_settings(b"{}"), request_id="k1!run", seed=7)
    task = Task("edit-1", NodeCall("edit-1", "edit"), {**inputs, "prompt": "a star"})
    encoded = EncodingPlace(values.host, 0.5)
    task = replace(task, inputs={**task.inputs, "encodings": (encoded, None)})
    message = edit_request(task, settings, False, math.inf, files)
    edited = make_edit_call(message, message.size, KeyHolder("k1", 64, admin=False, scope="k1"))

    def sent(host: str) -> tuple[ModelRequest, bytes, bytes]:
        request = ModelRequest.parse(edited.encoded(host))
        return request, request.read("IMAGE"), request.read("MASK")

    near_request, *names = sent(values.host)
    assert all(name.startswith(b"value:") for name in names)
    assert near_request.head.parameters[RUN].string_param == files.run
    assert near_request.head.parameters[ENCODING].string_param == TAKE
    assert message.encoding == encoded
    for host in ("", "another"):
        far, *pictures = sent(host)
        assert pictures == [PICTURE, MASK]
        assert far.head.parameters.keys().isdisjoint({RUN, ENCODING})
        assert far.read("SETTINGS") == near_request.read("SETTINGS")
    files.end()
    with pytest.raises(TemplateNotFound):
        sent("another")


@pytest.fixture
def threads(values: Values, monkeypatch: pytest.MonkeyPatch) -> set[threading.Thread]:
    """Those that have taken the lock of the router's folder."""
    result, alone = set[threading.Thread](), values._store.alone

    def noted(*args: Any) -> Any:
        result.add(threading.current_thread())
        return alone(*args)

    monkeypatch.setattr(values._store, "alone", noted)
    return result


async def test_a_value_that_is_lost_is_made_again_and_nothing_else(
    values: Values, threads: set[threading.Thread]
) -> None:
    """The rims are made before the edit and read behind it; under the edit they are removed."""
    with Workflow("late") as late:
        image, mask = late.picture("image"), late.mask("mask")
        rims = outline(image)
        turned = invert(mask)
        late.gives(image=edit(rims, turned, "a star"), rims=outline(rims), turned=turned)
    called = list[str]()

    class Nodes:
        seconds = staticmethod(lambda node: None)

        async def check(self, nodes: Any) -> None: ...

        async def call(self, task: Task, client: KeyHolder, due: float, run: str) -> NodeAnswer:
            called.append(task.key)
            [input_value] = task.inputs.values()
            if called.count("outline-2") == 2 and task.key == "outline-2":
                far_values.remove(input_value.element[6:70].decode())  # under its reader
            try:
                raw = bytes(values.read(input_value.element, "k1"))
            except TemplateNotFound as error:
                failure = Failure(grpc.StatusCode.NOT_FOUND, str(error))
                raise failure from None  # and its frame has it, as in `NodePool`
            put = far_values.put([task.key.encode() + raw], "k1", run)
            assert put is not None
            kind = "mask" if task.call.node == "invert" else "picture"
            return NodeAnswer({kind: NamedValue(put)}, "here:1", 0.1, 1)

    class Edits:
        async def alone_s(self, message: ModelRequest, client: KeyHolder, *_: Any) -> None:
            return None

        async def infer(self, message: ModelRequest, *_: Any) -> bytes:
            called.append("edit-1")
            run = message.head.parameters[RUN].string_param
            inputs = [bytes(values.read(message.read(name), "k1")) for name in ("IMAGE", "MASK")]
            put = far_values.put([b"of ".join(inputs)], "k1", run)
            for name in far_values.ids():
                if put is not None and name.encode() not in put:
                    far_values.remove(name)
            answer = pb.ModelInferResponse(model_name="edit")
            bytes_tensor.add_output(answer, "IMAGE", [put or b""])
            bytes_tensor.add_output(answer, "META", [b"{}"])
            return bytes(answer.SerializeToString())

    plan, config, nodes = compiled(late.plan), RouterConfig(), Nodes()
    far_values = Values(ValuesConfig(str(values._store.folder), least_bytes=1))
    services = RunServices(
        Edits(), nodes, Admission(AdmissionBounds(), Metrics()), FairShare(2),  # type: ignore[arg-type]
        RunTimes(config, nodes.seconds, lambda: [0.0]),
    )  # fmt: skip
    served = Workflows([plan], services, list, LimitsConfig(), values)
    message = ModelRequest(pb.ModelInferRequest(model_name="late"))
    for name, value in {"IMAGE": PICTURE, "MASK": MASK, "SETTINGS": b"{}"}.items():
        message.add(name, [value])
    gc.disable()
    try:
        raw = await served.infer(message, context_of(CLIENT))
        await services.fair_share.locked(int)  # behind the run's end
        assert str(values._store.folder) not in Path("/proc/self/maps").read_text()
    finally:
        gc.enable()
    outputs = bytes_tensor.outputs(pb.ModelInferResponse.FromString(raw))
    first = b"outline-1" + PICTURE
    assert bytes(outputs["RIMS"]) == b"outline-2" + first
    assert bytes(outputs["TURNED"]) == b"invert-1" + MASK
    assert bytes(outputs["IMAGE"]) == first + b"of invert-1" + MASK
    meta = json.loads(bytes(outputs["META"]))
    tries = {node_record["key"]: node_record["tries"] for node_record in meta["nodes"]}
    assert tries.pop("edit-1") == called.count("edit-1") == 1
    assert {key: called.count(key) for key in tries} == tries
    assert tries["invert-1"] == 2
    assert meta["values"]["count"] >= 6
    assert left(values) == 0
    assert not list(values._store.folder.glob(".open/*"))
    assert threads
    assert threading.main_thread() not in threads, "the event loop waits for a lock"


def test_what_a_client_gave_is_there_as_long_as_its_run(values: Values) -> None:
    files = RunValues(values, "k1")
    inputs = files.store_inputs(PLAN, {"image": PICTURE, "mask": MASK})
    assert (files.count, files.bytes) == (2, len(PICTURE) + len(MASK))
    for name in values.ids():
        values.remove(name)
    assert all(map(files.exists, inputs.values()))  # in memory: that takes no lock
    assert bytes(files.read(inputs)["image"]) == PICTURE
    files.free([inputs["mask"]])
    assert left(values) == 0
    full = Values(ValuesConfig(str(values._store.folder), least_bytes=1, max_bytes=0))
    files._values = full
    assert files.exists(inputs["image"])  # in memory, where there is no room for a file
    assert files.read({"": inputs["image"]})[""] == PICTURE
    files.end()
    assert left(values) == 0
    assert not RunValues(Values(ValuesConfig()), "k1").run


def test_what_another_host_answered_lies_in_files_of_this_one(values: Values) -> None:
    files = RunValues(values, "k1")
    areas = Areas((MASK, PICTURE), (0, 0))
    answer_outputs = {
        "picture": PICTURE,
        "regions": areas,
        "name": "a star",
        "verdict": Judgement(1.0, passed=True),
    }
    local_outputs = files.store_bytes(answer_outputs)
    assert (local_outputs["name"], local_outputs["verdict"]) == (
        answer_outputs["name"],
        answer_outputs["verdict"],
    )
    assert all(
        isinstance(part, NamedValue)
        for part in (local_outputs["picture"], *local_outputs["regions"].masks)
    )
    assert {
        name: as_sent(value) for name, value in files.read(local_outputs).items()
    } == answer_outputs
    files.register(local_outputs)
    assert files.count == 2  # equal ones are one file
    files.end()
    assert left(values) == 0
    assert files.store_bytes({"picture": PICTURE}) == {"picture": PICTURE}  # it is over
    assert RunValues(Values(ValuesConfig()), "k1").store_bytes(answer_outputs) == answer_outputs


def reference(raw: bytes) -> bytes:
    return b"value:%s:%d" % (hashlib.sha256(raw).hexdigest().encode(), len(raw))


def as_sent(value: Any) -> Any:
    return map_parts(value, lambda part: bytes(part) if isinstance(part, memoryview) else part)


async def test_kept_answers_take_no_lock_in_the_event_loop(
    values: Values, threads: set[threading.Thread]
) -> None:
    """Held by a process that is stopped, it held up edits and health."""
    far_values = Values(ValuesConfig(str(values._store.folder), least_bytes=1))
    turns = FairShare(1)
    pool = Served("here:1", values=values, kept_bytes=2000)
    pool.far_values = far_values
    for number in range(12):
        files = await turns.locked(RunValues, values, "k1", turns.later)
        for is_reused in (False, True):
            results = await turns.run(
                CLIENT, IN_A_THREAD, files.store_inputs, PLAN, {"mask": b"%d" % number}
            )
            assert (
                await pool.call(call(results["mask"]), CLIENT, run=files.run)
            ).reused is is_reused
            files.free([])
        files.end()
    await turns.locked(int)
    await pool.close()
    assert left(values) == 0
    assert threading.main_thread() not in threads


with Workflow("five", "Five wishes for one picture.") as five:
    image, mask = five.picture("image"), five.mask("mask")
    five.gives(**{f"image{i}": edit(image, mask, f"wish {i}") for i in range(5)})


class Encoders:
    """Workers whose encoders take what their run has, as `RunEncodings` does."""

    def __init__(self, values: Values, *, fails: bool = False) -> None:
        self.values, self.fails = values, fails
        self.encodings: list[str] = []
        """Request ids of those that made the picture's encoding."""
        self.places: list[EncodingPlace | None] = []

    async def alone_s(self, message: ModelRequest, client: KeyHolder, *_: Any) -> None:
        return None

    async def encode(self, message: ModelRequest, client: KeyHolder) -> bytes:
        assert message.head.parameters[ENCODING].string_param == MAKE
        if self.fails:
            raise Failure(grpc.StatusCode.UNAVAILABLE, "it has died")
        return self._answer(message, {"timings_ms": {"encode": 40.0}, "encoded": {}})

    async def infer(self, message: ModelRequest, *_: Any) -> bytes:
        self.places.append(message.encoding)
        takes = message.head.parameters[ENCODING].string_param == TAKE
        assert takes == (message.encoding is not None)
        return self._answer(message, {})

    def _answer(self, message: ModelRequest, meta: dict[str, Any]) -> bytes:
        run, how = (message.head.parameters[name].string_param for name in (RUN, ENCODING))
        picture = bytes(self.values.read(message.read("IMAGE"), "k1"))
        name = hashlib.sha256(picture).hexdigest()[::-1]
        if not how or self.values.read_named(name, "k1", run) is None:
            self.encodings.append(json.loads(message.read("SETTINGS"))["request_id"])
        if how == MAKE:
            assert self.values.put_named(name, [b"moments"], "k1", run)
        answer = pb.ModelInferResponse(model_name="edit")
        bytes_tensor.add_output(answer, "IMAGE", [picture + message.read("PROMPT")])
        bytes_tensor.add_output(answer, "META", [json.dumps(meta).encode()])
        return bytes(answer.SerializeToString())


@pytest.mark.parametrize("fails", [False, True])
async def test_variants_of_a_picture_encode_it_once_by_the_plan(
    values: Values, fails: bool
) -> None:
    async def run(plan: WorkflowPlan) -> tuple[Encoders, dict[str, bytes]]:
        encoders = Encoders(values, fails=fails)
        times = RunTimes(RouterConfig(), lambda node: None, lambda: [0.0])
        admission = Admission(AdmissionBounds(), Metrics())
        nodes: Any = Served(values=values)
        services = RunServices(encoders, nodes, admission, FairShare(2), times)  # type: ignore[arg-type]
        served = Workflows([plan], services, list, LimitsConfig(), values)
        message = ModelRequest(pb.ModelInferRequest(model_name="five"))
        for name, value in {"IMAGE": PICTURE, "MASK": MASK, "SETTINGS": b"{}"}.items():
            message.add(name, [value])
        raw = await served.infer(message, context_of(CLIENT))
        await services.fair_share.locked(int)  # behind the run's end
        outputs = bytes_tensor.outputs(pb.ModelInferResponse.FromString(raw))
        return encoders, {name: bytes(x) for name, x in outputs.items() if name != "META"}

    naive, expected = await run(compiled(five.plan, set(PASSES) - {"encode"}))
    assert len(naive.encodings) == 5
    assert naive.places == [None] * 5
    shared, outputs = await run(compiled(five.plan))
    assert outputs == expected
    if fails:
        assert (len(shared.encodings), shared.places) == (5, [None] * 5)
    else:
        [name] = shared.encodings
        assert name.endswith("/encode-1")
        assert shared.places == [EncodingPlace(values.host, 0.04)] * 5
    assert left(values) == 0
