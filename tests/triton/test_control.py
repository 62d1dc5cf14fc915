"""`control`: operations in JSON, refusals that name the key, answers even from a dead engine."""

from __future__ import annotations

import base64
import json
import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import structs
from PIL import Image

import maskserve_triton.control as control_module
from maskserve_common.config import Config, StagesConfig, templates_folder
from maskserve_common.contracts.operations import OPERATIONS
from maskserve_common.contracts.status_record import NodeStatus, WorkerStatus
from maskserve_common.errors import EngineFailed
from maskserve_common.files.stages import StageOutages
from maskserve_common.imaging import images
from maskserve_common.imaging.images import encode_image
from maskserve_common.niceness import Niceness
from maskserve_triton.admission import AdmissionState
from maskserve_triton.batched_requests import batched
from maskserve_triton.cancels import CancelListener, cancel_edit
from maskserve_triton.control import WorkerControl
from maskserve_triton.templates import StoredTemplates
from tests.fakes.pb_utils import Call, FakeTriton, InferenceResponse, Request, failure, reply
from tests.support.eventually import eventually

pytestmark = pytest.mark.usefixtures("beat")


@pytest.fixture
def control(api: FakeTriton, config: Config) -> Iterator[WorkerControl]:
    worker_control = WorkerControl(api, config)
    yield worker_control
    worker_control.close()


@pytest.fixture
def impatient(api: FakeTriton, config: Config) -> Iterator[WorkerControl]:
    """Gives an engine a second."""
    engine = structs.replace(config.engine, heartbeat_timeout_s=1.0)
    worker_control = WorkerControl(api, structs.replace(config, engine=engine))
    yield worker_control
    worker_control.close()


def ask(api: FakeTriton, control: WorkerControl, operation: Any) -> Any:
    """The result, or the error's text."""
    raw = operation if isinstance(operation, bytes) else json.dumps(operation).encode()
    request = api.request(OP=raw)
    control.execute([request])
    answer = request.sender.wait()
    error = answer.error()
    return error.message() if error is not None else json.loads(answer.text("RESULT"))


@pytest.mark.parametrize("name", ["origin", "Origin"])
def test_a_page_drains_nothing(
    api: FakeTriton, control: WorkerControl, config: Config, name: str
) -> None:
    parameters = json.dumps({name: "https://evil.example"})
    request = api.request(parameters=parameters, OP=b'{"op": "drain"}')
    control.execute([request])
    error = request.sender.wait().error()
    assert "Origin: is set, so a web page sends the request" in error.message()
    assert AdmissionState(config.runtime_dir).state() == "open"


def test_an_operation_given_up_is_not_done_later(
    api: FakeTriton, impatient: WorkerControl, config: Config
) -> None:
    release, template_ids = threading.Event(), list[str]()

    def slow(call: Call) -> Iterator[InferenceResponse]:
        template_ids.append(call.json("REQUEST")["template_id"])
        release.wait(10)
        yield reply(META=b'{"found": true}')

    def unpin(number: int) -> Request:
        request = api.request(
            OP=json.dumps({"op": "unpin", "template_id": f"{number:016x}"}).encode()
        )
        impatient.execute([request])
        return request

    api.models["denoiser"] = slow
    busy = [unpin(number) for number in range(8)]
    queued = unpin(8)
    try:
        for request in (*busy, queued):
            assert request.sender.wait().error() is not None
    finally:
        release.set()
    eventually("the queue is empty", lambda: impatient._threads.idle)
    assert sorted(template_ids) == [f"{number:016x}" for number in range(8)]


@pytest.mark.parametrize(
    ("operation", "message"),
    [
        (b"{", "[INVALID_REQUEST] OP: is not valid JSON"),
        (b"\xff", "[INVALID_REQUEST] OP: is not valid JSON"),
        ([], "[INVALID_REQUEST] OP: is a JSON list"),
        ({}, "[INVALID_REQUEST] OP.op: is missing"),
        ({"op": "explode"}, "[INVALID_REQUEST] OP.op: 'explode' is not known"),
        ({"op": ["status"]}, "[INVALID_REQUEST] OP.op:"),
        ({"op": "status", "all": True}, "[INVALID_REQUEST] OP.all: is not a key of status"),
        (b'{"op": "status", "op": "drain"}', "[INVALID_REQUEST] OP.op: is given twice"),
        ({"op": "status", "\ud800": 1}, r"[INVALID_REQUEST] OP.\ud800: is not a key of status"),
        (b"[" + b"{}," * 30_000 + b"{}]", "[INVALID_REQUEST] OP: is 90004 bytes of nested JSON"),
        ({"op": "cancel"}, "[INVALID_REQUEST] OP.request_id: is missing"),
        ({"op": "cancel", "request_id": 3}, "[INVALID_REQUEST] OP.request_id: is not"),
        ({"op": "register", "image": "hello"}, "[INVALID_REQUEST] OP.image: is not an image"),
        ({"op": "evict", "template_id": "../x"}, "[INVALID_REQUEST] OP.template_id: has another"),
        ({"op": "evict", "template_id": "0" * 32}, "[TEMPLATE_NOT_FOUND] OP.template_id: 000"),
    ],
)
def test_refusals_name_the_key(
    api: FakeTriton, control: WorkerControl, operation: Any, message: str
) -> None:
    api.models["denoiser"] = lambda call: [reply(META=b'{"templates": [], "freed_bytes": 0}')]
    assert str(ask(api, control, operation)).startswith(message)


def test_an_unknown_operation_is_told_the_known_ones(
    api: FakeTriton, control: WorkerControl
) -> None:
    answer = ask(api, control, {"op": "explode"})
    assert all(name in answer for name in OPERATIONS)


def test_status_needs_no_engine(
    api: FakeTriton, config: Config, control: WorkerControl, beat: Callable[..., None]
) -> None:
    nodes = (NodeStatus("denoiser", "tiny", "ready"), NodeStatus("upscaler", "big", "loading"))
    beat(state="ready", counters={"steps_total": 3}, nodes=nodes)
    status = ask(api, control, {"op": "status"})
    assert status["worker"] == "worker-0"
    assert status["counters"] == {"steps_total": 3}
    assert status["alive"]
    assert status["in_flight"] == 0
    assert api.calls == []
    AdmissionState(config.runtime_dir).drain()
    drained = ask(api, control, {"op": "status"})
    assert drained["state"] == "draining"
    assert [node["state"] for node in drained["nodes"]] == ["draining", "loading"]


def test_who_says_which_templates_it_knows_is_told_changes(
    api: FakeTriton, control: WorkerControl, beat: Callable[..., None]
) -> None:
    beat(state="ready", templates={"host": ("a", "b"), "disk": ()})
    whole = ask(api, control, {"op": "status"})
    assert whole["templates"] == {"host": ["a", "b"], "disk": []}
    assert "template_changes" not in whole
    first = ask(api, control, {"op": "status", "templates": ""})
    changes = first["template_changes"]
    assert (first["templates"], changes["since"]) == ({}, "")
    assert changes["added"] == {"host": ["a", "b"]}
    assert {**whole, "templates": {}}.keys() == first.keys() - {"template_changes"}
    beat(state="draining", templates={"host": ("b",), "disk": ("c",)})
    second = ask(api, control, {"op": "status", "templates": changes["version"]})
    assert second["state"] == "draining"
    assert second["template_changes"]["since"] == changes["version"]
    assert second["template_changes"]["added"] == {"disk": ["c"]}
    assert second["template_changes"]["removed"] == {"host": ["a"]}
    refused = ask(api, control, {"op": "status", "templates": 7})
    assert "OP.templates: is not a string" in refused


def test_status_says_which_stages_are_away(
    api: FakeTriton, config: Config, beat: Callable[..., None]
) -> None:
    beat(state="ready", nodes=(NodeStatus("denoiser", "tiny", "ready"),))
    served = structs.replace(config, stages=StagesConfig(service="a:1,b:1"))
    control = WorkerControl(api, served)
    try:
        for last, away in (("loading", True), ("ready", False)):
            StageOutages(served).mark("decoder", {"a:1": "failed", "b:1": last})
            status = ask(api, control, {"op": "status"})
            states = {node["name"]: node["state"] for node in status["nodes"]}
            decoder = "loading" if away else "ready"
            assert states == {"denoiser": "ready", "encoder": "ready", "decoder": decoder}
            assert status["services"] == [
                {"name": "a:1", "model": "decoder", "state": "failed"},
                {"name": "b:1", "model": "decoder", "state": last},
            ]
            keys = WorkerStatus.__struct_fields__
            record = {name: value for name, value in status.items() if name in keys}
            assert WorkerStatus.from_json(json.dumps(record)).takes_edits == (not away)
    finally:
        control.close()


def test_drain_closes_the_admission(
    api: FakeTriton, config: Config, control: WorkerControl
) -> None:
    assert ask(api, control, {"op": "drain"}) == {"draining": True, "in_flight": 0}
    assert AdmissionState(config.runtime_dir).state() == "draining"


def test_register_list_evict(api: FakeTriton, control: WorkerControl) -> None:
    def denoiser(call: Call) -> list[InferenceResponse]:
        listing = {"templates": [{"template_id": "f" * 32, "bytes": 10, "tier": "device"}]}
        operation = call.json("REQUEST")["op"]
        return [
            reply(
                META=json.dumps(
                    listing if operation == "templates" else {"freed_bytes": 5}
                ).encode()
            )
        ]

    api.models["denoiser"] = denoiser
    png = encode_image(np.zeros((5, 7, 3), np.uint8), "png")
    template = ask(api, control, {"op": "register", "image": base64.b64encode(png).decode()})
    assert (template["width"], template["height"]) == (7, 5)
    name = template["template_id"]
    listed = {t["template_id"]: t for t in ask(api, control, {"op": "templates"})["templates"]}
    assert listed[name] == {
        "template_id": name,
        "registered": True,
        "owners": [],
        "expires_s": None,
        "entries": [],
    }
    assert listed["f" * 32]["registered"] is False
    assert listed["f" * 32]["entries"] == [{"bytes": 10, "tier": "device"}]
    eviction = ask(api, control, {"op": "evict", "template_id": name})
    assert eviction == {"template_id": name, "registered": False, "freed_bytes": 5}


def test_pictures_of_equal_pixels_share_entries_and_keep_their_own_transparency(
    api: FakeTriton, control: WorkerControl, config: Config
) -> None:
    """One that was registered answered with the transparency of another."""
    rgb, entries = np.zeros((5, 7, 3), np.uint8), ["entry"]

    def denoiser(call: Call) -> list[InferenceResponse]:
        match call.json("REQUEST")["op"]:
            case "templates":
                listed = [{"template_id": first, "bytes": 10} for _ in entries]
                response: dict[str, Any] = {"templates": listed}
            case "evict":
                response = {"freed_bytes": 10 * len(entries)}
                entries.clear()
            case _:
                response = {"found": True}
        return [reply(META=json.dumps(response).encode())]

    api.models["denoiser"] = denoiser
    files, names = [], []
    for clear in (0, 9):
        alpha = np.full((5, 7, 1), clear, np.uint8)
        files.append(encode_image(np.concatenate([rgb, alpha], axis=2), "png"))
        image = base64.b64encode(files[-1]).decode()
        names.append(ask(api, control, {"op": "register", "image": image})["template_id"])
    first, second = names
    template_store = StoredTemplates(templates_folder(config))
    assert [template_store.get(name) for name in names] == files

    def listed_now() -> dict[str, Any]:
        listed = ask(api, control, {"op": "templates"})["templates"]
        return {template["template_id"]: template["entries"] for template in listed}

    assert listed_now() == {name: [{"bytes": 10}] for name in names}
    assert ask(api, control, {"op": "evict", "template_id": first})["freed_bytes"] == 0
    assert listed_now() == {second: [{"bytes": 10}]}
    assert ask(api, control, {"op": "evict", "template_id": second})["freed_bytes"] == 10
    assert listed_now() == {}


def test_heartbeat_is_the_engines_answer(api: FakeTriton, control: WorkerControl) -> None:
    api.models["denoiser"] = lambda call: [reply(META=b'{"state": "ready"}')]
    assert ask(api, control, {"op": "heartbeat"}) == {"state": "ready"}
    assert api.calls_of("denoiser")[0].json("REQUEST") == {"op": "heartbeat"}


def test_the_denoisers_error_arrives_clean(api: FakeTriton, control: WorkerControl) -> None:
    api.models["denoiser"] = lambda call: [failure("Stub process 'denoiser_0_0' is not healthy.")]
    answer = ask(api, control, {"op": "heartbeat"})
    assert answer == "[ENGINE_FAILED] internal error (request unknown)"


def test_a_dead_engine_does_not_hang_control(api: FakeTriton, impatient: WorkerControl) -> None:
    release = threading.Event()

    def dead(call: Call) -> Iterator[InferenceResponse]:
        release.wait(10)
        yield reply(META=b"{}")

    api.models["denoiser"] = dead
    try:
        answer = ask(api, impatient, {"op": "heartbeat"})
        assert answer == "[ENGINE_FAILED] the engine did not answer within 1 s"
        assert ask(api, impatient, {"op": "status"})["alive"] is False
    finally:
        release.set()


def test_a_cancel_is_answered_by_the_front_that_has_the_edit(
    api: FakeTriton, control: WorkerControl, config: Config
) -> None:
    cancels: list[tuple[str, str]] = []

    def front(name: str, edits: set[str]) -> CancelListener:
        def withdraw(request_id: str) -> bool:
            cancels.append((name, request_id))
            return request_id in edits

        return CancelListener(config.runtime_dir, name, withdraw)

    def cancelled(request_id: str) -> Any:
        return ask(api, control, {"op": "cancel", "request_id": request_id})

    assert cancelled("mine") == {"cancelled": False}
    first, second = front("edit", set()), front("edit_stream", {"mine"})
    assert cancelled("mine") == {"cancelled": True}
    assert cancels == [("edit", "mine"), ("edit_stream", "mine")]
    for nobodys in ("other", "\ud800 half a pair", "x" * 10_000):
        assert cancelled(nobodys) == {"cancelled": False}
    second.close()
    assert cancelled("mine") == {"cancelled": False}
    first.close()
    assert api.calls_of("denoiser") == []


def test_who_asks_and_goes_away_is_no_trouble(
    api: FakeTriton, control: WorkerControl, config: Config, caplog: pytest.LogCaptureFixture
) -> None:
    front = CancelListener(config.runtime_dir, "edit", lambda request_id: request_id == "mine")
    for _ in range(3):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as asking:
            asking.connect(str(Path(config.runtime_dir) / "cancels" / "edit"))
    assert ask(api, control, {"op": "cancel", "request_id": "mine"}) == {"cancelled": True}
    front.close()
    assert caplog.records == []


def test_a_front_that_was_killed_or_hangs_is_no_reason_to_hang(
    api: FakeTriton, control: WorkerControl, config: Config
) -> None:
    stale_socket = Path(config.runtime_dir) / "cancels" / "edit"
    stale_socket.parent.mkdir()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as deaf:
        deaf.bind(str(stale_socket))
        operation = {"op": "cancel", "request_id": "mine"}
        assert ask(api, control, operation) == {"cancelled": False}  # nobody listens
        deaf.listen()
        with pytest.raises(EngineFailed, match="edit does not answer"):
            cancel_edit(config.runtime_dir, "mine", timeout_s=0.2)


def test_an_image_of_every_mode_is_registered_as_it_came(
    api: FakeTriton, control: WorkerControl, config: Config
) -> None:
    import io

    out = io.BytesIO()
    Image.new("P", (9, 4)).save(out, "PNG")
    template = ask(
        api, control, {"op": "register", "image": base64.b64encode(out.getvalue()).decode()}
    )
    file = f"{config.runtime_dir}/templates/{template['template_id']}"
    with open(file, "rb") as stored:
        assert stored.read() == out.getvalue()


def test_a_registered_template_is_decoded_once_encoded_and_primed(
    api: FakeTriton, config: Config, tiny_fill: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from maskserve_common.config import ModelConfig

    requests: list[dict[str, Any]] = []
    decoded: list[str] = []
    niceness_values: list[int] = []

    def decode(raw: bytes, field: str, *limits: Any, **options: Any) -> images.Raster:
        decoded.append(field)
        return decode_raster(raw, field, *limits, **options)

    decode_raster = images.decode_raster
    monkeypatch.setattr(images, "decode_raster", decode)
    encoded = {
        "MOMENTS": np.zeros((8, 16, 16), np.float32),
        "MASKED_MOMENTS": np.zeros((8, 16, 16), np.float32),
        "CONDITIONING": np.zeros(16, np.uint8),
    }

    def denoiser(call: Call) -> list[InferenceResponse]:
        requests.append(call.json("REQUEST"))
        requests[-1]["tensors"] = sorted(call.tensors)
        niceness_values.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        return [reply(META=b'{"state": "priming"}')]

    # It takes requests together, so its tensors have a batch dimension.
    api.models["encoder"] = lambda call: [reply(**batched(encoded))]
    api.models["denoiser"] = denoiser
    served = WorkerControl(api, structs.replace(config, model=ModelConfig(path=str(tiny_fill))))
    picture = np.full((40, 48, 3), 7, np.uint8)
    text = base64.b64encode(encode_image(picture, "png")).decode()
    answer = ask(api, served, {"op": "register", "image": text})
    assert (answer["width"], answer["height"], answer["state"]) == (48, 40, "priming")
    assert decoded == ["OP.image"]
    assert ask(api, served, {"op": "prime", "template_id": answer["template_id"]}) == {
        "template_id": answer["template_id"],
        "state": "priming",
    }
    template = json.loads(requests[0]["request"])
    assert template["template_id"] == answer["template_id"]
    assert template["prompt"] == ""
    assert decoded == ["OP.image"] * 2
    process = os.getpriority(os.PRIO_PROCESS, os.getpid())
    assert set(niceness_values) == {min(19, process + Niceness.OPERATIONS)}
    assert requests[0]["tensors"] == sorted([*encoded, "EDIT_MASK", "REQUEST"])
    served.close()


def test_two_large_pictures_are_in_memory_at_a_time(
    api: FakeTriton, control: WorkerControl, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight of 50 megapixels took four gigabytes."""
    go, lock, sizes = threading.Event(), threading.Lock(), list[int]()
    decode_image, side = images.decode_image, 1500

    def decode(raw: bytes, field: str, limits: Any) -> images.Decoded:
        decoded = decode_image(raw, field, limits)
        with lock:
            sizes.append(len(decoded.pixels))
        if len(decoded.pixels) == side:
            assert go.wait(30)
        return decoded

    monkeypatch.setattr(control_module, "decode_image", decode)

    def registration(side: int, value: int) -> Request:
        pixels = np.full((side, side, 3), value, np.uint8)
        text = base64.b64encode(encode_image(pixels, "png")).decode()
        operation = {"op": "register", "image": text, "prime": False, "scope": f"key{value}"}
        return api.request(OP=json.dumps(operation).encode())

    large = [registration(side, value) for value in range(4)]
    control.execute(large)
    eventually("two are decoded", lambda: len(sizes) == 2)
    small = registration(64, 9)
    control.execute([small])
    assert small.sender.wait().error() is None
    assert sizes == [side, side, 64]
    go.set()
    assert [request.sender.wait().error() for request in large] == [None] * 4


@pytest.mark.parametrize("op", ["pin", "unpin", "prime"])
def test_operations_on_unknown_templates_are_refused(
    api: FakeTriton, control: WorkerControl, op: str
) -> None:
    api.models["denoiser"] = lambda call: [reply(META=b'{"found": false}')]
    answer = ask(api, control, {"op": op, "template_id": "0" * 32})
    assert answer.startswith("[TEMPLATE_NOT_FOUND] OP.template_id")


def test_a_refused_pin_leaves_no_pin_behind(api: FakeTriton, control: WorkerControl) -> None:
    pinned: set[str] = set()

    def denoiser(call: Call) -> list[InferenceResponse]:
        operation = call.json("REQUEST")
        name = operation["template_id"]
        was_pinned = operation["op"] == "unpin" and name in pinned
        (pinned.add if operation["op"] == "pin" else pinned.discard)(name)
        return [reply(META=json.dumps({"found": was_pinned}).encode())]

    api.models["denoiser"] = denoiser
    for op in ("pin", "unpin"):
        answer = ask(api, control, {"op": op, "template_id": "0" * 32})
        assert answer.startswith("[TEMPLATE_NOT_FOUND] OP.template_id")
        assert pinned == set()


@pytest.mark.parametrize("scope", ["", "greedy"])
def test_registrations_delay_no_cancel_and_no_other_operation(
    api: FakeTriton, config: Config, scope: str
) -> None:
    """Thirty of one key had all threads, and another key's cancel came after its deadline."""
    release, begun = threading.Event(), list[str]()

    class Slow(WorkerControl):
        def _register(self, operation: dict[str, Any]) -> dict[str, Any]:
            begun.append(operation["image"])
            release.wait(30)
            return {}

    control = Slow(api, config)
    api.models["denoiser"] = lambda call: [reply(META=b'{"templates": []}')]
    named = {"scope": scope} if scope else {}
    registering = []
    try:
        for number in range(30):
            operation = {"op": "register", "image": str(number), **named}
            registering.append(api.request(OP=json.dumps(operation).encode()))
            control.execute([registering[-1]])
        # Each is answered while all of them wait.
        assert ask(api, control, {"op": "cancel", "request_id": "x"}) == {"cancelled": False}
        assert ask(api, control, {"op": "templates"}) == {"templates": []}
        assert ask(api, control, {"op": "templates", "scope": "modest"}) == {"templates": []}
        assert len(begun) <= 4
    finally:
        release.set()
        for request in registering:
            assert request.sender.wait().error() is None
        control.close()


def test_one_key_may_not_fill_the_queue_of_operations(api: FakeTriton, config: Config) -> None:
    release = threading.Event()

    def hold_call(call: Call) -> Iterator[InferenceResponse]:
        release.wait(30)
        yield reply(META=b'{"templates": []}')

    control = WorkerControl(api, config)
    api.models["denoiser"] = hold_call
    asking = []
    try:
        for _ in range(200):
            op_request = api.request(OP=json.dumps({"op": "templates", "scope": "greedy"}).encode())
            asking.append(op_request)
            control.execute([op_request])
        refused = asking[-1].sender.wait().error()
        assert refused is not None
        assert refused.message().startswith("[OVERLOADED] too many operations wait")
    finally:
        release.set()
        for request in asking:
            request.sender.wait()
        control.close()


def test_no_registration_is_lost_beside_another_keys_evictions(
    api: FakeTriton, config: Config
) -> None:
    """62 of 1,951 were: the last owner left while another came, and took the picture along."""
    control = WorkerControl(api, config)
    api.models["denoiser"] = lambda call: [reply(META=b'{"freed_bytes": 0}')]
    image = base64.b64encode(encode_image(np.zeros((5, 7, 3), np.uint8), "png")).decode()
    stop = threading.Event()

    def register(scope: str) -> str:
        operation = {"op": "register", "image": image, "prime": False, "scope": scope}
        name: str = ask(api, control, operation)["template_id"]
        return name

    def evict(name: str, scope: str) -> Any:
        return ask(api, control, {"op": "evict", "template_id": name, "scope": scope})

    def churn() -> None:
        while not stop.is_set():
            evict(register("k2"), "k2")

    thread = threading.Thread(target=churn)
    thread.start()
    lost_count = 0
    try:
        for _ in range(300):
            name = register("k1")
            lost_count += control._templates.get(name, "k1") is None
            lost_count += not isinstance(evict(name, "k1"), dict)
    finally:
        stop.set()
        thread.join()
        control.close()
    assert lost_count == 0
