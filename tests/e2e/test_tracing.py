"""One trace per edit: Triton's spans and our own, in a collector."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
import tritonclient.http as triton_http

from maskserve_benchmarks.router_site import RouterSite
from maskserve_common.contracts.meta import STAGES
from maskserve_serving.worker import WorkerProcess
from tests.fakes.collector import Collector, Span, draw
from tests.fakes.pictures import blob_mask, scene
from tests.support.calls import (
    TIMEOUT_S,
    Grpc,
    InferenceServerException,
    edit_inputs,
    plain_edit,
    tensors,
)
from tests.support.eventually import eventually

CLIENT_SPAN = "b7ad6b7169203331"
# Triton sends its spans in batches, and tries again later when the collector is slow.
SPANS_S = 60.0
OVERLOOKED_S = 4.0
"""A trace without Triton's spans by then is one that Triton overlooked: another edit is tried."""


def over_grpc(
    worker: WorkerProcess | RouterSite, inputs: dict[str, bytes], headers: dict[str, str]
) -> None:
    with closing(Grpc(worker.grpc_url)) as client:
        client.begin(inputs, TIMEOUT_S, headers).wait()


def over_http(
    worker: WorkerProcess | RouterSite, inputs: dict[str, bytes], headers: dict[str, str]
) -> None:
    url = worker.http_url.removeprefix("http://")
    with triton_http.InferenceServerClient(url, network_timeout=TIMEOUT_S) as client:
        client.infer("edit", tensors(triton_http, inputs), headers=headers)


@pytest.fixture(scope="module")
def router(
    worker: WorkerProcess, trace_collector: Collector, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RouterSite]:
    """A router in front of the worker, which traces nothing by itself either."""
    trace: dict[str, object] = {"otlp_url": trace_collector.url, "rate": 10**9, "interval_s": 0.1}
    folder = tmp_path_factory.mktemp("router")
    with RouterSite([worker.grpc_url], folder, {"trace": trace}) as site:
        yield site


def header(trace_id: str) -> dict[str, str]:
    return {"traceparent": f"00-{trace_id}-{CLIENT_SPAN}-01"}


def missing(
    trace_collector: Collector, trace_id: str, names: set[str], timeout_s: float
) -> set[str]:
    """Those of the spans named that a trace does not have by then."""
    end = time.monotonic() + timeout_s
    while missing_names := names - {span.name for span in trace_collector.trace(trace_id)}:
        if time.monotonic() > end:
            break
        time.sleep(0.02)
    return missing_names


def trace_of(trace_collector: Collector, trace_id: str, *names: str) -> dict[str, Span]:
    """The spans of a trace once those named are there; each name once."""
    assert not missing(trace_collector, trace_id, set(names), SPANS_S), draw(
        trace_collector.trace(trace_id)
    )
    spans = {span.name: span for span in trace_collector.trace(trace_id)}
    assert len(spans) == len(trace_collector.trace(trace_id)), draw(trace_collector.trace(trace_id))
    return spans


def parents(spans: dict[str, Span]) -> dict[str, str]:
    """Name of each span -> name of its parent."""
    names = {span.span_id: span.name for span in spans.values()}
    return {name: names.get(span.parent_id, span.parent_id) for name, span in spans.items()}


PARENTS = {
    "edit": "InferRequest",
    "compute": "edit",  # Triton's: until the front has handed it on
    "pipeline": "edit",
    **dict.fromkeys(STAGES, "pipeline"),
}


@pytest.mark.parametrize("send", [over_grpc, over_http])
def test_one_edit_is_one_trace(
    worker: WorkerProcess, trace_collector: Collector, send: Any
) -> None:
    trace_id = {over_grpc: "1", over_http: "2"}[send] * 32
    send(worker, plain_edit(request_id=f"traced-{trace_id[0]}"), header(trace_id))
    spans = trace_of(trace_collector, trace_id, "InferRequest", "edit", "pipeline", *STAGES)
    assert parents(spans) == {"InferRequest": CLIENT_SPAN, **PARENTS}, draw(
        trace_collector.trace(trace_id)
    )
    assert [span.name for span in trace_collector.trace(trace_id) if span.name in STAGES] == [
        *STAGES
    ]
    assert {span.error for span in spans.values()} == {None}
    pipeline, denoise = spans["pipeline"], spans["denoise"]
    assert all(
        pipeline.start_ns <= spans[name].start_ns <= spans[name].end_ns <= pipeline.end_ns
        for name in STAGES
        if name != "denoise"  # its span ends once its answer is on its way
    )
    assert pipeline.attributes["maskserve.request_id"] == f"traced-{trace_id[0]}"
    assert (
        denoise.attributes.items()
        >= {
            "maskserve.request_id": f"traced-{trace_id[0]}",
            "maskserve.steps": 2,
            "maskserve.steps_done": 2,
            "maskserve.cache": "off",
            "maskserve.row": "dense",
            "maskserve.total_tokens": 64,
        }.items()
    )
    assert 0 < denoise.attributes["maskserve.mask_ratio"] < 1
    assert denoise.events == ("first step",)
    for span in spans.values():
        assert span.resource["service.name"] == "maskserve"
        assert span.resource["service.instance.id"] == worker.name


@pytest.mark.parametrize("send", [over_grpc, over_http])
def test_an_edit_through_a_router_is_one_trace(
    worker: WorkerProcess, router: RouterSite, trace_collector: Collector, send: Any
) -> None:
    """The client's span is the parent of the router's, which is the parent of Triton's. Triton 2.51
    overlooks the header of some gRPC calls; ours must be there all the same.
    """
    for overlooked in range(5):
        trace_id = f"{overlooked}{ ({over_grpc: '7', over_http: '8'}[send]) }" * 16
        send(router, plain_edit(request_id=f"routed-{trace_id[:2]}"), header(trace_id))
        spans = trace_of(trace_collector, trace_id, "route", "pipeline", *STAGES)
        patience_s = OVERLOOKED_S if send is over_grpc else SPANS_S
        if not missing(trace_collector, trace_id, {"InferRequest", "edit"}, patience_s):
            break
        assert send is over_grpc
        assert parents(spans)["pipeline"] == "route"
    spans = trace_of(trace_collector, trace_id, "InferRequest", "edit", *spans)
    expected = {"route": CLIENT_SPAN, "InferRequest": "route", **PARENTS}
    assert parents(spans) == expected, draw(trace_collector.trace(trace_id))
    route, inside = spans["route"], spans["InferRequest"]
    # Triton ends its span when it knows the answer sent: the router may have it by then.
    assert route.start_ns <= inside.start_ns <= route.end_ns
    assert route.attributes["maskserve.worker"] == worker.grpc_url
    assert route.attributes["maskserve.code"] == "OK"
    by_instance = {span.resource["service.instance.id"] for span in spans.values()}
    assert by_instance == {"router", worker.name}


def test_waiting_for_a_template_shows(worker: WorkerProcess, trace_collector: Collector) -> None:
    inputs = edit_inputs(scene(64, 64, seed=333), blob_mask(64, 64), cache="require")
    over_grpc(worker, inputs, header("3" * 32))  # of a picture that no other test has primed
    spans = trace_of(trace_collector, "3" * 32, "wait_prime", "pipeline", *STAGES)
    order = ("encode", "prepare", "wait_prime", "queue", "denoise")
    assert [span.name for span in trace_collector.trace("3" * 32) if span.name in order] == list(
        order
    )
    assert spans["denoise"].attributes["maskserve.cache"] == "hit"
    assert spans["denoise"].attributes["maskserve.row"] == "cached"


def test_a_cancelled_edit_says_so(
    worker: WorkerProcess, trace_collector: Collector, grpc: Grpc
) -> None:
    pending = grpc.begin(
        plain_edit(num_inference_steps=1000, request_id="stopped"), headers=header("4" * 32)
    )
    eventually(
        "the edit runs",
        lambda: "stopped" in [row["request_id"] for row in grpc.control(op="status")["running"]],
    )
    pending.call.cancel()
    with pytest.raises(InferenceServerException, match=r"(?i)cancel"):
        pending.wait()
    spans = trace_of(trace_collector, "4" * 32, "pipeline", *STAGES[: STAGES.index("denoise") + 1])
    assert {name for name, span in spans.items() if span.error is not None} == {
        "pipeline",
        "denoise",
    }
    for name in ("pipeline", "denoise"):
        assert spans[name].attributes["error.type"] == "CANCELLED"
        assert "[CANCELLED]" in str(spans[name].error)
    assert 0 < spans["denoise"].attributes["maskserve.steps_done"] < 1000


def test_a_refused_edit_says_why(worker: WorkerProcess, trace_collector: Collector) -> None:
    with pytest.raises(InferenceServerException, match="INVALID_REQUEST"):
        over_http(worker, {**plain_edit(), "IMAGE": b"no image"}, header("5" * 32))
    spans = trace_of(trace_collector, "5" * 32, "pipeline", "preprocess")
    for name in ("pipeline", "preprocess"):
        assert spans[name].attributes["error.type"] == "INVALID_REQUEST"
        assert "IMAGE" in str(spans[name].error)


def test_nothing_else_is_traced(
    worker: WorkerProcess, trace_collector: Collector, grpc: Grpc
) -> None:
    """Neither an edit of a client without traces, at this rate, nor any call of control."""
    ids_before = trace_collector.trace_ids()
    grpc.edit(plain_edit())
    grpc.control(op="status")
    over_grpc(worker, plain_edit(), header("6" * 32))  # what came before would be there by then
    trace_of(trace_collector, "6" * 32, "pipeline", *STAGES)
    assert trace_collector.trace_ids() - ids_before == {"6" * 32}
