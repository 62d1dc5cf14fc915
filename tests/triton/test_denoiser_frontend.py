"""The denoiser's frontend: jobs in, every event out, one final answer each."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pytest

from maskserve_common.config import Config
from maskserve_common.contracts.meta import TIMINGS
from maskserve_common.errors import Cancelled, Overloaded
from maskserve_engine.base.job import (
    Conditioning,
    EditJob,
    Failed,
    FinalEvent,
    PreviewEvent,
    ProgressEvent,
    Sink,
)
from maskserve_engine.families.registry import load_encoder
from maskserve_engine.stages.encoded import pack_conditioning
from maskserve_triton.acks import AckSender
from maskserve_triton.denoiser import DenoiserFrontend
from tests.fakes.jobs import config_of
from tests.fakes.pb_utils import FakeTriton, Request
from tests.fakes.scripted_engine import EDIT, ScriptedEngine, tensors
from tests.support.engines import job, make_engine
from tests.support.eventually import eventually


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine()


@pytest.fixture
def frontend(api: FakeTriton, config: Config, engine: ScriptedEngine) -> Iterator[DenoiserFrontend]:
    reception = DenoiserFrontend(api, engine, config)
    yield reception
    reception.close()


def submit(api: FakeTriton, frontend: DenoiserFrontend, **changed: Any) -> Request:
    inputs = {**tensors(), **changed}
    request = api.request(**{name: value for name, value in inputs.items() if value is not None})
    frontend.execute([request])
    return request


def test_the_job_is_a_copy(
    api: FakeTriton, frontend: DenoiserFrontend, engine: ScriptedEngine
) -> None:
    moments = np.ones((8, 16, 12), np.float32)
    submit(api, frontend, MOMENTS=moments)
    moments[:] = 5  # Triton reuses its memory once execute has returned
    job, _ = engine.jobs[0]
    assert job.request == EDIT
    assert (job.moments == 1).all()
    assert job.masked_moments.size == 0
    assert job.edit_mask.shape == (64, 48)


def test_a_second_prompt_is_the_negative_one(
    api: FakeTriton, frontend: DenoiserFrontend, engine: ScriptedEngine
) -> None:
    def conditioning_of(value: float) -> Conditioning:
        states = np.full((4, 32), value, np.float32)
        return {"prompt_embeds": states, "pooled": states[0]}

    submit(api, frontend)
    submit(api, frontend, CONDITIONING=pack_conditioning(conditioning_of(0), conditioning_of(1)))
    (plain, _), (led, _) = engine.jobs
    assert plain.negative is None
    assert led.negative is not None
    assert (led.conditioning["prompt_embeds"] == 0).all()
    assert (led.negative["prompt_embeds"] == 1).all()
    assert (led.negative["pooled"] == 1).all()


def test_every_event_is_sent(
    api: FakeTriton, frontend: DenoiserFrontend, engine: ScriptedEngine
) -> None:
    request = submit(api, frontend)
    _, sink = engine.jobs[0]
    latents = np.full((4, 16, 12), 3, np.float32)
    sink(ProgressEvent(1, 3))
    sink(PreviewEvent(2, 3, latents))
    sink(
        FinalEvent(latents, {"step": 3, "steps": 3, "timings_ms": {"denoise": 9.0}, "cache": "off"})
    )
    request.sender.wait()
    progress, preview, final = request.sender.sent

    def carried(response: Any) -> list[int]:
        return api.get_output_tensor_by_name(response, "CONTEXT").as_numpy().tolist()

    assert json.loads(progress.text("META")) == {
        "event": "progress", "step": 1, "steps": 3, "request_id": "mine",
    }  # fmt: skip
    assert api.get_output_tensor_by_name(progress, "LATENTS").as_numpy().size == 0
    assert carried(progress) == []
    assert json.loads(preview.text("META"))["event"] == "preview"
    assert carried(preview) == carried(final) == [0, 1, 2, 3, 4]
    meta = json.loads(final.text("META"))
    assert (meta["event"], meta["seed"], meta["worker"]) == ("final", 7, "worker-0")
    assert set(meta["timings_ms"]) == set(TIMINGS)
    assert meta["timings_ms"]["preprocess"] == 1.5
    assert meta["timings_ms"]["encode"] == 2.5
    assert meta["timings_ms"]["denoise"] == 9.0


def test_the_stages_of_an_edit_add_up(
    api: FakeTriton, config: Config, tiny_fill: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind a real engine: what it takes to prepare the edit is in one, and in the next how long
    the engine's thread is busy when it comes.
    """
    encoder, pause_s = load_encoder(config_of(tiny_fill)), 0.05
    engine, gate = make_engine(tiny_fill, encoder), Event()
    prepare = engine.adapter.prepare

    def slowly(edit: EditJob) -> EditJob:
        time.sleep(pause_s)
        return prepare(edit)

    monkeypatch.setattr(engine.adapter, "prepare", slowly)
    edit = job(encoder, 0, "edit", num_inference_steps=4, cache="off")
    begin = time.monotonic()
    reception = DenoiserFrontend(api, engine, config)
    try:
        busy = engine.ask(gate.wait)
        request = submit(
            api,
            reception,
            REQUEST=edit.request.to_json(),
            EDIT_MASK=edit.edit_mask,
            MOMENTS=edit.moments,
            MASKED_MOMENTS=edit.masked_moments,
            CONDITIONING=pack_conditioning(edit.conditioning, None),
        )
        time.sleep(pause_s)
        gate.set()
        busy.result(30)
        request.sender.wait()
    finally:
        engine.close(5.0)
        reception.close()
    taken_ms = 1e3 * (time.monotonic() - begin)
    timings = json.loads(request.sender.sent[-1].text("META"))["timings_ms"]
    prepare_ms, queue_ms, denoise_ms = (timings[s] for s in ("prepare", "queue", "denoise"))
    assert min(prepare_ms, queue_ms) >= 1e3 * pause_s
    assert denoise_ms > 0
    assert prepare_ms + queue_ms + denoise_ms < taken_ms


def test_with_receipts_an_event_waits_for_that_of_the_last(
    api: FakeTriton, config: Config, frontend: DenoiserFrontend, engine: ScriptedEngine
) -> None:
    acks = AckSender(config.runtime_dir)
    request = api.request(parameters=json.dumps({"acks": acks.key}), **tensors())
    frontend.execute([request])
    _, sink = engine.jobs[0]
    sink(ProgressEvent(1, 3))
    sink(ProgressEvent(2, 3))
    sink(Failed(Cancelled("the edit was cancelled")))
    assert len(request.sender.sent) == 1
    for _ in range(2):
        assert not request.sender.finished.is_set()
        acks.acknowledge()
        eventually("it is sent", lambda: len(request.sender.sent) == 2)
    request.sender.wait()
    events = [json.loads(response.text("META"))["event"] for response in request.sender.sent]
    assert events == ["progress", "failed"]


def test_a_failure_keeps_its_code(
    api: FakeTriton, frontend: DenoiserFrontend, engine: ScriptedEngine
) -> None:
    request = submit(api, frontend)
    _, sink = engine.jobs[0]
    sink(Failed(Cancelled("the edit was cancelled")))
    sink(ProgressEvent(1, 3))  # a broken engine's late event is dropped
    answer = request.sender.wait()
    assert not answer.has_error()  # no error crosses the ensemble while events are under way
    meta = json.loads(answer.text("META"))
    assert (meta["event"], meta["error"]) == ("failed", "[CANCELLED] the edit was cancelled")
    assert len(request.sender.sent) == 1


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"MOMENTS": None}, "[INVALID_REQUEST] MOMENTS: is missing"),
        ({"MOMENTS": np.zeros(3, np.float32)}, "[INVALID_REQUEST] MOMENTS: is float32[3]"),
        ({"EDIT_MASK": np.zeros((2, 2), np.float32)}, "[INVALID_REQUEST] EDIT_MASK: is float32"),
        ({"REQUEST": b"{"}, "[ENGINE_FAILED] internal error"),
    ],
)
def test_broken_tensors_are_refused(
    api: FakeTriton,
    frontend: DenoiserFrontend,
    engine: ScriptedEngine,
    changed: dict[str, Any],
    message: str,
) -> None:
    request = submit(api, frontend, **changed)
    assert request.sender.wait().error().message().startswith(message)
    assert engine.jobs == []


def test_a_refusing_engine_is_relayed(api: FakeTriton, config: Config) -> None:
    class Full(ScriptedEngine):
        def submit(self, job: EditJob, sink: Sink) -> None:
            raise Overloaded("9 edits are waiting already")

    reception = DenoiserFrontend(api, Full(), config)
    request = submit(api, reception)
    assert request.sender.wait().error().message() == "[OVERLOADED] 9 edits are waiting already"
    reception.close()


@pytest.mark.parametrize(
    ("operation", "result"),
    [
        ({"op": "heartbeat"}, {"state": "ready"}),
        ({"op": "cancel", "request_id": "mine"}, {}),
        ({"op": "templates"}, {"templates": [{"template_id": "f" * 32}]}),
    ],
)
def test_operations(
    api: FakeTriton, frontend: DenoiserFrontend, operation: dict[str, str], result: dict[str, Any]
) -> None:
    request = api.request(REQUEST=json.dumps(operation).encode())
    frontend.execute([request])
    assert json.loads(request.sender.wait().text("META")) == result


def test_an_operation_that_fails_is_answered(api: FakeTriton, frontend: DenoiserFrontend) -> None:
    request = api.request(REQUEST=b'{"op": "evict", "template_id": "0"}')
    frontend.execute([request])
    answer = request.sender.wait().error().message()
    assert answer == "[ENGINE_FAILED] internal error (request unknown)"
    unknown = api.request(REQUEST=b'{"op": "explode"}')
    frontend.execute([unknown])
    assert unknown.sender.wait().error().message().startswith("[INVALID_REQUEST] REQUEST.op")
