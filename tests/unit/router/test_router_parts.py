"""The router's pure parts: ejection, retries, keys, bounds, statistics, JSON and configuration."""

from __future__ import annotations

import asyncio
import hashlib
import random
import socket
import struct
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from tritonclient.grpc import service_pb2 as pb

from maskserve_common.config import ConfigError
from maskserve_common.errors import InvalidRequest
from maskserve_common.servers.failure import Blame, Failure
from maskserve_router.api.kserve_http import (
    generate_request,
    generate_response,
    infer_request,
    infer_response,
)
from maskserve_router.api.server_calls import ServerCalls
from maskserve_router.api.statistics import sum_statistics
from maskserve_router.config import (
    AdmissionBounds,
    Faults,
    Http,
    Key,
    RouterConfig,
    load_router_config,
)
from maskserve_router.key_holder import KeyHolder
from maskserve_router.keys import KeyRing
from maskserve_router.listeners.http_server import HttpServer
from maskserve_router.messages.edit_call import check_request, make_edit_call, parse_request
from maskserve_router.messages.failures import RetryLater, Status, Unauthorized
from maskserve_router.messages.json_values import values_of
from maskserve_router.messages.model_answer import ModelAnswer
from maskserve_router.messages.model_request import ModelRequest
from maskserve_router.metrics import Metrics
from maskserve_router.scheduling.admission import Admission, NoRoomInMemory
from maskserve_router.scheduling.retry_budget import RetryBudget
from maskserve_router.scheduling.served_workflows import ServedWorkflows
from maskserve_router.workers.answer_times import AnswerTimes
from maskserve_router.workers.breaker import Breaker
from maskserve_router.workers.predictions import Predictions
from tests.support.router_requests import parsed

FAULTS = Faults(failures_to_eject=3, eject_s=2.0, max_eject_s=5.0)


def eject(breaker: Breaker, now: float, edits: str = "abc") -> None:
    assert [breaker.record_failure(name, now, may_eject=True) for name in edits] == [
        False,
        False,
        True,
    ]


def test_a_worker_that_fails_is_ejected_and_comes_back_by_one_edit():
    breaker = Breaker(FAULTS)
    eject(breaker, 10.0)
    assert not breaker.allows(11.9)
    assert breaker.allows(12.0)
    breaker.record_sent("trial")
    assert not breaker.allows(12.0)  # one edit decides
    breaker.record_success("from before")
    assert breaker.ejected
    breaker.record_success("trial")
    assert breaker.allows(12.0)
    assert not breaker.ejected


def test_each_ejection_in_a_row_takes_longer_up_to_a_bound():
    breaker = Breaker(FAULTS)
    eject(breaker, 0.0)
    now_s = 0.0
    for wait in (2.0, 4.0, 5.0, 5.0):
        assert not breaker.allows(now_s + wait - 0.1)
        now_s += wait
        assert breaker.allows(now_s)
        breaker.record_sent("trial")
        assert breaker.record_failure("trial", now_s, may_eject=True)


def test_failures_of_edits_from_before_do_not_lengthen_an_ejection():
    breaker = Breaker(FAULTS)
    eject(breaker, 0.0)
    assert not breaker.record_failure("late", 1.9, may_eject=True)
    assert breaker.allows(2.0)


def test_a_success_in_between_starts_the_count_anew_and_the_cap_holds_ejection_back():
    breaker = Breaker(FAULTS)
    for name in "ab":
        breaker.record_failure(name, 0.0, may_eject=True)
    breaker.record_success("c")
    for name in "de":
        assert not breaker.record_failure(name, 0.0, may_eject=True)
    assert not breaker.record_failure("f", 0.0, may_eject=False)
    assert breaker.allows(0.0)


def test_a_trial_whose_client_left_decides_nothing():
    breaker = Breaker(FAULTS)
    eject(breaker, 0.0)
    breaker.record_sent("trial")
    breaker.record_unknown("trial")
    assert breaker.allows(2.0)
    assert breaker.ejected


def test_retries_are_a_share_of_edits_with_a_floor():
    budget = RetryBudget(0.2, 2)
    with budget.spend():
        assert budget.allows(5)
        with budget.spend():
            assert not budget.allows(10)
            assert budget.allows(11)
    assert budget.running == 0


def test_keys_name_their_client_and_bound_it():
    digest = hashlib.sha256(b"secret").hexdigest()
    keys = KeyRing((Key(name="a", sha256=digest, max_edits=1),), 99)
    for headers in ({"x-api-key": "secret"}, {"authorization": "Bearer secret"}):
        assert keys.client(headers).name == "a"
    for headers in ({}, {"x-api-key": "Secret"}, {"authorization": "Basic secret"}):
        with pytest.raises(Unauthorized, match="API key"):
            keys.client(headers)
    client = keys.client({"x-api-key": "secret"})
    assert not client.admin
    admission = Admission(AdmissionBounds(), Metrics())
    error_text = "key a has its share: 1"
    with (
        admission.edit(client),
        pytest.raises(RetryLater, match=error_text),
        admission.edit(client),
    ):
        pass
    assert (admission.edits, admission.bytes, admission._edits.in_use(client.scope)) == (0, 0, 0)
    assert KeyRing((), 7).client({}).admin


def test_edits_and_bytes_are_bounded():
    admission = Admission(AdmissionBounds(max_edits=2, max_bytes=100), Metrics())
    client = KeyRing((), 99).client({})
    with admission.hold(client, 60):
        with pytest.raises(NoRoomInMemory, match="60 bytes"), admission.hold(client, 60):
            pass
        assert admission.bytes == 60
    assert admission.bytes == 0
    with admission.edit(client), admission.edit(client):
        with pytest.raises(RetryLater, match="2 edits"), admission.edit(client):
            pass
        assert admission.edits == 2
    admission.closed = True
    with pytest.raises(RetryLater, match="stopping"), admission.edit(client):
        pass


async def test_an_edits_room_is_taken_before_there_is_anything_and_given_back_at_its_end():
    admission = Admission(AdmissionBounds(max_bytes=100), Metrics())
    client = KeyRing((), 99).client({})
    with admission.room(client) as room:
        await room.take(60)
        with admission.room(client) as other_room, pytest.raises(NoRoomInMemory, match="60 bytes"):
            await other_room.take(41)
        assert admission.bytes == 60
        for arrived_bytes in (10, 120):  # what has come is counted, also beyond the budget
            room.resize(arrived_bytes)
            assert admission.bytes == arrived_bytes
    assert admission.bytes == 0


def test_predictions_say_how_far_they_were_off_of_late():
    predictions = Predictions()
    predictions.add(9.0, 1.0)
    assert predictions.error() is None
    for percent in range(1000):  # the first one is forgotten; late or early is the same
        predictions.add(2.0 + (-1) ** percent * 2e-3 * percent, 2.0)
    error = predictions.error()
    assert error is not None
    assert (error.edits, round(error.median, 2), round(error.p95, 2)) == (1000, 0.5, 0.95)


def answer(slowdown: float, rest: float, tokens: int, denoised_s: float) -> float:
    return slowdown * denoised_s + rest * tokens


def test_what_edits_take_beyond_their_predicted_denoising_is_learnt_from_answers():
    times, rng = AnswerTimes(), random.Random(5)
    for _ in range(3):
        times.learn(1000, 1.0, 3.0)
        assert times.predict(1000, 1.0) == 1.0  # too few to say
    for slowdown, token_s in ((2.5, 4e-4), (1.0, 0.0), (0.4, 1e-3)):  # each is forgotten in turn
        for _ in range(32):
            edit = rng.randint(256, 4096), rng.uniform(0.1, 9.0)
            times.learn(*edit, answer(slowdown, token_s, *edit))
        assert times.predict(500, 2.0) == pytest.approx(answer(slowdown, token_s, 500, 2.0))


@pytest.mark.parametrize(
    ("answered", "predicted"),
    [
        ([5.0] * 16, 5.0),
        ([0.5] * 16, 0.5),  # denoising was predicted too long
        ([4.0, 6.0] * 8, pytest.approx(5.0, rel=0.1)),
    ],
)
def test_edits_all_alike_are_predicted_too(answered: list[float], predicted: float):
    times = AnswerTimes()
    for seconds in answered:
        times.learn(1000, 2.0, seconds)
    assert times.predict(1000, 2.0) == predicted


@pytest.mark.parametrize("off", [20.0, 3.0, 0.05])
def test_a_first_answer_that_was_predicted_badly_says_little(off: float):
    """A worker that has measured nothing yet prices by guesses."""
    times, rng = AnswerTimes(), random.Random(7)
    for number in range(32):
        tokens, denoised_s = rng.choice([1024, 4096]), rng.uniform(0.3, 4.0)
        seconds = answer(1.3, 3e-4, tokens, denoised_s) * rng.uniform(0.9, 1.1)
        times.learn(tokens, denoised_s * (off if number == 0 else 1.0), seconds)
        if number >= 16:
            for edit in ((1024, 0.5), (4096, 0.5), (1024, 4.0)):
                assert times.predict(*edit) == pytest.approx(answer(1.3, 3e-4, *edit), rel=0.25)


@pytest.mark.parametrize("seed", range(20))
def test_no_answers_make_a_prediction_negative(seed: int):
    times, rng = AnswerTimes(), random.Random(seed)
    for _ in range(50):
        times.learn(rng.randint(1, 4096), rng.uniform(1e-4, 9.0), rng.uniform(1e-3, 9.0))
        assert times.predict(rng.randint(1, 4096), rng.uniform(0.0, 9.0)) >= 0.0


@pytest.mark.parametrize(
    ("status", "details", "blame"),
    [
        (Status.UNAVAILABLE, "Connection reset by peer", Blame.UNKNOWN),
        (Status.INTERNAL, "Stub process 'edit_0_0' is not healthy.", Blame.UNKNOWN),
        (Status.INTERNAL, "[ENGINE_FAILED] a denoising step failed", Blame.WORKER),
        (Status.UNAVAILABLE, "failed to connect to all addresses; last error: …", Blame.REFUSED),
        (Status.UNAVAILABLE, "in ensemble 'x', [OVERLOADED] draining", Blame.REFUSED),
        (Status.NOT_FOUND, "[TEMPLATE_NOT_FOUND] not here", Blame.REFUSED),
        (Status.NOT_FOUND, "[ADAPTER_NOT_FOUND] not here", Blame.REFUSED),
        (Status.NOT_FOUND, "Request for unknown model", Blame.REQUEST),
        (Status.INVALID_ARGUMENT, "[INVALID_REQUEST] MASK: no", Blame.REQUEST),
        (Status.UNIMPLEMENTED, "decoupled", Blame.REQUEST),
        (Status.UNAVAILABLE, "[DEADLINE_EXCEEDED] late", Blame.CLIENT),
        (Status.CANCELLED, "[CANCELLED] gone", Blame.CLIENT),
        (Status.DEADLINE_EXCEEDED, "Deadline Exceeded", Blame.CLIENT),
    ],
)
def test_whose_failure_it_is(status: Status, details: str, blame: Blame):
    assert Failure(status, details).blame is blame


class Answering:
    """A worker whose calls fail with this, or answer with metadata."""

    def __init__(self, failure: Failure | None) -> None:
        self.upstream, self.failure, self.calls = self, failure, 0

    async def call(self, method: str, request: bytes, timeout: float) -> bytes:
        self.calls += 1
        if self.failure is not None:
            raise self.failure
        return pb.ServerMetadataResponse(name="triton", extensions=["trace"]).SerializeToString()


@pytest.mark.parametrize(
    ("failures", "call_counts"),
    [
        ((Failure(Status.INTERNAL, "the stub has died"), None), [1, 1]),
        ((Failure(Status.UNAVAILABLE, "failed to connect"),) * 3 + (None,), [1, 1, 1, 1]),
        ((Failure(Status.UNAVAILABLE, "Socket closed"),) * 3, [1, 1, 0]),
        ((Failure(Status.UNIMPLEMENTED, "no such call"), None), [1, 0]),
    ],
)
async def test_metadata_come_from_another_worker_by_the_rule_of_edits(
    failures: tuple[Failure | None, ...], call_counts: list[int]
):
    workers = [Answering(failure) for failure in failures]
    calls = ServerCalls(SimpleNamespace(up=lambda: workers), ServedWorkflows())
    if failures[-1] is None and call_counts[-1]:
        assert (await calls.server_metadata()).name == "triton"
    else:
        with pytest.raises(Failure):
            await calls.server_metadata()
    assert [worker.calls for worker in workers] == call_counts


def test_statistics_are_summed_by_model():
    def one(count: int, last: int, name: str = "edit") -> pb.ModelStatisticsResponse:
        stats = pb.ModelStatistics(
            name=name, version="1", inference_count=count, last_inference=last
        )
        stats.inference_stats.success.count = count
        stats.inference_stats.success.ns = 10 * count
        stats.response_stats["0"].success.count = count
        return pb.ModelStatisticsResponse(model_stats=[stats])

    total = sum_statistics([one(2, 50), one(3, 40), one(9, 90, "denoiser")], ("edit",))
    (stats,) = total.model_stats
    assert (stats.inference_count, stats.last_inference) == (5, 50)
    assert (stats.inference_stats.success.count, stats.inference_stats.success.ns) == (5, 50)
    assert stats.response_stats["0"].success.count == 5
    model_stats = values_of(total)["model_stats"][0]
    assert model_stats["inference_stats"]["success"] == {"count": 5, "ns": 50}
    assert model_stats["last_inference"] == 50


ANYBODY = KeyHolder("anybody", 64, admin=True)
TENSORS = {"IMAGE": b"\x89PNG", "MASK": b"\xff\x00", "PROMPT": "é".encode(), "SETTINGS": b"{}"}


def binary_body(**request: object) -> tuple[bytes, int]:
    inputs = []
    tail = b""
    for name, value in TENSORS.items():
        raw = struct.pack("<I", len(value)) + value
        inputs.append(
            {
                "name": name,
                "datatype": "BYTES",
                "shape": [1],
                "parameters": {"binary_data_size": len(raw)},
            }
        )
        tail += raw
    head = msgspec.json.encode({"inputs": inputs, **request})
    return head + tail, len(head)


def test_the_binary_extension_there_and_back():
    body, head = binary_body(id="7", outputs=[{"name": "META"}], parameters={"a": 1, "b": "x"})
    message, requested_outputs = infer_request("edit", "1", body, head)
    assert [raw[4:] for raw in message.contents] == list(TENSORS.values())
    assert (message.head.id, message.head.model_version) == ("7", "1")
    assert (
        message.head.parameters["a"].int64_param,
        message.head.parameters["b"].string_param,
    ) == (1, "x")
    assert not requested_outputs.is_binary("META")
    call = make_edit_call(message, len(body), ANYBODY)
    assert (bytes(call.image), call.mask) == (TENSORS["IMAGE"], TENSORS["MASK"])
    response = pb.ModelInferResponse(model_name="edit", model_version="1", id="7")
    for name, value in (("IMAGE", b"\xff\xfe"), ("META", b'{"a":1}')):
        response.outputs.add(name=name, datatype="BYTES", shape=[1])
        response.raw_output_contents.append(struct.pack("<I", len(value)) + value)
    requested_outputs.binary["IMAGE"] = True
    parts, length = infer_response(response.SerializeToString(), requested_outputs)
    content = b"".join(parts)
    payload = msgspec.json.decode(content[:length])
    assert payload["outputs"][1]["data"] == ['{"a":1}']
    assert payload["outputs"][0]["parameters"] == {"binary_data_size": 6}
    assert content[length:] == struct.pack("<I", 2) + b"\xff\xfe"
    requested_outputs.binary["IMAGE"] = False
    with pytest.raises(InvalidRequest, match="output_encoding"):
        infer_response(response.SerializeToString(), requested_outputs)


@pytest.mark.parametrize(
    ("body", "head", "named"),
    [
        (b"[" * 100_000, None, "body"),
        (b'{"inputs":' + b"[" * 100_000, None, "body"),
        (b'{"x":' + b'{"x":' * 100_000, None, "body"),
        (b"\xff", None, "body"),
        (b"{}", None, "body"),
        (b'{"inputs":[]}', 99, "Inference-Header-Content-Length"),
        (b'{"inputs":[]}tail', 13, "body"),
        (b'{"inputs":[{"name":"A","datatype":"FP32","shape":[1],"data":[]}]}', None, "A.datatype"),
        (b'{"inputs":[{"name":"A","datatype":"BYTES","shape":[1]}]}', None, "A.data"),
        (b'{"inputs":[{"name":"A","datatype":"BYTES","shape":[1],"data":[1]}]}', None, "body"),
        (
            b'{"inputs":[{"name":"A","datatype":"BYTES","shape":[1],"parameters":'
            b'{"binary_data_size":5}}]}',
            None,
            "binary_data_size",
        ),
        (
            b'{"inputs":[{"name":"A","datatype":"BYTES","shape":[1],"parameters":'
            b'{"shared_memory_region":"x"}}]}',
            None,
            "A",
        ),
    ],
    ids=range(12),
)
def test_bodies_that_are_refused(body: bytes, head: int | None, named: str):
    with pytest.raises(InvalidRequest) as refused:
        infer_request("edit", "", body, head)
    assert refused.value.message.partition(":")[0].endswith(named)


def test_generate_makes_tensors_of_inputs_and_parameters_of_the_rest():
    body = b'{"id":"3","PROMPT":["p"],"MASK":"m","more":1.5,"parameters":{"x":true}}'
    message = generate_request("edit", "", body)
    assert {
        t.name: raw[4:] for t, raw in zip(message.head.inputs, message.contents, strict=True)
    } == {
        "PROMPT": b"p",
        "MASK": b"m",
    }
    assert message.head.id == "3"
    assert message.head.parameters["more"].double_param == 1.5
    assert message.head.parameters["x"].bool_param
    for bad in (b'{"PROMPT":1}', b'{"x":[1]}', b"[]", b'{"parameters":3}', b"{" * 100_000):
        with pytest.raises(InvalidRequest):
            generate_request("edit", "", bad)
    response = pb.ModelInferResponse(model_name="edit", model_version="1")
    response.outputs.add(name="META", datatype="BYTES", shape=[1])
    response.raw_output_contents.append(struct.pack("<I", 2) + b"{}")
    payload = msgspec.json.decode(
        generate_response(ModelAnswer.parse(response.SerializeToString()))
    )
    assert payload == {"model_name": "edit", "model_version": "1", "META": "{}"}


def message_of(tensors: dict[str, bytes], model: str = "edit") -> ModelRequest:
    message = ModelRequest(pb.ModelInferRequest(model_name=model))
    for name, value in tensors.items():
        message.add(name, [value])
    return message


def settings_of(encoded: bytes) -> dict[str, object]:
    message = pb.ModelInferRequest.FromString(encoded)
    names = [tensor.name for tensor in message.inputs]
    raw = message.raw_input_contents[names.index("SETTINGS")]
    settings: dict[str, object] = msgspec.json.decode(raw[4:])
    return settings


def test_a_second_try_is_the_same_edit_with_what_is_left_of_its_time():
    message = message_of({**TENSORS, "SETTINGS": b'{"deadline_ms":60000}'})
    call = make_edit_call(message, 1, ANYBODY)
    first = settings_of(call.encoded())
    call.arrival -= 10.0
    second = settings_of(call.encoded())
    assert first["seed"] == second["seed"] is not None
    assert first["request_id"] == second["request_id"] == call.request_id
    assert second["deadline_ms"] in range(49_000, 50_001)
    edit_call = make_edit_call(
        message_of({**TENSORS, "SETTINGS": b'{"seed":5,"request_id":"x"}'}), 1, ANYBODY
    )
    assert settings_of(edit_call.encoded()) == {"seed": 5, "request_id": "x"}
    with pytest.raises(InvalidRequest, match="has a part behind '~'"):
        make_edit_call(message_of({**TENSORS, "SETTINGS": b'{"request_id":"x~2"}'}), 1, ANYBODY)


def test_a_prompt_is_private_if_the_edit_or_its_key_says_so():
    for key_private, edit_private in ((False, False), (True, False), (False, True)):
        message = message_of(
            {**TENSORS, "SETTINGS": b'{"private_prompt":true}' if edit_private else b"{}"}
        )
        owner = KeyHolder("a", 1, admin=False, private_prompts=key_private)
        settings = make_edit_call(message, 1, owner).settings
        assert settings is not None
        assert settings.private_prompt == (key_private or edit_private)


def test_the_first_of_three_deadlines_counts():
    message = message_of({**TENSORS, "SETTINGS": b'{"deadline_ms":5000}'})
    assert make_edit_call(message_of(TENSORS), 1, ANYBODY).deadline is None
    call = make_edit_call(message, 1, ANYBODY, timeout=9.0)
    assert call.deadline == pytest.approx(call.arrival + 5.0)
    call = make_edit_call(message, 1, ANYBODY, timeout=2.0)
    assert call.deadline == pytest.approx(call.arrival + 2.0)
    for kind in ("int64_param", "uint64_param"):
        setattr(message.head.parameters["timeout"], kind, 1_000_000)  # KServe's, in microseconds
        call = make_edit_call(message, 1, ANYBODY, timeout=2.0)
        assert call.deadline == pytest.approx(call.arrival + 1.0)


def test_an_edit_that_may_be_late_is_due_and_has_no_deadline():
    late = b'{"deadline_ms":5000,"on_late":"finish"}'
    call = make_edit_call(message_of({**TENSORS, "SETTINGS": late}), 1, ANYBODY)
    assert (call.deadline, call.due_s) == (None, 5.0)
    assert settings_of(call.encoded())["deadline_ms"] in range(4_000, 5_001)
    call = make_edit_call(message_of({**TENSORS, "SETTINGS": late}), 1, ANYBODY, timeout=9.0)
    assert (call.deadline, call.due_s) == (pytest.approx(call.arrival + 9.0), 5.0)
    free = make_edit_call(message_of(TENSORS), 1, ANYBODY)
    assert free.due_s is None
    free.by_size_ms = 3000
    assert free.due_s == 3.0


def test_contents_that_are_not_raw_are_made_so():
    message = pb.ModelInferRequest(model_name="edit")
    for name, value in TENSORS.items():
        message.inputs.add(name=name, datatype="BYTES", shape=[1]).contents.bytes_contents.append(
            value
        )
    call = make_edit_call(parsed(message), 1, ANYBODY)
    assert call.mask == TENSORS["MASK"]
    assert "seed" in settings_of(call.encoded())
    message.raw_input_contents.append(b"")
    with pytest.raises(InvalidRequest, match="has 1 elements for 4 inputs"):
        check_request(parsed(message))
    message.raw_input_contents.extend([b""] * 3)
    with pytest.raises(InvalidRequest, match="both contents and raw_input_contents"):
        check_request(parsed(message))


@pytest.mark.parametrize(
    "tensors",
    [{}, {"IMAGE": b""}, {**TENSORS, "SETTINGS": b""}],
    ids=["none", "some", "empty settings"],
)
def test_requests_of_another_form_go_on_as_they_are(tensors: dict[str, bytes]):
    message = message_of(tensors)
    if len(tensors) == 4:
        message.contents[3] = b"\x09\0\0\0"  # says more than it has
    encoded_before = message.encoded()
    call = make_edit_call(message, 1, ANYBODY)
    assert call.settings is None
    assert call.encoded() == encoded_before


@pytest.mark.parametrize("name", ["priority", "timeout"])
def test_parameters_that_triton_refuses_in_its_own_words_are_told_in_ours(name: str):
    for kind, value, fine in (
        ("int64_param", 0, True),
        ("int64_param", 7, True),
        ("uint64_param", 7, True),
        ("int64_param", -1, False),
        ("string_param", "high", False),
        ("double_param", 1.5, False),
    ):
        message = message_of(TENSORS)
        setattr(message.head.parameters[name], kind, value)
        if fine:
            check_request(message)
            continue
        with pytest.raises(InvalidRequest, match=rf"parameters\.{name}: .*accepted: .*SETTINGS"):
            check_request(message)


def test_what_would_end_a_worker_or_is_not_for_clients_is_refused():
    with pytest.raises(InvalidRequest, match="ModelInferRequest"):
        parse_request(b"\xff\xff")
    with pytest.raises(InvalidRequest, match="edit_stream"):
        check_request(message_of(TENSORS, "denoiser"))
    message = message_of(TENSORS)
    message.head.outputs.add(name="META").parameters["classification"].int64_param = 1
    with pytest.raises(InvalidRequest, match="classification"):
        check_request(message)
    message = message_of(TENSORS)
    message.head.inputs[0].parameters["shared_memory_region"].string_param = "x"
    with pytest.raises(InvalidRequest, match="shared memory"):
        check_request(message)


def test_configuration_from_a_file_and_over_it(tmp_path: Path):
    file = tmp_path / "router.toml"
    file.write_text(
        'name = "front"\n[workers]\naddresses = ["a:1", "dns:b:2"]\n[limits]\nmax_pixels = 4096\n'
    )
    config = load_router_config(str(file), listen={"http_port": 0})
    assert config.workers.addresses == ("a:1", "dns:b:2")
    assert (config.name, config.limits.max_pixels, config.listen.http_port) == ("front", 4096, 0)
    assert load_router_config(None) == RouterConfig()


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[admission]\nmax_edit = 1", "max_edit"),
        ("[admission]\nmax_edits = 0", "[admission] max_edits: 0 is out of range; accepted: 1 to"),
        ('[workers]\naddresses = ["a"]', "addresses"),
        ('[routing]\npolicy = "best"', "policy"),
        ('[listen]\ntls_key = "x"', "tls_cert"),
        ("[limits]\nmax_pixels = 1", "max_pixels"),
        ('[[keys]]\nname = "a"\nsha256 = "short"', "keys"),
        (
            f'[admission]\nmax_bytes = 671088639\n[[keys]]\nname = "a"\nsha256 = "{"0" * 64}"',
            "[admission] max_bytes: 671088639 has no room for a key's largest body",
        ),
        ("[", "TOML"),
    ],
)
def test_configuration_that_is_refused_names_the_key(tmp_path: Path, text: str, named: str):
    file = tmp_path / "router.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=named.replace("[", r"\[")):
        load_router_config(str(file))


async def test_an_answers_body_does_not_wait_for_the_receipt_of_its_headers() -> None:
    async def done(request: Request) -> Response:
        return Response("done")

    server = HttpServer(Starlette(routes=[Route("/", done)]), Http(), 16, Metrics(), "127.0.0.1", 0)
    await server.start()
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(b"GET / HTTP/1.1\r\nhost: here\r\n\r\n")
        await reader.readuntil(b"done")
        (connection,) = server.server_state.connections
        connection_socket = connection.transport.get_extra_info("socket")
        assert connection_socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        writer.close()
    finally:
        await server.stop()
