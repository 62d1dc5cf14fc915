"""Our spans in Triton's trace, kept in memory here."""

from __future__ import annotations

import json
import logging
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from msgspec import structs
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from maskserve_common.config import Config, ConfigError, TraceConfig
from maskserve_common.config_file import config_of
from maskserve_common.errors import Cancelled, InvalidRequest
from maskserve_common.tracing import Stage, Tracer, make_tracer, parent_of
from maskserve_engine.base.job import Failed, FinalEvent
from maskserve_engine.base.timeline import RequestTimeline, stages
from maskserve_triton.batched_requests import BatchedRequests
from maskserve_triton.denoiser import DenoiserFrontend
from maskserve_triton.edit_front import EditFront
from maskserve_triton.picture_threads import PictureJob, PictureThreads
from maskserve_triton.tensor_io import Outputs
from tests.fakes.model_specs import FILL_SPEC
from tests.fakes.pb_utils import Call, FakeTriton, InferenceResponse, failure, reply
from tests.fakes.scripted_engine import ScriptedEngine, tensors
from tests.support.eventually import eventually

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PARENT = f"00-{TRACE}-{SPAN}-01"
CONTEXT = json.dumps({"traceparent": PARENT})


class Spans:
    """A tracer and what it recorded."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        provider = TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.tracer = Tracer(provider)

    def all(self) -> list[ReadableSpan]:
        return list(self._exporter.get_finished_spans())

    def named(self, name: str) -> ReadableSpan:
        """The one of that name; a front's ends just after its answer was sent."""

        def matching_spans() -> list[ReadableSpan]:
            return [span for span in self.all() if span.name == name]

        eventually(f"there is a span {name}", matching_spans, 2.0)
        [span] = matching_spans()
        return span


@pytest.fixture
def spans() -> Spans:
    return Spans()


@pytest.fixture
def front(api: FakeTriton, config: Config, beat: Any, spans: Spans) -> Iterator[EditFront]:
    edit_front = EditFront(api, config, FILL_SPEC, "edit", streaming=False, tracer=spans.tracer)
    yield edit_front
    edit_front.close()


def below(span: ReadableSpan) -> tuple[str, str]:
    """Trace and parent."""
    assert span.parent is not None
    return f"{span.context.trace_id:032x}", f"{span.parent.span_id:016x}"


def ask(
    api: FakeTriton, front: EditFront, context: str | None, **parameters: Any
) -> InferenceResponse:
    tensors = {"IMAGE": b"i", "MASK": b"m", "PROMPT": b"p", "SETTINGS": b'{"request_id": "mine"}'}
    request = api.request(parameters=json.dumps(parameters), **tensors)
    request.trace_context = context
    front.execute([request])
    return request.sender.wait()


def final(call: Call) -> Iterator[InferenceResponse]:
    yield reply(EDITED=b"picture", META=b'{"event": "final", "step": 4}')


def refused(call: Call) -> Iterator[InferenceResponse]:
    yield failure("in ensemble 'edit_pipeline', [INVALID_REQUEST] MASK: is empty")


def test_a_front_opens_a_span_for_the_models_behind_it(
    api: FakeTriton, front: EditFront, spans: Spans
) -> None:
    api.models["edit_pipeline"] = final
    ask(api, front, CONTEXT)
    pipeline = spans.named("pipeline")
    assert below(pipeline) == (TRACE, SPAN)
    assert pipeline.attributes["maskserve.request_id"] == "mine"
    assert pipeline.attributes["maskserve.outcome"] == "done"
    assert pipeline.status.status_code is StatusCode.UNSET
    [call] = api.calls_of("edit_pipeline")
    behind = api.request(parameters=json.dumps(call.parameters))
    assert parent_of(behind) == f"00-{TRACE}-{pipeline.context.span_id:016x}-01"


OTHER = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


@pytest.mark.parametrize("context", [None, "", CONTEXT])
@pytest.mark.parametrize("name", ["traceparent", "Traceparent"])
def test_a_trace_that_triton_overlooks_is_the_clients(
    api: FakeTriton, front: EditFront, spans: Spans, context: str | None, name: str
) -> None:
    api.models["edit_pipeline"] = final
    ask(api, front, context, **{name: OTHER})
    _, trace, span, _ = OTHER.split("-")
    assert below(spans.named("pipeline")) == (trace, span)


def test_tritons_span_in_the_clients_trace_is_kept(
    api: FakeTriton, front: EditFront, spans: Spans
) -> None:
    api.models["edit_pipeline"] = final
    ask(api, front, CONTEXT, traceparent=PARENT.replace(SPAN, "00f067aa0ba902b7"))
    assert below(spans.named("pipeline")) == (TRACE, SPAN)


@pytest.mark.parametrize(
    "header",
    [
        *("", "x", 7, True, None, OTHER[:-1], OTHER + "-x", OTHER.upper(), OTHER.replace("4", "é")),
        *(f"00-{'0' * 32}-{SPAN}-01", f"00-{TRACE}-{'0' * 16}-01"),
    ],
)
def test_a_header_that_names_no_span_is_none(
    api: FakeTriton, front: EditFront, spans: Spans, header: Any
) -> None:
    api.models["edit_pipeline"] = final
    ask(api, front, None, traceparent=header)
    assert spans.all() == []
    ask(api, front, CONTEXT, traceparent=header)
    assert below(spans.named("pipeline")) == (TRACE, SPAN)


def test_an_error_is_the_spans_too(api: FakeTriton, front: EditFront, spans: Spans) -> None:
    api.models["edit_pipeline"] = refused
    ask(api, front, CONTEXT)
    pipeline = spans.named("pipeline")
    assert pipeline.status.status_code is StatusCode.ERROR
    assert pipeline.status.description == "[INVALID_REQUEST] MASK: is empty"
    assert pipeline.attributes["error.type"] == "INVALID_REQUEST"


@pytest.mark.parametrize("context", [None, "", "{}", '{"traceparent": ""}'])
def test_a_request_without_trace_leaves_no_span(
    api: FakeTriton, front: EditFront, spans: Spans, context: str | None
) -> None:
    api.models["edit_pipeline"] = final
    ask(api, front, context)
    assert spans.all() == []
    [call] = api.calls_of("edit_pipeline")
    assert parent_of(api.request(parameters=json.dumps(call.parameters))) == ""


def test_a_broken_context_costs_a_span_and_no_edit(
    api: FakeTriton, front: EditFront, spans: Spans
) -> None:
    api.models["edit_pipeline"] = final
    assert ask(api, front, "not JSON").error() is None
    assert spans.all() == []


def test_a_client_that_asked_for_no_samples_gets_none(
    api: FakeTriton, front: EditFront, spans: Spans
) -> None:
    api.models["edit_pipeline"] = final
    ask(api, front, json.dumps({"traceparent": PARENT[:-2] + "00"}))
    assert spans.all() == []


def read(request: Any) -> PictureJob | Outputs:
    if "PASSING" in request.tensors:
        return {"META": b"{}"}

    def work() -> Outputs:
        if "BAD" in request.tensors:
            raise InvalidRequest("BAD", "is there")
        if "BUG" in request.tensors:
            raise KeyError("a client's secret")
        return {"IMAGE": b"an image"}

    return PictureJob("", lambda: 64, work)


def run(api: FakeTriton, spans: Spans, **inputs: bytes) -> None:
    request = api.request(parameters=json.dumps({"traceparent": PARENT}), **inputs)
    threads = PictureThreads(api, spans.tracer, "decode", read)
    threads.execute([request])
    request.sender.wait()
    threads.close()


def test_work_is_recorded_where_something_was_done(api: FakeTriton, spans: Spans) -> None:
    run(api, spans, PASSING=b"")
    assert spans.all() == []
    before_ns = time.time_ns()
    run(api, spans)
    span = spans.named("decode")
    assert below(span) == (TRACE, SPAN)
    assert before_ns <= span.start_time <= span.end_time <= time.time_ns()


def test_a_stage_ends_before_its_answer_is_on_its_way(api: FakeTriton, spans: Spans) -> None:
    """The thread may stand still after it has answered, while the edit goes on."""
    request = api.request(parameters=json.dumps({"traceparent": PARENT}), PROMPT=b"a circle")
    send, sent_at = request.sender.send, list[int]()

    def send_slowly(*answer: Any, **flags: Any) -> None:
        sent_at.append(time.time_ns())
        send(*answer, **flags)
        time.sleep(0.01)

    request.sender.send = send_slowly  # type: ignore[method-assign]
    answers: list[Outputs | Exception] = [{"EMBEDS": np.ones((2, 3), np.float32)}]
    BatchedRequests(api, spans.tracer, "encode", lambda _: None, lambda _: answers).execute(
        [request]
    )
    assert spans.named("encode").end_time <= sent_at[0]


def test_work_that_fails_is_recorded(api: FakeTriton, spans: Spans) -> None:
    run(api, spans, BAD=b"")
    assert spans.named("decode").attributes["error.type"] == "INVALID_REQUEST"


def test_a_surprise_is_named_but_not_quoted(api: FakeTriton, spans: Spans) -> None:
    run(api, spans, BUG=b"")
    assert spans.named("decode").status.description == "KeyError"


def timeline(**changed: Any) -> RequestTimeline:
    now_s = time.monotonic()
    whole = RequestTimeline(
        submitted=now_s - 4,
        queued=now_s - 3,
        admitted=now_s - 2,
        first_step=now_s - 1,
        ended=now_s,
        waited=True,
        about={"request_id": "mine"},
        work={"steps": 28, "cache": "hit"},
    )
    return replace(whole, **changed)


def seconds(stage: Stage) -> float:
    return round((stage.end_ns - stage.start_ns) / 1e9, 2)


def test_the_stages_of_an_edit_follow_one_another() -> None:
    now_s = time.monotonic()
    stage_spans = stages(now_s - 7, timeline(submitted=now_s - 4))
    assert [stage.name for stage in stage_spans] == ["prepare", "wait_prime", "queue", "denoise"]
    assert [seconds(stage) for stage in stage_spans] == [3, 1, 1, 2]
    assert abs(stage_spans[-1].end_ns - time.time_ns()) < 1e9
    assert [set(stage.attributes) for stage in stage_spans] == [
        *[{"request_id"}] * 3,
        {"request_id", "steps", "cache"},
    ]
    [(event, at_ns)] = stage_spans[-1].events
    assert event == "first step"
    assert stage_spans[-1].start_ns < at_ns < stage_spans[-1].end_ns
    stage_spans = stages(now_s, timeline(waited=False))
    assert [stage.name for stage in stage_spans] == ["prepare", "queue", "denoise"]
    assert all(previous.end_ns == next.start_ns for previous, next in pairwise(stage_spans))


@pytest.mark.parametrize(
    ("never", "names"),
    [
        ({}, ["prepare", "wait_prime", "queue", "denoise"]),
        ({"first_step": 0.0}, ["prepare", "wait_prime", "queue", "denoise"]),
        ({"first_step": 0.0, "admitted": 0.0}, ["prepare", "wait_prime", "queue"]),
        ({"first_step": 0.0, "admitted": 0.0, "queued": 0.0}, ["prepare", "wait_prime"]),
        ({"admitted": 0.0, "queued": 0.0, "waited": False}, ["prepare", "queue"]),
    ],
)
def test_an_error_ends_the_stage_it_came_in(never: dict[str, float], names: list[str]) -> None:
    error = Cancelled("the edit was cancelled")
    stage_spans = stages(time.monotonic(), timeline(**never), error)
    assert [stage.name for stage in stage_spans] == names
    assert [stage.error for stage in stage_spans] == [None] * (len(names) - 1) + [error]


@pytest.mark.parametrize("error", [None, Cancelled("the edit was cancelled")])
def test_the_denoiser_records_what_the_engine_tells(
    api: FakeTriton, config: Config, spans: Spans, error: Cancelled | None
) -> None:
    engine = ScriptedEngine()
    request = api.request(parameters=json.dumps({"traceparent": PARENT}), **tensors())
    reception = DenoiserFrontend(api, engine, config, spans.tracer)
    reception.execute([request])
    [(_, sink)] = engine.jobs
    latents = np.zeros((4, 4, 4), np.float32)
    meta = {"event": "final", "step": 4, "steps": 4, "timings_ms": {}}
    sink(FinalEvent(latents, meta, timeline()) if error is None else Failed(error, timeline()))
    assert [span.name for span in spans.all()] == ["prepare", "wait_prime", "queue", "denoise"]
    assert {below(span) for span in spans.all()} == {(TRACE, SPAN)}
    denoise = spans.named("denoise")
    assert denoise.attributes["maskserve.steps"] == 28
    assert denoise.attributes["maskserve.cache"] == "hit"
    assert denoise.status.is_ok is (error is None)
    reception.close()


def test_no_collector_costs_spans_and_a_warning(
    config: Config, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # taken, and nobody listens
        url = f"http://127.0.0.1:{closed.getsockname()[1]}/v1/traces"
        trace = TraceConfig(otlp_url=url, timeout_s=0.3, interval_s=0.05, queue=8)
        tracer = make_tracer(structs.replace(config, trace=trace), "edit")
        tracer.record(PARENT, [Stage("queue", 1, 2)])
        eventually("it is said", lambda: caplog.records)
        tracer.record(PARENT, [Stage("queue", 1, 2)])
        tracer.close()
    assert [(r.levelno, r.name.split(".")[0]) for r in caplog.records] == [
        (logging.WARNING, "maskserve_common")
    ]
    assert url in caplog.text


def test_recording_does_not_wait_for_the_collector(config: Config) -> None:
    with socket.socket() as mute:  # takes connections and never answers
        mute.bind(("127.0.0.1", 0))
        mute.listen()
        url = f"http://127.0.0.1:{mute.getsockname()[1]}/v1/traces"
        trace = TraceConfig(otlp_url=url, timeout_s=2.0, interval_s=0.05, queue=8)
        tracer = make_tracer(structs.replace(config, trace=trace), "edit")
        for _ in range(300):  # waiting would take two seconds each: longer than a test may take
            tracer.record(PARENT, [Stage("queue", 1, 2)])
    tracer.close()


def test_without_the_package_there_is_a_warning_and_no_span(
    config: Config, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    url = "http://localhost:4318/v1/traces"
    tracer = make_tracer(structs.replace(config, trace=TraceConfig(otlp_url=url)), "edit")
    tracer.record(PARENT, [Stage("queue", 1, 2)])
    assert ".[trace]" in caplog.text


def test_off_means_off(api: FakeTriton, config: Config) -> None:
    tracer = make_tracer(config, "edit")
    request = api.request()
    request.trace_context = CONTEXT
    assert tracer.open("pipeline", request).traceparent == ""


@pytest.mark.parametrize("url", ["localhost:4318", "ftp://host/v1/traces", "http://host", "x"])
def test_what_is_no_url_is_refused(config: Config, url: str) -> None:
    with pytest.raises(ConfigError, match=r"\[trace\] otlp_url"):
        config_of({"trace": {"otlp_url": url}})


@pytest.mark.parametrize("parameters", ["", "{}", '{"accepted_ns": "1"}'])
def test_without_a_parent_there_is_none(api: FakeTriton, parameters: str) -> None:
    assert parent_of(api.request(parameters=parameters)) == ""
