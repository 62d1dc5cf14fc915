"""Edits on the /metrics page of a real Triton and in the worker's log."""

from __future__ import annotations

import base64
import json
import re
import time
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from maskserve_common.contracts.due_times import SLO_OUTCOMES
from maskserve_serving.worker import WorkerProcess
from maskserve_triton.metric_table import ENDS, ENGINE_METRICS, FRONT_METRICS
from tests.fakes.pictures import blob_mask, encode, scene
from tests.support.calls import (
    Grpc,
    InferenceServerException,
    edit_inputs,
    plain_edit,
    stream,
)
from tests.support.eventually import eventually

_SAMPLE = re.compile(r"(\w+)\{(.*)\} (\S+)")
_LABEL = re.compile(r'(\w+)="([^"]*)"')


class Page:
    """One reading of a /metrics page."""

    def __init__(self, worker: WorkerProcess) -> None:
        with urllib.request.urlopen(worker.metrics_url, timeout=10) as answer:
            text = answer.read().decode()
        self.kinds = dict(re.findall(r"^# TYPE maskserve_(\w+) (\w+)$", text, re.MULTILINE))
        self.samples: list[tuple[str, dict[str, str], float]] = []
        for line in text.splitlines():
            if line.startswith("maskserve_"):
                match = _SAMPLE.fullmatch(line.removeprefix("maskserve_"))
                assert match is not None, line
                name, labels, value = match.groups()
                self.samples.append((name, dict(_LABEL.findall(labels)), float(value)))

    def value(self, name: str, **labels: str) -> float:
        """Sum of the samples of this name with these labels, of which there must be one."""
        values = [
            v
            for n, series_labels, v in self.samples
            if n == name and labels.items() <= series_labels.items()
        ]
        assert values, (name, labels)
        return sum(values)

    def buckets(self, name: str) -> dict[str, float]:
        """Upper bound -> count, in the page's order, of a histogram without labels of its own."""
        return {
            series_labels["le"]: v for n, series_labels, v in self.samples if n == f"{name}_bucket"
        }


def settled(worker: WorkerProcess, grpc: Grpc, ends: float = 0) -> tuple[Page, Mapping[str, float]]:
    """The page once it has caught up with an idle worker, and the record's counters.

    An edit is counted out, then counted as ended, then logged: who made edits says how many `ends`
    there must be.
    """
    snapshot: tuple[Page, Mapping[str, float]] | None = None

    def caught_up() -> bool:
        nonlocal snapshot
        status = grpc.control(op="status")
        page, counters = Page(worker), status["counters"]
        snapshot = page, counters
        logged = sum(line.get("event") == "edit" for line in lines_of(worker))
        return (
            not (status["running"] or status["waiting"] or status["in_flight"])
            and page.value("running_rows") == page.value("waiting_rows") == 0
            and all(page.value(name, **labels) == n for name, labels, n in published(counters))
            and page.value("step_seconds_count") == counters["steps_total"]
            and page.value("queue_seconds_count") == counters["edits_total"]
            and page.value("edit_ends_total") == logged >= ends
            and page.value("edit_seconds_count") == page.value("edit_ends_total", outcome="done")
        )

    eventually("the page has caught up", caught_up, 30.0)
    assert snapshot is not None
    return snapshot


def published(counters: Mapping[str, float]) -> Iterator[tuple[str, dict[str, str], float]]:
    """Those of the record's counters that are metrics: name, labels, value."""
    for key, total in counters.items():
        name, _, label = key.partition(".")
        names = ENGINE_METRICS[name].labels if name in ENGINE_METRICS else None
        if names is not None and len(names) == bool(label):
            yield name, dict.fromkeys(names, label), total


def log_of(worker: WorkerProcess) -> Path:
    return Path(worker.config.log.file)


def lines_of(worker: WorkerProcess) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log_of(worker).read_text("utf-8").splitlines()]


def ends_of(worker: WorkerProcess, request_id: str) -> list[dict[str, Any]]:
    return [
        line
        for line in lines_of(worker)
        if line.get("event") == "edit" and line.get("request_id") == request_id
    ]


def only_end(worker: WorkerProcess, request_id: str) -> dict[str, Any]:
    """The one line of an edit's end; written just after the client has its answer."""
    eventually("it is logged", lambda: ends_of(worker, request_id))
    time.sleep(0.2)
    [line] = ends_of(worker, request_id)
    assert (line["worker"], line["event"]) == (worker.name, "edit")
    return line


def test_every_metric_is_on_the_page_with_its_kind(worker: WorkerProcess, grpc: Grpc) -> None:
    grpc.edit(plain_edit())
    page, _ = settled(worker, grpc)
    table = {**ENGINE_METRICS, **FRONT_METRICS}
    assert page.kinds == {name: spec.kind.lower() for name, spec in table.items()}
    for name, spec in table.items():
        sampled = f"{name}_count" if spec.kind == "HISTOGRAM" else name
        labels = [set(have) for n, have, _ in page.samples if n == sampled]
        assert labels, name
        assert all(have == {"worker", *spec.labels} for have in labels), (name, labels)
    assert page.value("running_rows") == page.value("waiting_rows") == 0
    assert page.value("row_capacity") == worker.config.engine.max_rows
    assert page.value("cache_corrupt_total") == page.value("observations_dropped_total") == 0
    assert 0 <= page.value("engine_silence_seconds") < worker.config.engine.heartbeat_timeout_s


def test_histograms_count_every_step_and_edit(worker: WorkerProcess, grpc: Grpc) -> None:
    page_before, _ = settled(worker, grpc)
    pending = [grpc.begin(plain_edit(num_inference_steps=5, seed=seed)) for seed in range(10)]
    metas = [edit.wait()[1] for edit in pending]
    page, counters = settled(worker, grpc, page_before.value("edit_ends_total") + 10)

    def grown(name: str, **labels: str) -> float:
        return page.value(name, **labels) - page_before.value(name, **labels)

    assert page.value("step_seconds_count") == counters["steps_total"]
    assert page.value("step_seconds_sum") == pytest.approx(counters["step_seconds_total"], rel=1e-3)
    assert grown("steps_total") == grown("step_seconds_count") >= 5
    assert grown("dense_rows_total") == 50
    assert grown("active_tokens_total") == 5 * sum(meta["total_tokens"] for meta in metas)
    assert grown("edits_total") == grown("mask_ratio_count") == grown("queue_seconds_count") == 10
    assert grown("mask_ratio_sum") == pytest.approx(sum(meta["mask_ratio"] for meta in metas))
    assert grown("edit_seconds_count", model="edit") == 10
    assert grown("edit_ends_total", model="edit", code="OK", outcome="done") == 10
    for name, spec in ENGINE_METRICS.items():
        if spec.kind == "HISTOGRAM" and not spec.labels:
            buckets = page.buckets(name)
            assert len(buckets) == len(spec.buckets) + 1
            assert list(buckets.values()) == sorted(buckets.values())
            assert buckets["+Inf"] == page.value(f"{name}_count")


def test_cached_edits_are_hits_of_their_tier(worker: WorkerProcess, grpc: Grpc) -> None:
    page_before, _ = settled(worker, grpc)
    source, mask = scene(64, 48), blob_mask(64, 48)
    answer = grpc.control(op="register", image=base64.b64encode(encode(source)).decode())
    name = answer["template_id"]
    for _ in range(3):
        _, meta = grpc.edit(edit_inputs(source, mask, cache="require"))
        assert meta["cache"] == "hit"
    page, counters = settled(worker, grpc, page_before.value("edit_ends_total") + 3)

    def grown(metric: str, **labels: str) -> float:
        return page.value(metric, **labels) - page_before.value(metric, **labels)

    assert grown("cache_hits_total", tier="device") == 3
    assert page.value("cache_hits_total", tier="device") == counters["cache_hits_total"]
    assert grown("cached_rows_total") == 6
    assert 1 <= grown("step_load_stall_seconds_count") <= 6
    assert grown("primings_total", outcome="done") == 1
    assert grown("priming_rows_total") > 0
    assert page.value("cache_bytes", tier="device") > 0
    assert page.value("cache_templates", tier="device") >= 1
    assert grown("cache_evictions_total", tier="device") == 0
    assert grpc.control(op="evict", template_id=name)["freed_bytes"] > 0
    evictions = page.value("cache_evictions_total", tier="device")

    def counted() -> bool:
        return Page(worker).value("cache_evictions_total", tier="device") > evictions

    eventually("the eviction is counted", counted)
    assert settled(worker, grpc)[0].value("cache_evictions_total", tier="device") == evictions + 1


def test_edits_with_a_due_time_are_counted_by_how_they_end(
    worker: WorkerProcess, grpc: Grpc
) -> None:
    page_before, _ = settled(worker, grpc)
    _, met = grpc.edit(plain_edit(num_inference_steps=2, deadline_ms=60_000))
    _, late = grpc.edit(plain_edit(num_inference_steps=2, deadline_ms=1, on_late="finish"))
    _, free = grpc.edit(plain_edit(num_inference_steps=2))
    with pytest.raises(InferenceServerException, match="DEADLINE_EXCEEDED"):
        grpc.edit(plain_edit(num_inference_steps=1000, deadline_ms=1))
    with pytest.raises(InferenceServerException, match=r"SETTINGS.on_late"):
        grpc.edit(plain_edit(deadline_ms=1, on_late="wait"))
    assert (met["due_ms"], met["slo"]) == (60_000, "met")
    assert 0 < met["slack_ms"] < 60_000
    assert (late["due_ms"], late["slo"], late["slack_ms"] < 0) == (1, "late", True)
    assert not {"due_ms", "slack_ms", "slo"} & set(free)
    page, _ = settled(worker, grpc, page_before.value("edit_ends_total") + 5)
    grown = {
        outcome: page.value("slo_total", outcome=outcome)
        - page_before.value("slo_total", outcome=outcome)
        for outcome in SLO_OUTCOMES
    }
    assert grown == {"met": 1, "late": 1, "deadline": 1, "refused": 0, "failed": 0}
    assert page.value("slack_seconds_count") - page_before.value("slack_seconds_count") == 2


def test_each_way_of_ending_is_counted_and_has_one_line(worker: WorkerProcess, grpc: Grpc) -> None:
    page_before, _ = settled(worker, grpc)
    _, meta = grpc.edit(plain_edit(request_id="log-done", num_inference_steps=3))
    with pytest.raises(InferenceServerException, match="INVALID_REQUEST"):
        grpc.edit({**plain_edit(request_id="log-refused"), "MASK": b"no picture"})
    with pytest.raises(InferenceServerException, match="DEADLINE_EXCEEDED"):
        grpc.edit(plain_edit(request_id="log-late", num_inference_steps=1000, deadline_ms=300))
    cancelled = grpc.begin(plain_edit(request_id="log-cancelled", num_inference_steps=1000))
    eventually("it runs", lambda: grpc.control(op="status")["running"])
    cancelled.call.cancel()
    eventually("its row is free", lambda: not grpc.control(op="status")["running"])

    end_record = only_end(worker, "log-done")
    assert (end_record["level"], end_record["outcome"], end_record["code"]) == (
        "INFO",
        "done",
        "OK",
    )
    for name in ("seed", "mask_ratio", "active_tokens", "steps", "cache", "template_id"):
        assert end_record[name] == meta[name], name
    assert end_record["denoise_ms"] == meta["timings_ms"]["denoise"]
    assert end_record["total_ms"] > end_record["denoise_ms"]
    refused = only_end(worker, "log-refused")
    assert (refused["level"], refused["outcome"]) == ("INFO", "refused")
    assert refused["error"].startswith("MASK: ")
    late = only_end(worker, "log-late")
    assert (late["level"], late["code"]) == ("WARNING", "DEADLINE_EXCEEDED")
    assert late["total_ms"] > 0  # refused at once where the worker has measured its steps
    stopped = only_end(worker, "log-cancelled")
    assert (stopped["level"], stopped["code"]) == ("INFO", "CANCELLED")

    page, _ = settled(worker, grpc, page_before.value("edit_ends_total") + 4)
    for outcome, code in ENDS:
        labels = {"model": "edit", "outcome": outcome, "code": code}
        grown = page.value("edit_ends_total", **labels) - page_before.value(
            "edit_ends_total", **labels
        )
        expected = ("OK", "INVALID_REQUEST", "DEADLINE_EXCEEDED", "CANCELLED")
        assert grown == (code in expected), labels


def test_an_edit_of_a_stream_is_its_fronts(worker: WorkerProcess, grpc: Grpc) -> None:
    page_before, _ = settled(worker, grpc)
    with stream(worker.grpc_url) as opened:
        opened.send(plain_edit(request_id="log-stream", progress=True))
        while opened.next()[1]["event"] != "final":
            pass
    assert only_end(worker, "log-stream")["model"] == "edit_stream"
    page, _ = settled(worker, grpc, page_before.value("edit_ends_total") + 1)
    labels = {"model": "edit_stream", "code": "OK"}
    assert (
        page.value("edit_ends_total", **labels)
        == page_before.value("edit_ends_total", **labels) + 1
    )


def test_every_line_of_the_log_is_whole_and_says_no_prompt(
    worker: WorkerProcess, grpc: Grpc
) -> None:
    grpc.edit(plain_edit(request_id="log-prompt"))
    only_end(worker, "log-prompt")
    lines = lines_of(worker)
    for line in lines:
        assert {"time", "level", "worker", "model", "logger", "message"} <= set(line), line
        assert line["worker"] == worker.name
    [ready] = [line for line in lines if line.get("event") == "worker"]
    assert (ready["model"], ready["state"]) == ("supervisor", "ready")
    assert "a red star" not in log_of(worker).read_text("utf-8")
