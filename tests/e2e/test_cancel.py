"""Edits that nobody waits for give up their rows."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from maskserve_common.liveness import signed_in
from maskserve_serving.worker import WorkerProcess
from tests.support.calls import (
    LONG,
    WHOLE,
    Grpc,
    InferenceServerException,
    Stream,
    eventually,
    pixels,
    plain_edit,
    stream,
    texts,
)

# Bounds a failure only: the count of finished edits shows that a cancel ends an edit early.
SOON_S = 60.0


def running(grpc: Grpc) -> set[str]:
    status = grpc.control(op="status")
    return {row["request_id"] for row in (*status["running"], *status["waiting"])}


def finished(grpc: Grpc) -> int:
    return int(grpc.control(op="status")["counters"]["edits_total"])


def read_on(opened: Stream) -> None:
    while True:
        opened.next(SOON_S)


@pytest.fixture
def unfinished(grpc: Grpc) -> Iterator[None]:
    """No edit of this test may run to its end."""
    count_before = finished(grpc)
    yield
    # A client that cancels by id has its answer at once, and the row is free a step later.
    eventually("the rows are free", lambda: not running(grpc), SOON_S)
    assert finished(grpc) == count_before
    assert grpc.control(op="status")["in_flight"] == 0


@pytest.mark.usefixtures("unfinished")
def test_a_grpc_cancel_frees_the_row(grpc: Grpc) -> None:
    pending = grpc.begin(plain_edit(**LONG, request_id="unary"))
    eventually("the edit runs", lambda: "unary" in running(grpc))
    pending.call.cancel()
    with pytest.raises(InferenceServerException, match=r"(?i)cancel"):
        pending.wait()
    assert eventually("the row is free", lambda: not running(grpc)) < SOON_S


@pytest.mark.usefixtures("unfinished")
def test_a_grpc_deadline_frees_the_row(grpc: Grpc) -> None:
    pending = grpc.begin(plain_edit(**LONG, request_id="late"), timeout_s=0.5)
    eventually("the edit runs", lambda: "late" in running(grpc))
    with pytest.raises(InferenceServerException, match=r"(?i)deadline"):
        pending.wait()
    assert eventually("the row is free", lambda: not running(grpc)) < SOON_S


@pytest.mark.usefixtures("unfinished")
def test_a_stream_cancel_frees_the_row(grpc: Grpc, worker: WorkerProcess) -> None:
    opened = Stream(worker.grpc_url)
    opened.send(plain_edit(**LONG, progress=True, request_id="stream"))
    assert opened.next()[1]["event"] == "progress"
    opened.cancel()
    assert eventually("the row is free", lambda: not running(grpc)) < SOON_S
    opened.close()


@pytest.mark.usefixtures("unfinished")
def test_a_closed_generate_stream_frees_the_row(grpc: Grpc, worker: WorkerProcess) -> None:
    body = texts(plain_edit(**LONG, progress=True, request_id="sse"))
    host = worker.http_url.removeprefix("http://")
    connection = http.client.HTTPConnection(host, timeout=30)
    connection.request("POST", "/v2/models/edit_stream/generate_stream", json.dumps(body))
    answer = connection.getresponse()
    assert answer.readline().startswith(b"data: ")
    answer.close()
    connection.close()
    assert eventually("the row is free", lambda: not running(grpc)) < SOON_S


@pytest.mark.usefixtures("unfinished")
def test_control_cancels(grpc: Grpc) -> None:
    pending = grpc.begin(plain_edit(**LONG, request_id="named"))
    eventually("the edit runs", lambda: "named" in running(grpc))
    assert grpc.control(op="cancel", request_id="named") == {"cancelled": True}
    with pytest.raises(InferenceServerException, match=r"^\[StatusCode.CANCELLED\] \[CANCELLED\]"):
        pending.wait(SOON_S)
    assert grpc.control(op="cancel", request_id="named") == {"cancelled": False}


@pytest.mark.usefixtures("unfinished")
def test_control_cancels_a_stream_whose_events_are_under_way(
    grpc: Grpc, worker: WorkerProcess
) -> None:
    with stream(worker.grpc_url) as opened:
        opened.send(plain_edit(**LONG, progress=True, request_id="told"))
        assert opened.next()[1]["event"] == "progress"
        assert grpc.control(op="cancel", request_id="told") == {"cancelled": True}
        with pytest.raises(InferenceServerException, match=r"\[CANCELLED\]"):
            read_on(opened)


def begun_stream(worker: WorkerProcess, request_id: str) -> Stream:
    """Return a stream whose edit has sent progress.

    TRITON-2.51: after a cancelled stream, one in thousands gets no message (docs/reliability.md).
    """
    for number in range(3):
        opened = Stream(worker.grpc_url)
        opened.send(plain_edit(**LONG, progress=True, request_id=f"{request_id}-{number}"))
        try:
            opened.next(10.0)
            return opened
        except TimeoutError:
            opened.cancel()
            opened.close()
    raise AssertionError("three streams got no message")


def test_streams_that_are_closed_leave_no_thread_behind(grpc: Grpc, worker: WorkerProcess) -> None:
    front = psutil.Process(dict(signed_in(worker.spec.files.runtime))["edit_stream"])
    counts = []
    for _ in range(2):
        for number in range(8):
            opened = begun_stream(worker, f"closed-{number}")
            opened.cancel()
            eventually("the row is free", lambda: not running(grpc))
            opened.close()
        counts.append(front.num_threads())
    assert counts[1] - counts[0] <= 2  # one for an edit that was not over when the next came


@pytest.mark.usefixtures("unfinished")
def test_the_settings_deadline_is_kept(grpc: Grpc) -> None:
    with pytest.raises(InferenceServerException, match=r"\[DEADLINE_EXCEEDED\]"):
        grpc.edit(plain_edit(**LONG, deadline_ms=300))
    eventually("the row is free", lambda: not running(grpc), SOON_S)


@pytest.mark.usefixtures("unfinished")
@pytest.mark.parametrize("after_s", [0.05, 0.15, 0.3])
def test_control_cancels_what_is_still_prepared_or_encoded(grpc: Grpc, after_s: float) -> None:
    name = f"large-{after_s}"
    pending = grpc.begin(plain_edit(3000, 3000, **LONG, request_id=name))
    eventually("it is accepted", lambda: grpc.control(op="status")["in_flight"])
    time.sleep(after_s)
    assert grpc.control(op="cancel", request_id=name) == {"cancelled": True}
    with pytest.raises(InferenceServerException, match=r"\[CANCELLED\]"):
        pending.wait(SOON_S)


def test_a_cancel_before_the_edit_reaches_the_engine(grpc: Grpc) -> None:
    """Cancelled at once, while it is still being decoded and encoded."""
    count_before = finished(grpc)
    for number in range(5):
        pending = grpc.begin(plain_edit(**LONG, request_id=f"early-{number}"))
        pending.call.cancel()
    eventually("they are answered", lambda: grpc.control(op="status")["in_flight"] == 0)
    # What was cancelled is still on its way through preprocess and encoder: this comes after it.
    grpc.edit(plain_edit())
    eventually("the rows are free", lambda: not running(grpc))
    assert finished(grpc) == count_before + 1


@pytest.mark.usefixtures("unfinished")
def test_more_edits_than_triton_has_threads_by_default_are_all_cancelled(grpc: Grpc) -> None:
    pending = [grpc.begin(plain_edit(**LONG, request_id=f"many-{i}")) for i in range(48)]
    eventually("all reach the engine", lambda: len(running(grpc)) == 48)
    for edit in pending:
        edit.call.cancel()
    assert eventually("the rows are free", lambda: not running(grpc)) < SOON_S


def test_neighbours_of_a_cancelled_edit_finish(grpc: Grpc) -> None:
    seconds_long = plain_edit(128, 128, **LONG, **WHOLE)  # it has to be seen beside the other
    expected, _ = grpc.edit(seconds_long)
    answers: list[Any] = []
    waiting = threading.Thread(target=lambda: answers.append(grpc.edit(seconds_long)))
    pending = grpc.begin(plain_edit(512, 512, **LONG, **WHOLE, request_id="neighbour"))
    waiting.start()
    eventually("both run", lambda: len(running(grpc)) == 2)
    pending.call.cancel()
    waiting.join(30)
    assert (abs(pixels(answers[0][0]).astype(int) - pixels(expected)) <= 1).all()
    eventually("the row is free", lambda: not running(grpc))


def test_a_closed_http_infer_runs_out_without_harm(grpc: Grpc, worker: WorkerProcess) -> None:
    """Triton does not tell of it: the edit is finished for nobody."""
    inputs = plain_edit(128, 128, **LONG, **WHOLE, request_id="gone")
    values = [
        {"name": name, "shape": [1], "datatype": "BYTES", "data": [text]}
        for name, text in texts(inputs).items()
    ]
    count_before = finished(grpc)
    host = worker.http_url.removeprefix("http://")
    connection = http.client.HTTPConnection(host, timeout=30)
    connection.request("POST", "/v2/models/edit/infer", json.dumps({"inputs": values}))
    eventually("the edit runs", lambda: "gone" in running(grpc))
    connection.close()
    eventually("it is finished", lambda: finished(grpc) == count_before + 1)
    eventually("it is answered", lambda: grpc.control(op="status")["in_flight"] == 0)
    grpc.edit(plain_edit())
