"""scripts/bench perf_analyzer with the real tool against a real Triton, a few requests each."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from maskserve_benchmarks.checkout import CHECKOUT
from maskserve_benchmarks.perf.errors import PerfError
from maskserve_benchmarks.perf.tool import NAME, find_tool
from maskserve_serving.worker import WorkerProcess
from tests.support.calls import Grpc, eventually

SCRIPT = [sys.executable, str(CHECKOUT / "scripts" / "bench"), "perf_analyzer"]
LATENCIES = {"mean", "p50", "p90", "p95", "p99"}
REQUESTS = 6
RATE = 2.0


@pytest.fixture(scope="module", autouse=True)
def _installed() -> None:
    try:
        find_tool(None, CHECKOUT / ".cache" / "perf_analyzer")
    except PerfError as error:
        pytest.skip(str(error))


def command(worker: WorkerProcess, *arguments: str) -> list[str]:
    http = worker.http_url.removeprefix("http://")
    where = ["--url", worker.grpc_url, "--http-url", http]
    edits = ["--size", "64", "--steps", "2", "--entries", "4", "--templates", "2", "--cache", "off"]
    return [*SCRIPT, *where, *edits, "--warmup", "1", "--timeout", "30", *arguments]


def edits_of(grpc: Grpc) -> int:
    return int(grpc.control(op="status")["counters"]["edits_total"])


def test_every_front_and_protocol(worker: WorkerProcess, grpc: Grpc, tmp_path: Path) -> None:
    count_before = edits_of(grpc)
    results = tmp_path / "perf.json"
    load = ["--request-rate", f"{RATE:g}", "--requests", str(REQUESTS), "--progress"]
    ran = subprocess.run(
        command(worker, *load, "--json", str(results), "--hardware", "here"),
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    report = json.loads(results.read_text(encoding="utf-8"))
    assert (report["hardware"], report["size"], report["steps"]) == ("here", 64, 2)
    assert all(report[key] for key in ("command", "date", "tool", "model", "mask_ratio"))
    runs = {(run["front"], run["protocol"]): run for run in report["runs"]}
    assert set(runs) == {("edit", "http"), ("edit", "grpc"), ("edit_stream", "grpc")}
    for run in runs.values():
        check(run)
    # The counter is in the status record, which the engine rewrites at its own pace.
    eventually("all edits are counted", lambda: edits_of(grpc) - count_before >= 3 * REQUESTS)
    stream = runs["edit_stream", "grpc"]
    assert stream["responses_per_request"] == 2  # after a step, and the answer
    assert stream["first_response_ms"]["mean"] <= stream["final_response_ms"]["mean"]
    assert "edit_stream (gRPC stream)" in ran.stdout


@pytest.mark.parametrize(("kind", "references"), [("edit", 1), ("generate", 0)])
def test_edits_of_several_pictures_and_pictures_from_a_text(
    klein_worker: WorkerProcess, tmp_path: Path, kind: str, references: int
) -> None:
    results = tmp_path / "perf.json"
    load = ["--front", "edit", "--protocol", "grpc", "--request-rate", f"{RATE:g}"]
    ran = subprocess.run(
        command(
            klein_worker, *load, "--requests", str(REQUESTS), "--kind", kind,
            "--references", str(references), "--json", str(results), "--hardware", "here",
        ),
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout + ran.stderr
    report = json.loads(results.read_text(encoding="utf-8"))
    assert (report["kind"], report["references"], report["size"]) == (kind, references, 64)
    (run,) = report["runs"]
    check(run)


def check(run: dict[str, Any]) -> None:
    """The figures of one run are there and agree with one another."""
    assert run["errors"] == []
    assert (run["request_rate"], run["arrivals"], run["requests"]) == (RATE, "poisson", REQUESTS)
    assert run["sent_per_s"] == pytest.approx(RATE, rel=0.5)
    assert run["answered_per_s"] > 0
    kinds = ["answer_ms"]
    if run["front"] == "edit_stream":
        kinds = ["first_response_ms", "final_response_ms"]
    for kind in kinds:
        times = run[kind]
        assert set(times) == LATENCIES
        assert 0 < times["p50"] <= times["p90"] <= times["p95"] <= times["p99"]
    # What the tool says of the same requests: its latencies are to the last response.
    report = run["perf_analyzer_reports"]
    assert report["mean"] == pytest.approx(run[kinds[-1]]["mean"], abs=0.02)
    assert report["p99"] == pytest.approx(run[kinds[-1]]["p99"], abs=0.02)
    assert run["command"].startswith("perf_analyzer -m edit")


def test_a_refused_edit_is_in_the_results(worker: WorkerProcess, tmp_path: Path) -> None:
    results = tmp_path / "perf.json"
    options = ["--front", "edit", "--protocol", "grpc", "--concurrency", "1", "--requests", "2"]
    # A later option of the same name wins.
    ran = subprocess.run(
        command(worker, *options, "--warmup", "0", "--steps", "100000", "--json", str(results)),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ran.returncode == 1
    (run,) = json.loads(results.read_text(encoding="utf-8"))["runs"]
    assert "[INVALID_REQUEST] SETTINGS.num_inference_steps" in run["errors"][0]
    assert "[INVALID_REQUEST]" in ran.stdout


def measures(process: psutil.Process) -> bool:
    """Whether it is the tool, and not asked for its version only."""
    try:
        return process.name() == NAME and "-m" in process.cmdline()
    except psutil.NoSuchProcess:
        return False


def test_ctrl_c_ends_the_tool(worker: WorkerProcess) -> None:
    script = subprocess.Popen(
        command(worker, "--request-rate", "1", "--requests", "1000"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    tools: list[psutil.Process] = []

    def running() -> bool:
        children = psutil.Process(script.pid).children(recursive=True)
        tools[:] = [child for child in children if measures(child)]
        return bool(tools)

    try:
        eventually("the tool runs", running, 30.0)
        script.send_signal(signal.SIGINT)
        output, _ = script.communicate(timeout=20)
    finally:
        script.kill()
    assert script.returncode == 130, output
    assert "interrupted" in output
    assert not any(tool.is_running() for tool in tools)
