"""One log line and one count per edit, however it ends."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from maskserve_common.config import Config
from maskserve_common.errors import (
    Cancelled,
    DeadlineExceeded,
    EngineFailed,
    InvalidRequest,
    MaskserveError,
    Overloaded,
)
from maskserve_common.observations import Observations
from maskserve_common.tracing import OpenSpan
from maskserve_triton.edit_front import EditFront
from maskserve_triton.request_log import RequestLog
from tests.fakes.model_specs import FILL_SPEC
from tests.fakes.pb_utils import Call, FakeTriton, InferenceResponse, Request, failure, reply

META = {
    "event": "final",
    "request_id": "mine",
    "seed": 7,
    "worker": "worker-0",
    "model": "tiny",
    "steps": 4,
    "step": 4,
    "mask_ratio": 0.25,
    "cache": "hit",
    "timings_ms": {"queue": 1.5, "denoise": 20.0},
}


@pytest.fixture
def left() -> list[None]:
    return []


@pytest.fixture
def request_log(left: list[None]) -> RequestLog:
    log = RequestLog("edit", Observations(), lambda: left.append(None))
    log.request_id = "mine"
    return log


def edit_lines(caplog: pytest.LogCaptureFixture) -> list[Any]:
    return [record for record in caplog.records if getattr(record, "event", "") == "edit"]


def test_an_encoding_counts_as_no_edit(
    request_log: RequestLog, left: list[None], caplog: pytest.LogCaptureFixture
) -> None:
    request_log.encodes = True
    with caplog.at_level(logging.INFO):
        request_log.record_end(None, {"META": json.dumps(META).encode()})
    assert len(left) == 1
    assert not list(request_log._observations.take())
    assert not edit_lines(caplog)
    assert "encoding done" in caplog.text


def test_a_done_edit_says_what_was_done(
    request_log: RequestLog, left: list[None], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    request_log.record_end(None, {"IMAGE": b"picture", "META": json.dumps(META).encode()})
    [record] = edit_lines(caplog)
    assert (record.levelname, record.request_id) == ("INFO", "mine")
    fields = record.fields
    assert fields.pop("total_ms") >= 0
    assert fields == {
        "outcome": "done",
        "code": "OK",
        "seed": 7,
        "steps": 4,
        "mask_ratio": 0.25,
        "cache": "hit",
        "queue_ms": 1.5,
        "denoise_ms": 20.0,
    }
    assert len(left) == 1
    ends, seconds, kinds = request_log._observations.take()
    assert ends == ("edit_ends_total", 1.0, ("edit", "done", "OK"))
    assert (seconds[0], seconds[2]) == ("edit_seconds", ("edit",))
    assert kinds == ("edit_kinds_total", 1.0, ("edit", "inpaint"))


@pytest.mark.parametrize(
    ("error", "level", "outcome"),
    [
        (InvalidRequest("MASK", "is empty"), "INFO", "refused"),
        (Overloaded("full"), "WARNING", "refused"),
        (Cancelled("withdrawn"), "INFO", "cancelled"),
        (DeadlineExceeded("too late"), "WARNING", "deadline"),
        (EngineFailed("died"), "ERROR", "failed"),
    ],
)
def test_errors_have_their_outcome_and_level(
    request_log: RequestLog,
    left: list[None],
    caplog: pytest.LogCaptureFixture,
    error: MaskserveError,
    level: str,
    outcome: str,
) -> None:
    caplog.set_level(logging.INFO)
    request_log.record_end(error, {})
    [record] = edit_lines(caplog)
    assert record.levelname == level
    assert record.fields["error"] == error.message
    assert (record.fields["outcome"], record.fields["code"]) == (outcome, error.code)
    assert list(request_log._observations.take()) == [
        ("edit_ends_total", 1.0, ("edit", outcome, error.code))
    ]
    assert len(left) == 1


class Traced(OpenSpan):
    traceparent = f"00-{'a' * 32}-{'b' * 16}-01"


def test_a_traced_edit_names_its_trace(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    RequestLog("edit", Observations(), lambda: None, Traced()).record_end(
        Cancelled("withdrawn"), {}
    )
    [record] = edit_lines(caplog)
    assert record.fields["trace_id"] == "a" * 32


def test_below_its_level_only_the_count_is_kept(
    request_log: RequestLog, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    request_log.record_end(None, {"META": b"never read"})
    assert edit_lines(caplog) == []
    assert len(list(request_log._observations.take())) == 3


# Through a front


def edit(api: FakeTriton, **settings: Any) -> Request:
    raw = json.dumps(settings).encode()
    return api.request(IMAGE=b"image", MASK=b"mask", PROMPT=b"a secret", SETTINGS=raw)


@pytest.mark.usefixtures("beat")
def test_each_edit_of_a_front_has_one_line_with_its_id(
    api: FakeTriton, config: Config, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    stuck = threading.Event()

    def pipeline(call: Call) -> Iterator[InferenceResponse]:
        name = call.accepted().settings.request_id
        if name == "cancelled":
            assert stuck.wait(10)
            yield failure("in ensemble 'edit_pipeline', [CANCELLED] the edit was cancelled")
        elif name == "refused":
            yield failure("in ensemble 'edit_pipeline', [INVALID_REQUEST] MASK: is empty")
        elif name == "broken":
            raise RuntimeError("boom")
        else:
            yield reply(EDITED=b"picture", META=json.dumps(META).encode())

    api.models["edit_pipeline"] = pipeline
    api.models["denoiser"] = lambda call: [reply(META=b"{}")]
    front = EditFront(api, config, FILL_SPEC, "edit", streaming=False)
    requests = {
        name: edit(api, request_id=name) for name in ("done", "refused", "broken", "cancelled")
    }
    front.execute([*requests.values(), edit(api, steps=1), edit(api, request_id="cancelled")])
    requests["cancelled"].sender.cancel.set()  # now, as an id is free once it is answered
    for request in requests.values():
        request.sender.wait()
    stuck.set()
    front.close()
    lines = [(r.request_id, r.fields["outcome"], r.fields["code"]) for r in edit_lines(caplog)]
    assert sorted(lines) == [
        ("", "refused", "INVALID_REQUEST"),  # unreadable settings
        ("broken", "failed", "ENGINE_FAILED"),
        ("cancelled", "cancelled", "CANCELLED"),
        ("cancelled", "refused", "INVALID_REQUEST"),  # its id was in flight
        ("done", "done", "OK"),
        ("refused", "refused", "INVALID_REQUEST"),
    ]
    [trace] = [r for r in caplog.records if r.exc_info]
    assert trace.request_id == "broken"
    assert "secret" not in caplog.text
