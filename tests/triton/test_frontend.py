"""The fronts: one final answer per request, whatever happens behind them."""

from __future__ import annotations

import json
import math
import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from maskserve_common.config import Config, StagesConfig
from maskserve_common.contracts.keys import template_id
from maskserve_common.contracts.request import AcceptedEdit
from maskserve_common.contracts.semantics import REFERENCE
from maskserve_common.contracts.settings import EditSettings
from maskserve_common.contracts.status_record import NodeStatus, RowStatus
from maskserve_common.errors import Cancelled
from maskserve_common.files.stages import NO_ANSWER, StageOutages
from maskserve_common.files.values import ENCODING, MAKE, NO_VALUES, RUN
from maskserve_common.imaging.images import to_base64
from maskserve_engine.spec.model_spec import ModelSpec
from maskserve_triton import call as calls_module
from maskserve_triton.acks import AckReceiver
from maskserve_triton.admission import AdmissionState
from maskserve_triton.answer import Answer
from maskserve_triton.call import Calls
from maskserve_triton.cancels import Withdrawals, cancel_edit
from maskserve_triton.edit_front import EditFront
from maskserve_triton.templates import templates_of
from maskserve_triton.traffic import PROBE
from tests.fakes.model_specs import FILL_SPEC
from tests.fakes.pb_utils import (
    Call,
    FakeTriton,
    InferenceResponse,
    Request,
    Sender,
    failure,
    reply,
)
from tests.fakes.pictures import encode, scene
from tests.support.eventually import eventually

pytestmark = pytest.mark.usefixtures("beat")


def meta(event: str, step: int = 0) -> bytes:
    return json.dumps({"event": event, "step": step}).encode()


def final(call: Call) -> Iterator[InferenceResponse]:
    yield reply(EDITED=b"", META=meta("progress", 1))
    yield reply(EDITED=b"picture", META=meta("final", 4))


def edit(api: FakeTriton, settings: dict[str, Any] | bytes | None = None) -> Request:
    raw = settings if isinstance(settings, bytes) else json.dumps(settings or {}).encode()
    return api.request(IMAGE=b"image", MASK=b"mask", PROMPT=b"a red star", SETTINGS=raw)


def error_of(request: Request) -> tuple[str, int]:
    answer = request.sender.wait().error()
    assert answer is not None
    assert len(request.sender.sent) == 1
    return answer.message(), answer.code()


def becomes_idle(config: Config) -> bool:
    """Whether the count returns to zero: it does so just after the final answer is sent."""
    admission = AdmissionState(config.runtime_dir)
    end = time.monotonic() + 2
    while admission.in_flight() and time.monotonic() < end:
        time.sleep(0.001)
    return admission.in_flight() == 0


class Stuck:
    """A pipeline that does not answer until told to."""

    def __init__(self) -> None:
        self.release = threading.Event()
        self.started = threading.Event()

    def __call__(self, call: Call) -> Iterator[InferenceResponse]:
        self.started.set()
        assert self.release.wait(10)
        yield failure("in ensemble 'edit_pipeline', [CANCELLED] the edit was cancelled")


@pytest.fixture
def stuck() -> Iterator[Stuck]:
    pipeline = Stuck()
    yield pipeline
    pipeline.release.set()


@pytest.fixture
def fronts(api: FakeTriton, config: Config) -> Iterator[Callable[..., EditFront]]:
    all_fronts: list[EditFront] = []

    def make(name: str = "edit", spec: ModelSpec = FILL_SPEC, **options: Any) -> EditFront:
        streaming = name == "edit_stream"
        all_fronts.append(EditFront(api, config, spec, name, streaming=streaming, **options))
        return all_fronts[-1]

    yield make
    for front in all_fronts:
        front.close()


@pytest.fixture
def front(fronts: Callable[..., EditFront]) -> EditFront:
    return fronts()


def test_unary_sends_the_final_event_only(api: FakeTriton, front: EditFront) -> None:
    api.models["edit_pipeline"] = final
    request = edit(api)
    front.execute([request])
    assert request.sender.wait().text("IMAGE") == b"picture"
    assert len(request.sender.sent) == 1


def test_an_encoding_ends_with_the_encoder(api: FakeTriton, front: EditFront) -> None:
    def preprocess(call: Call) -> Iterator[InferenceResponse]:
        assert (call.parameters[RUN], call.parameters[ENCODING]) == ("r", MAKE)
        pixels, none = np.zeros((8, 8, 3), np.uint8), np.zeros((0, 0, 0, 3), np.uint8)
        request = json.dumps({"template_id": "t", "timings_ms": {}}).encode()
        arrays = {"EDIT_MASK": pixels[..., 0], "REFERENCES": np.zeros(0, np.uint8)}
        yield reply(PIXELS=pixels, CONTROLS=none, REQUEST=request, **arrays)

    def encoder(call: Call) -> Iterator[InferenceResponse]:
        yield reply(ENCODED=json.dumps({"ms": 2.5, "template": "made"}).encode())

    api.models |= {"preprocess": preprocess, "encoder": encoder}
    request = edit(api)
    request._parameters = json.dumps({RUN: "r", ENCODING: MAKE})
    front.execute([request])
    assert meta_of(request)["encoded"] == {"template": "made"}
    assert request.sender.wait().text("IMAGE") == b""
    assert not api.calls_of("edit_pipeline")


def answer_with(picture: bytes) -> Callable[[Call], Iterator[InferenceResponse]]:
    """A pipeline that ends with this picture."""

    def answer(call: Call) -> Iterator[InferenceResponse]:
        yield reply(EDITED=picture, META=meta("final", 4))

    return answer


def meta_of(request: Request) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(request.sender.wait().text("META"))
    return values


@pytest.mark.parametrize("text", [False, True])
def test_a_kept_result_is_a_template_of_the_client_and_is_primed(
    api: FakeTriton, config: Config, front: EditFront, text: bool
) -> None:
    source = scene(24, 40)
    picture = encode(source)
    api.models["edit_pipeline"] = answer_with(to_base64(picture) if text else picture)
    api.models["encoder"] = lambda call: iter([reply(MOMENTS=b"")])
    api.models["denoiser"] = lambda call: iter([reply(META=b'{"state": "priming"}')])
    request = edit(api, {"keep_result": True, "request_id": "k1!mine"})
    front.execute([request])
    name = template_id(source)
    assert meta_of(request)["result_template_id"] == name
    folder = templates_of(config, NO_VALUES)
    assert folder.get(name, "k1") == picture
    assert folder.get(name, "k2") is None
    assert folder.expires_s(name) is not None
    eventually("it is primed", lambda: api.calls_of("denoiser"))
    (call,) = api.calls_of("denoiser")
    operation = call.json("REQUEST")
    assert operation["op"] == "prime"
    assert json.loads(operation["request"])["template_id"] == name


def test_a_result_is_kept_when_asked_and_primed_when_the_cache_may_be_used(
    api: FakeTriton, config: Config, front: EditFront
) -> None:
    picture = encode(scene(24, 40))
    api.models["edit_pipeline"] = answer_with(picture)
    plain, uncached = edit(api), edit(api, {"keep_result": True, "cache": "off"})
    front.execute([plain])
    assert "result_template_id" not in meta_of(plain)
    assert templates_of(config, NO_VALUES).ids() == []
    front.execute([uncached])
    assert meta_of(uncached)["result_template_id"] == template_id(scene(24, 40))
    front.close()
    assert not api.calls_of("denoiser")


def test_a_result_that_cannot_be_kept_costs_the_edit_nothing(
    api: FakeTriton, config: Config
) -> None:
    limits = structs.replace(config.limits, max_result_bytes=10)
    small = structs.replace(config, limits=limits)
    front = EditFront(api, small, FILL_SPEC, "edit", streaming=False)
    api.models["edit_pipeline"] = answer_with(encode(scene(24, 40)))
    request = edit(api, {"keep_result": True})
    front.execute([request])
    assert meta_of(request)["result_template_id"] is None
    assert request.sender.sent[-1].text("IMAGE") == encode(scene(24, 40))
    front.close()


def test_a_result_whose_priming_fails_stays(
    api: FakeTriton, config: Config, front: EditFront
) -> None:
    api.models["edit_pipeline"] = answer_with(encode(scene(24, 40)))
    api.models["encoder"] = lambda call: iter([failure("[ENGINE_FAILED] no")])
    for _ in range(2):  # and its thread goes on
        request = edit(api, {"keep_result": True})
        front.execute([request])
        name = meta_of(request)["result_template_id"]
    assert templates_of(config, NO_VALUES).get(name) is not None
    eventually("both were tried", lambda: len(api.calls_of("encoder")) == 2)


def test_stream_sends_every_event_in_order(
    api: FakeTriton, fronts: Callable[..., EditFront]
) -> None:
    sent_events = [("progress", 1), ("progress", 2), ("preview", 2), ("progress", 4), ("final", 5)]

    def events(call: Call) -> Iterator[InferenceResponse]:
        for event, step in [*sent_events, ("progress", 5)]:  # the last is late: dropped
            yield reply(EDITED=event.encode(), META=meta(event, step))

    api.models["edit_pipeline"] = events
    request = edit(api, {"progress": True})
    fronts("edit_stream").execute([request])
    request.sender.wait()
    metas = [json.loads(response.text("META")) for response in request.sender.sent]
    assert [(meta["event"], meta["step"]) for meta in metas] == sent_events


class Arrived(threading.Semaphore):
    """Counts acks."""

    def acknowledge(self) -> None:
        self.release()

    def waits_s(self) -> float:
        return 0.0


@pytest.mark.parametrize("settings", [{"progress": True}, {"preview_every": 2}])
def test_a_stream_gives_a_receipt_for_each_response(
    api: FakeTriton, fronts: Callable[..., EditFront], config: Config, settings: dict[str, Any]
) -> None:
    """The pipeline sends the next only then."""
    acks = AckReceiver(config.runtime_dir)

    def events(call: Call) -> Iterator[InferenceResponse]:
        arrived = Arrived(0)
        acks.keep(call.parameters["acks"], arrived)
        for event, step in (("progress", 1), ("preview", 2), ("final", 3)):
            yield reply(EDITED=b"", META=meta(event, step))
            assert arrived.acquire(timeout=5)

    api.models["edit_pipeline"] = events
    request = edit(api, settings)
    fronts("edit_stream").execute([request])
    assert not request.sender.wait().has_error()
    assert len(request.sender.sent) == 3
    acks.close()


@pytest.mark.parametrize(
    ("name", "settings"), [("edit", {"progress": True, "preview_every": 2}), ("edit_stream", {})]
)
def test_of_a_single_response_there_are_no_acks(
    api: FakeTriton, fronts: Callable[..., EditFront], name: str, settings: dict[str, Any]
) -> None:
    api.models["edit_pipeline"] = final
    request = edit(api, settings)
    fronts(name).execute([request])
    request.sender.wait()
    assert "acks" not in api.calls_of("edit_pipeline")[0].parameters


def test_pipeline_gets_seed_and_id(api: FakeTriton, front: EditFront) -> None:
    api.models["edit_pipeline"] = final
    drawn, seeded_request = (
        edit(api),
        edit(api, {"seed": 7, "request_id": "mine", "progress": True}),
    )
    front.execute([drawn, seeded_request])
    drawn.sender.wait()
    seeded_request.sender.wait()
    first, second = sorted(
        (call.accepted() for call in api.calls_of("edit_pipeline")),
        key=lambda accepted: accepted.settings.request_id == "mine",
    )
    assert isinstance(first.settings.seed, int)
    assert len(first.settings.request_id) == 32
    assert abs(first.accepted_ns - time.time_ns()) < 60e9
    assert (second.prompt, second.settings.seed) == ("a red star", 7)
    assert not second.settings.progress  # nobody would see it of a unary edit


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (b"{", "[INVALID_REQUEST] SETTINGS: is not valid JSON"),
        ({"steps": 3}, "[INVALID_REQUEST] SETTINGS.steps: is not a known key"),
        ({"seed": -1}, "[INVALID_REQUEST] SETTINGS.seed: -1 is out of range"),
        ({"model": "other"}, "[INVALID_REQUEST] SETTINGS.model: is not served here"),
        ({"negative_prompt": "a"}, "[INVALID_REQUEST] SETTINGS.negative_prompt: cannot be used"),
    ],
)
def test_bad_settings_are_refused_at_once(
    api: FakeTriton, front: EditFront, settings: Any, message: str
) -> None:
    request = edit(api, settings)
    front.execute([request])
    text, code = error_of(request)
    assert text.startswith(message)
    assert code == api.TritonError.INVALID_ARG
    assert api.calls == []


@pytest.mark.parametrize("name", ["edit", "edit_stream"])
def test_the_pictures_that_came_decide_the_kind(
    api: FakeTriton, fronts: Callable[..., EditFront], name: str
) -> None:
    """An absent picture is an empty one."""
    kinds = frozenset({"inpaint", "edit", "generate"})
    spec = replace(FILL_SPEC, semantics=REFERENCE, edit_kinds=kinds)
    front = fronts(name, spec)
    api.models["edit_pipeline"] = final
    absent: dict[str, Any] = {}
    for pictures, kind in (
        ({"IMAGE": b"image", "MASK": b"mask"}, "inpaint"),
        ({"IMAGE": b"image", "MASK": b""}, "edit"),
        ({"IMAGE": b"image"}, "edit"),
        ({"IMAGE": b"", "MASK": b""}, "generate"),
        (absent, "generate"),
    ):
        request = api.request(PROMPT=b"a red star", SETTINGS=b"{}", **pictures)
        front.execute([request])
        request.sender.wait()
        call = api.calls[-1]
        assert call.accepted().kind == kind
        for tensor in ("IMAGE", "MASK"):
            assert list(call.tensors[tensor].as_numpy()) == [pictures.get(tensor, b"")]


@pytest.mark.parametrize(
    ("pictures", "settings", "message"),
    [
        ({"MASK": b"mask"}, {}, "IMAGE: is missing, and MASK needs a source"),
        ({}, {"expand": [8, 0, 0, 0]}, "IMAGE: is missing, and SETTINGS.expand needs a source"),
        ({"IMAGE": b"image"}, {}, "MASK: is missing: this model repaints masks only"),
        ({}, {}, "IMAGE: is missing: this model repaints masks only"),
        (
            {"IMAGE": np.array([b"a", b"b"], np.object_), "MASK": b"mask"},
            {},
            "IMAGE: has 2 pictures; accepted: one",
        ),
        ({"IMAGE": b"image", "MASK": b"mask"}, {"size": "64x64"}, "SETTINGS.size: has no effect"),
    ],
)
def test_a_kind_that_the_model_lacks_is_refused_at_once(
    api: FakeTriton,
    front: EditFront,
    pictures: dict[str, Any],
    settings: dict[str, Any],
    message: str,
) -> None:
    raw = json.dumps(settings).encode()
    request = api.request(PROMPT=b"a red star", SETTINGS=raw, **pictures)
    front.execute([request])
    text, code = error_of(request)
    assert text.startswith(f"[INVALID_REQUEST] {message}")
    assert code == api.TritonError.INVALID_ARG
    assert api.calls == []


def test_a_missing_tensor_is_named(api: FakeTriton, front: EditFront) -> None:
    request = api.request(IMAGE=b"", MASK=b"", SETTINGS=b"{}")
    front.execute([request])
    assert error_of(request)[0].startswith("[INVALID_REQUEST] PROMPT: is missing")


@pytest.mark.parametrize(
    ("raised", "message", "code"),
    [
        (
            "in ensemble 'edit_pipeline', [INVALID_REQUEST] MASK: is empty; accepted: PNG",
            "[INVALID_REQUEST] MASK: is empty; accepted: PNG",
            "INVALID_ARG",
        ),
        (
            "in ensemble 'edit_pipeline', [OVERLOADED] 256 edits are waiting already",
            "[OVERLOADED] 256 edits are waiting already",
            "UNAVAILABLE",
        ),
        (
            "Stub process 'decoder_0_0' is not healthy.",
            "[ENGINE_FAILED] internal error (request mine)",
            "INTERNAL",
        ),
        (
            "in ensemble 'edit_pipeline', Failed to increase the shared memory pool size for key "
            "'triton_python_backend_shm_region_3' to 67108864 bytes. No space left on device",
            "[OVERLOADED] the worker has no room in shared memory for the request",
            "UNAVAILABLE",
        ),
        (
            "Failed to process the request(s): ValueError: boom\n\nAt:\n  /x/model.py(3): execute",
            "[ENGINE_FAILED] internal error (request mine)",
            "INTERNAL",
        ),
    ],
)
def test_errors_arrive_clean(
    api: FakeTriton, front: EditFront, raised: str, message: str, code: str
) -> None:
    api.models["edit_pipeline"] = lambda call: [failure(raised)]
    request = edit(api, {"request_id": "mine"})
    front.execute([request])
    assert error_of(request) == (message, getattr(api.TritonError, code))


def test_an_id_is_free_once_it_is_answered(api: FakeTriton, front: EditFront) -> None:
    """Though the pipeline has not ended yet: its last, empty response is still to come."""
    release = threading.Event()

    def lingering(call: Call) -> Iterator[InferenceResponse]:
        yield from final(call)
        assert release.wait(10)

    api.models["edit_pipeline"] = lingering
    first, second = (edit(api, {"request_id": "again"}) for _ in range(2))
    front.execute([first])
    assert not first.sender.wait().has_error()
    front.execute([second])
    assert not second.sender.wait().has_error()
    release.set()


def test_a_failed_event_is_the_answer(api: FakeTriton, fronts: Callable[..., EditFront]) -> None:
    def events(call: Call) -> Iterator[InferenceResponse]:
        yield reply(EDITED=b"", META=meta("progress", 1))
        failed = {"event": "failed", "step": 0, "steps": 0, "error": "[CANCELLED] by somebody"}
        yield reply(EDITED=b"", META=json.dumps(failed).encode())
        yield reply(EDITED=b"", META=b"")  # what carries Triton's final flag

    api.models["edit_pipeline"] = events
    request = edit(api, {"progress": True})
    fronts("edit_stream").execute([request])
    error = request.sender.wait().error()
    assert error is not None
    assert (error.message(), error.code()) == ("[CANCELLED] by somebody", api.TritonError.CANCELLED)


def test_a_preview_that_fails_costs_the_edit_nothing(
    api: FakeTriton, fronts: Callable[..., EditFront]
) -> None:
    def events(call: Call) -> Iterator[InferenceResponse]:
        failed = {"event": "failed", "step": 0, "steps": 0, "error": "[ENGINE_FAILED] no memory"}
        yield reply(EDITED=b"", META=json.dumps(failed).encode())
        yield reply(EDITED=b"picture", META=meta("final", 4))

    api.models["edit_pipeline"] = events
    request = edit(api, {"preview_every": 2})
    fronts("edit_stream").execute([request])
    assert request.sender.wait().text("IMAGE") == b"picture"
    assert len(request.sender.sent) == 1


def test_a_surprise_in_the_front_is_hidden(api: FakeTriton, front: EditFront) -> None:
    def broken(call: Call) -> Iterator[InferenceResponse]:
        raise RuntimeError("secret")

    api.models["edit_pipeline"] = broken
    request = edit(api, {"request_id": "mine"})
    front.execute([request])
    assert error_of(request)[0] == "[ENGINE_FAILED] internal error (request mine)"


def test_a_pipeline_without_answer_is_an_error(api: FakeTriton, front: EditFront) -> None:
    api.models["edit_pipeline"] = lambda call: []
    request = edit(api)
    front.execute([request])
    assert error_of(request)[0] == "[ENGINE_FAILED] the pipeline ended without an answer"


def test_a_cancel_answers_and_frees_the_row(
    api: FakeTriton, front: EditFront, stuck: Stuck
) -> None:
    api.models["edit_pipeline"] = stuck
    cancel_results = iter(
        [False, False, True]
    )  # the edit reaches the denoiser only at the third try
    finished_event = threading.Event()

    def denoiser(call: Call) -> Iterator[InferenceResponse]:
        cancelled = next(cancel_results)
        if cancelled:
            stuck.release.set()
            finished_event.set()
        yield reply(META=json.dumps({"cancelled": cancelled}).encode())

    api.models["denoiser"] = denoiser
    request = edit(api, {"request_id": "mine"})
    front.execute([request])
    assert stuck.started.wait(60)
    request.sender.cancel.set()
    text, code = error_of(request)
    assert text == "[CANCELLED] the client cancelled the request"
    assert code == api.TritonError.CANCELLED
    assert finished_event.wait(60), "the denoiser was not told until it knew the edit"
    assert {call.json("REQUEST")["request_id"] for call in api.calls_of("denoiser")} == {"mine"}


def test_an_edit_is_known_by_its_id_from_acceptance_to_answer(
    api: FakeTriton, config: Config, front: EditFront, stuck: Stuck
) -> None:
    """The engine does not know it yet: it is being prepared or encoded."""
    freed_event = threading.Event()

    def denoiser(call: Call) -> Iterator[InferenceResponse]:
        freed_event.set()
        yield reply(META=b"{}")

    api.models["denoiser"] = denoiser
    api.models["edit_pipeline"] = stuck
    assert not cancel_edit(config.runtime_dir, "mine")
    request = edit(api, {"request_id": "mine"})
    front.execute([request])
    assert cancel_edit(config.runtime_dir, "mine")
    assert error_of(request)[0] == "[CANCELLED] the edit was cancelled"
    assert freed_event.wait(60), "its row is not freed"
    assert not cancel_edit(config.runtime_dir, "mine")  # answered, though the pipeline goes on
    stuck.release.set()


def test_of_many_cancels_one_is_true_and_its_edit_is_cancelled(
    api: FakeTriton, config: Config, front: EditFront
) -> None:
    api.models["denoiser"] = lambda call: [reply(META=b"{}")]
    api.models["edit_pipeline"] = final
    for number in range(50):
        request = edit(api, {"request_id": f"{number}"})
        with ThreadPoolExecutor(4) as pool:
            front.execute([request])
            won = list(pool.map(cancel_edit, [config.runtime_dir] * 4, [f"{number}"] * 4))
        answer = request.sender.wait()
        assert sum(won) == (answer.error() is not None)


@pytest.mark.parametrize(
    ("settings", "timeout_us", "name"),
    [
        ({}, 29_500, "timeout: 30 ms"),
        ({"deadline_ms": 60_000}, 29_500, "timeout: 30 ms"),
        ({"deadline_ms": 30}, 60_000_000, "SETTINGS.deadline_ms: 30 ms"),
        ({"deadline_ms": 30}, 2**63 - 1, "SETTINGS.deadline_ms: 30 ms"),
    ],
)
def test_the_shorter_of_timeout_and_deadline_is_kept(
    api: FakeTriton,
    front: EditFront,
    stuck: Stuck,
    settings: dict[str, Any],
    timeout_us: int,
    name: str,
) -> None:
    api.models["edit_pipeline"] = stuck
    api.models["denoiser"] = lambda call: [reply(META=b"{}")]
    request = edit(api, settings)
    request.timeout_us = timeout_us
    front.execute([request])
    text, _ = error_of(request)
    assert text == f"[DEADLINE_EXCEEDED] {name} passed before the edit was done"


def test_a_deadline_is_kept_by_the_front(api: FakeTriton, front: EditFront, stuck: Stuck) -> None:
    api.models["edit_pipeline"] = stuck
    api.models["denoiser"] = lambda call: [reply(META=b"{}")]
    request = edit(api, {"deadline_ms": 30})
    front.execute([request])
    text, code = error_of(request)
    assert text.startswith("[DEADLINE_EXCEEDED] SETTINGS.deadline_ms: 30 ms passed")
    assert code == api.TritonError.UNAVAILABLE


def test_a_silent_engine_is_noticed(api: FakeTriton, config: Config, stuck: Stuck) -> None:
    engine = structs.replace(config.engine, heartbeat_timeout_s=1.0)
    front = EditFront(
        api, structs.replace(config, engine=engine), FILL_SPEC, "edit", streaming=False
    )
    api.models["edit_pipeline"] = stuck  # and nobody writes the record any more
    request = edit(api)
    front.execute([request])
    match = re.match(
        r"\[ENGINE_FAILED\] the engine has been silent for ([\d.]+) s", error_of(request)[0]
    )
    assert match is not None
    assert float(match[1]) >= 1.0
    late = edit(api)
    front.execute([late])
    assert error_of(late)[0].startswith("[ENGINE_FAILED] the engine has been silent")
    front.close()


def test_an_edit_that_triton_loses_is_answered(
    api: FakeTriton,
    fronts: Callable[..., EditFront],
    stuck: Stuck,
    beat: Callable[..., None],
) -> None:
    """Once the engine has been seen to hold it and holds it no more."""
    front = fronts(lost_s=0.5)
    api.models["edit_pipeline"] = stuck
    lost, encoding = edit(api, {"request_id": "lost"}), edit(api, {"request_id": "encoding"})
    front.execute([lost, encoding])
    row = RowStatus("lost", "dense", active_tokens=4, total_tokens=4, steps_left=2)
    for rows in ([row] * 8, [None] * 7):
        for running_row in rows:
            beat(running=(row,) if running_row else ())
            time.sleep(0.1)
            assert not lost.sender.finished.is_set() or running_row is None
    assert error_of(lost)[0] == "[ENGINE_FAILED] the edit was lost on its way back from the engine"
    assert not encoding.sender.finished.is_set()
    stuck.release.set()
    encoding.sender.wait()


def test_a_failed_engine_is_noticed(
    api: FakeTriton, front: EditFront, stuck: Stuck, beat: Callable[..., None]
) -> None:
    api.models["edit_pipeline"] = stuck
    request = edit(api)
    front.execute([request])
    beat(state="failed")
    assert error_of(request)[0] == "[ENGINE_FAILED] the engine has failed"


def test_a_failed_node_is_named(
    api: FakeTriton, front: EditFront, stuck: Stuck, beat: Callable[..., None]
) -> None:
    api.models["edit_pipeline"] = stuck
    request = edit(api)
    front.execute([request])
    beat(nodes=(NodeStatus("upscaler", "big", "failed"),))
    assert error_of(request)[0] == "[ENGINE_FAILED] the upscaler (big) has failed"


def test_no_edit_is_taken_while_the_stage_service_is_away(
    api: FakeTriton, config: Config, beat: Callable[..., None]
) -> None:
    served = structs.replace(config, stages=StagesConfig(service="127.0.0.1:1"))
    away = StageOutages(served)
    front = EditFront(api, served, FILL_SPEC, "edit", streaming=False)
    try:
        away.mark("encoder", {"127.0.0.1:1": "loading"})
        refused, accepted = edit(api), edit(api)
        front.execute([refused])
        text, code = error_of(refused)
        assert (text, code) == (f"[OVERLOADED] {NO_ANSWER}", api.TritonError.UNAVAILABLE)
        away.mark("encoder", {"127.0.0.1:1": "ready"})
        api.models["edit_pipeline"] = final
        front.execute([accepted])
        assert accepted.sender.wait().text("IMAGE") == b"picture"
    finally:
        front.close()


def test_draining_refuses_new_edits_and_finishes_old_ones(
    api: FakeTriton, config: Config, front: EditFront
) -> None:
    go, admission = threading.Event(), AdmissionState(config.runtime_dir)

    def slow(call: Call) -> Iterator[InferenceResponse]:
        assert go.wait(60)
        yield from final(call)

    api.models["edit_pipeline"] = slow
    old, new = edit(api), edit(api)
    front.execute([old])
    assert admission.in_flight() == 1
    admission.drain()
    front.execute([new])
    text, code = error_of(new)
    assert text.startswith("[OVERLOADED] the worker is draining")
    assert code == api.TritonError.UNAVAILABLE
    assert admission.in_flight() == 1
    go.set()
    assert old.sender.wait().text("IMAGE") == b"picture"
    assert becomes_idle(config)


def test_past_the_grace_the_rest_is_refused(
    api: FakeTriton, config: Config, front: EditFront, stuck: Stuck
) -> None:
    api.models["edit_pipeline"] = stuck
    request = edit(api)
    front.execute([request])
    AdmissionState(config.runtime_dir).stop()
    assert error_of(request)[0].startswith("[OVERLOADED] the worker is stopping")
    assert becomes_idle(config)


def test_an_id_in_flight_is_refused(api: FakeTriton, front: EditFront, stuck: Stuck) -> None:
    api.models["edit_pipeline"] = stuck
    first, second = edit(api, {"request_id": "mine"}), edit(api, {"request_id": "mine"})
    front.execute([first, second])
    assert error_of(second)[0].startswith("[INVALID_REQUEST] SETTINGS.request_id: names an edit")
    stuck.release.set()
    first.sender.wait()


def test_many_edits_and_cancels_end_once_each(
    api: FakeTriton, config: Config, front: EditFront
) -> None:
    """More edits than threads, some cancelled at any moment; `api` checks for misuse."""

    def quick(call: Call) -> Iterator[InferenceResponse]:
        time.sleep(0.01)
        yield from final(call)

    api.models["edit_pipeline"] = quick
    api.models["denoiser"] = lambda call: [reply(META=b"{}")]
    requests = [edit(api) for _ in range(120)]
    for number, request in enumerate(requests):
        front.execute([request])
        if number % 3 == 0:
            request.sender.cancel.set()
    for request in requests:
        request.sender.wait()
        assert len(request.sender.sent) == 1
    assert becomes_idle(config)


def test_closing_answers_what_is_in_flight(
    api: FakeTriton, fronts: Callable[..., EditFront], stuck: Stuck
) -> None:
    api.models["edit_pipeline"] = stuck
    front = fronts("edit")
    request = edit(api)
    front.execute([request])
    front.close()
    assert error_of(request)[0] == "[OVERLOADED] the worker is stopping"


def test_a_late_cancel_spares_the_next_edit_of_the_same_id(api: FakeTriton, config: Config) -> None:
    cancelled: list[str] = []

    def denoiser(call: Call) -> Iterator[InferenceResponse]:
        cancelled.append(call.json("REQUEST")["request_id"])
        yield reply(META=b"{}")

    api.models["denoiser"] = denoiser
    calls, late, running = Calls(), call_named(api, "mine"), call_named(api, "mine")
    withdrawals = Withdrawals(api, config.runtime_dir, "edit", calls)
    calls.add(running)
    assert withdrawals.withdraw(late, Cancelled("late"))  # of an edit that had the id before
    assert withdrawals.withdraw(running, Cancelled("in time"))
    eventually("the running one's row is freed", lambda: cancelled)
    calls.remove(running)
    for _ in range(10):  # both have ended: nobody is told of them any more
        withdrawals.repeat(math.inf)
        time.sleep(0.01)
    assert cancelled == ["mine"] * len(cancelled)
    assert len(cancelled) <= 2
    withdrawals.close()


def test_a_cancel_ends_all_tries_of_an_edit(api: FakeTriton, config: Config) -> None:
    """A router that gave the worker up has sent the edit again when that came back."""
    api.models["denoiser"] = lambda call: [reply(META=b"{}")]
    calls, tries = Calls(), [call_named(api, name) for name in ("k1!mine", "k1!mine~2")]
    other_call = call_named(api, "k2!mine~2")
    for call in (*tries, other_call):
        calls.add(call)
    withdrawals = Withdrawals(api, config.runtime_dir, "edit", calls)
    assert withdrawals.withdraw_by_id("k1!mine")
    assert [call.answer.done for call in (*tries, other_call)] == [True, True, False]
    assert not withdrawals.withdraw_by_id("k1!mine~2")
    withdrawals.close()


def test_an_edit_that_cannot_be_answered_holds_up_no_other_withdrawal(
    api: FakeTriton, config: Config
) -> None:
    """Triton may keep a thread that sends for as long as it likes."""
    sending, goes_on = threading.Event(), threading.Event()

    def slow(response: InferenceResponse | None = None, flags: int = 0) -> None:
        sending.set()
        assert goes_on.wait(10)

    api.models["denoiser"] = lambda call: [reply(META=b"{}")]
    withdrawals = Withdrawals(api, config.runtime_dir, "edit", Calls())
    first, second = call_named(api, "a", slow), call_named(api, "b")
    with ThreadPoolExecutor(2) as pool:
        future = pool.submit(withdrawals.withdraw, first, Cancelled("first"))
        assert sending.wait(60)
        try:
            assert pool.submit(withdrawals.withdraw, second, Cancelled("second")).result(5)
        finally:
            goes_on.set()
        assert future.result(5)
    withdrawals.close()


def call_named(
    api: FakeTriton, name: str, send: Callable[..., None] | None = None
) -> calls_module.Call:
    sender = Sender(api.violations)
    if send is not None:
        sender.send = send  # type: ignore[method-assign]
    accepted = AcceptedEdit("", EditSettings(request_id=name), 0)
    return calls_module.Call(accepted, {}, Answer(api, sender))


def probe(api: FakeTriton) -> Request:
    request = edit(api)
    request._parameters = json.dumps({PROBE: "1"})
    return request


def test_a_probe_is_answered_beside_stuck_edits_and_is_none(
    api: FakeTriton, front: EditFront, stuck: Stuck, config: Config
) -> None:
    api.models["edit_pipeline"] = stuck
    request, probe_request = edit(api), probe(api)
    front.execute([request, probe_request])
    assert not probe_request.sender.wait().has_error()
    assert AdmissionState(config.runtime_dir).in_flight() == 1
    assert len(api.calls_of("edit_pipeline")) <= 1
    stuck.release.set()
    request.sender.wait()
    assert becomes_idle(config)


def test_parameters_that_are_no_text_make_no_probe(api: FakeTriton, front: EditFront) -> None:
    api.models["edit_pipeline"] = final
    request = edit(api)
    request._parameters = "{"
    front.execute([request])
    assert not request.sender.wait().has_error()


def test_edits_that_get_stuck_are_answered_and_probes_say_so(
    api: FakeTriton, config: Config, stuck: Stuck, beat: Callable[..., None]
) -> None:
    """Once they come through again the front takes edits again."""
    engine = structs.replace(config.engine, heartbeat_timeout_s=1.0, stuck_timeout_s=1.2)
    front = EditFront(
        api, structs.replace(config, engine=engine), FILL_SPEC, "edit", streaming=False
    )
    api.models["edit_pipeline"] = stuck
    request, early = edit(api), probe(api)
    front.execute([request, early])
    assert not early.sender.wait().has_error()
    eventually("it is noticed", lambda: beat() or request.sender.finished.is_set())
    match = re.match(
        r"\[ENGINE_FAILED\] edits are stuck before the engine, for ([\d.]+) s", error_of(request)[0]
    )
    assert match is not None
    assert float(match[1]) >= 1.2
    late, refused = probe(api), edit(api)
    front.execute([late, refused])
    assert error_of(late)[0].startswith("[ENGINE_FAILED] edits are stuck before the engine")
    assert error_of(refused)[0].startswith("[ENGINE_FAILED] edits are stuck before the engine")
    stuck.release.set()
    api.models["edit_pipeline"] = final

    def served() -> bool:
        beat()
        later_request = edit(api)
        front.execute([later_request])
        return not later_request.sender.wait().has_error()

    eventually("it serves again", served)
    front.close()


def test_one_answer_that_cannot_be_sent_holds_up_no_other_edits_cancel(
    api: FakeTriton, fronts: Callable[..., EditFront], stuck: Stuck, beat: Callable[..., None]
) -> None:
    """Triton may keep a thread that sends for as long as it likes."""
    sending, goes_on = threading.Event(), threading.Event()

    def slow(response: InferenceResponse | None = None, flags: int = 0) -> None:
        sending.set()
        assert goes_on.wait(10)

    def pipeline(call: Call) -> Iterator[InferenceResponse]:
        name = call.accepted().settings.request_id
        return iter((reply(EDITED=b"", META=meta("progress", 1)),)) if name == "a" else stuck(call)

    api.models |= {"edit_pipeline": pipeline, "denoiser": lambda call: [reply(META=b"{}")]}
    front = fronts("edit_stream")
    first = edit(api, {"request_id": "a", "progress": True})
    second = edit(api, {"request_id": "b"})
    first.sender.send = slow  # type: ignore[method-assign]
    front.execute([first, second])
    assert sending.wait(60)
    second.sender.cancel.set()
    try:
        assert "[CANCELLED]" in error_of(second)[0]
    finally:
        goes_on.set()


def slo_counts(front: EditFront) -> dict[str, float]:
    counts: dict[str, float] = {}
    for name, value, labels in front._observations.take():
        if name == "slo_total":
            counts[labels[1]] = counts.get(labels[1], 0.0) + value
    return counts


def test_an_answer_says_how_it_stands_to_its_due_time(api: FakeTriton, front: EditFront) -> None:
    accepted_edits: list[AcceptedEdit] = []

    def answers(call: Call) -> Iterator[InferenceResponse]:
        accepted_edits.append(call.accepted())
        time.sleep(0.005)
        due_ms = accepted_edits[-1].due_ms
        final_meta = {
            "event": "final",
            "step": 1,
            "total_tokens": 4,
            "timings_ms": {"denoise": 0.0},
        }
        yield reply(
            EDITED=b"",
            META=json.dumps(final_meta | ({"due_ms": due_ms} if due_ms else {})).encode(),
        )

    api.models["edit_pipeline"] = answers
    metas = []
    for settings in ({"deadline_ms": 60_000}, {"deadline_ms": 1, "on_late": "finish"}, {}):
        request = edit(api, settings)
        front.execute([request])
        metas.append(json.loads(request.sender.wait().text("META")))
    met, late, free = metas
    assert (met["due_ms"], met["slo"], late["slo"]) == (60_000, "met", "late")
    assert 0 < met["slack_ms"] < 60_000
    assert late["slack_ms"] < 0
    assert not {"due_ms", "slack_ms", "slo"} & set(free)
    eventually("they are counted", lambda: len(front._observations._queue) >= 8)
    assert slo_counts(front) == {"met": 1, "late": 1}
    # The next edit is told how long the last ones took behind their steps.
    assert accepted_edits[0].after_token_s == 0.0 < accepted_edits[2].after_token_s
    assert [accepted.settings.deadline_ms for accepted in accepted_edits] == [60_000, None, None]


def test_a_refusal_is_a_miss_and_a_mistake_is_not(
    api: FakeTriton, front: EditFront, config: Config
) -> None:
    for text in ("[OVERLOADED] full", "[DEADLINE_EXCEEDED] never", "[ENGINE_FAILED] no", "boom",
                 "[INVALID_REQUEST] MASK: is empty", "[CANCELLED] by its client"):  # fmt: skip
        api.models["edit_pipeline"] = lambda call, text=text: [failure(text)]
        request = edit(api, {"deadline_ms": 60_000})
        front.execute([request])
        error_of(request)
    refused = edit(api, {"deadline_ms": 60_000, "seed": -1})
    front.execute([refused])
    error_of(refused)
    AdmissionState(config.runtime_dir).drain()
    drained = edit(api, {"deadline_ms": 60_000})
    front.execute([drained])
    error_of(drained)
    assert becomes_idle(config)
    eventually("all are counted", lambda: len(front._observations._queue) >= 8 + 5)
    assert slo_counts(front) == {"refused": 2, "deadline": 1, "failed": 2}
