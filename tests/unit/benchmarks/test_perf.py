"""The parts of the perf_analyzer script that need neither the tool nor a server."""

from __future__ import annotations

import argparse
import io
import json
import signal
import struct
import subprocess
import sys
from base64 import b64decode
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from maskserve_benchmarks.perf import command, tool
from maskserve_benchmarks.perf.errors import PerfError
from maskserve_benchmarks.perf.inputs import (
    TENSORS,
    InputOptions,
    draw_mask,
    draw_ratios,
    find_photos,
    make_edits,
    pack,
    write_edits,
)
from maskserve_benchmarks.perf.load import Load, Target, parse_loads, targets
from maskserve_benchmarks.perf.results import parse_errors, parse_report, parse_stamps
from maskserve_benchmarks.perf.run import Measurement, measure, measure_once, start
from maskserve_benchmarks.perf.server import running_server
from maskserve_benchmarks.simulator.workload import MIXES, draw_gaps
from maskserve_common.contracts.request import EditKind
from maskserve_common.contracts.settings import parse_settings

ROOT = Path(__file__).parents[3]
PHOTOS = find_photos(ROOT / "assets")


def pixels(png: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(png)))


def unpack(text: str) -> bytes:
    """The payload of an input, which has its length in front."""
    raw = b64decode(text, validate=True)
    assert struct.unpack("<I", raw[:4]) == (len(raw) - 4,)
    return raw[4:]


@pytest.mark.parametrize("kind", ["edit", "generate"])
def test_edits_without_a_mask_differ_in_nothing_else(kind: EditKind) -> None:
    options = InputOptions(size=64, entries=6, templates=3, settings={"strength": 0.5})
    masked, edits = make_edits(options, PHOTOS), make_edits(replace(options, kind=kind), PHOTOS)
    for edit, other in zip(edits, masked, strict=True):
        tensors = edit.tensors()
        assert tensors["MASK"] == b""
        assert tensors["IMAGE"] == (other.image if kind == "edit" else b"")
        assert (edit.prompt, edit.mask_ratio) == (other.prompt, 1.0)
        assert edit.settings == {**other.settings, "size": "64x64"}
        assert parse_settings(tensors["SETTINGS"]).answer_size == (64, 64)
    with pytest.raises(PerfError, match="--kind"):
        InputOptions(kind="repaint")  # type: ignore[arg-type]


def test_references_follow_the_source(tmp_path: Path) -> None:
    """Edits share pictures, and nothing else of an edit depends on how many it has."""
    options = InputOptions(size=64, entries=6, templates=3, kind="edit")
    alone, edits = make_edits(options, PHOTOS), make_edits(replace(options, references=2), PHOTOS)
    write_edits(edits, tmp_path / "edits.json")
    data = json.loads((tmp_path / "edits.json").read_text(encoding="utf-8"))["data"]
    for edit, single, entry in zip(edits, alone, data, strict=True):
        assert replace(edit, references=()) == single
        assert len({edit.image, *edit.references}) == 3
        assert entry["IMAGE"] == {"b64": pack(edit.image, *edit.references), "shape": [3]}
    for kind, most in (("edit", 9), ("generate", 0)):
        with pytest.raises(PerfError, match=f"--references: {most + 1} is not from 0 to {most}"):
            InputOptions(kind=kind, references=most + 1)  # type: ignore[arg-type]


@given(st.binary(max_size=300))
def test_a_payload_comes_back_and_its_length_is_in_front(payload: bytes) -> None:
    raw = b64decode(pack(payload))
    assert raw[:4] == struct.pack("<I", len(payload))
    assert raw[4:] == payload


def test_the_file_holds_the_edits(tmp_path: Path) -> None:
    settings = {"num_inference_steps": 3, "cache": "off"}
    options = InputOptions(size=64, entries=12, templates=4, settings=settings)
    edits = make_edits(options, PHOTOS)
    assert edits == make_edits(options, PHOTOS)
    write_edits(edits, tmp_path / "edits.json")
    data = json.loads((tmp_path / "edits.json").read_text(encoding="utf-8"))["data"]
    assert all(value["shape"] == [1] for entry in data for value in entry.values())
    entries = [{name: unpack(value["b64"]) for name, value in entry.items()} for entry in data]
    assert entries == [edit.tensors() for edit in edits]
    assert len({tuple(entry.values()) for entry in entries}) == 12
    assert len({entry["IMAGE"] for entry in entries}) == 4
    for number, (entry, edit) in enumerate(zip(entries, edits, strict=True)):
        assert tuple(entry) == TENSORS
        assert pixels(entry["IMAGE"]).shape == (64, 64, 3)
        mask = pixels(entry["MASK"])
        assert set(np.unique(mask)) <= {0, 255}
        assert (mask == 255).mean() == edit.mask_ratio
        edit_settings = parse_settings(entry["SETTINGS"])
        assert (edit_settings.seed, edit_settings.num_inference_steps, edit_settings.cache) == (
            number,
            3,
            "off",
        )
        assert entry["PROMPT"].decode() == edit.prompt


@pytest.mark.parametrize("mix", sorted(MIXES))
def test_a_few_dozen_masks_have_the_published_mean(mix: str) -> None:
    ratios = draw_ratios(mix, 32, np.random.default_rng(1))
    assert ratios.mean() == pytest.approx(MIXES[mix].mean, rel=0.1)
    ranked = np.sort(ratios)
    assert MIXES[mix].ratios(np.array([15 / 32]))[0] <= ranked[15]
    assert ranked[16] <= MIXES[mix].ratios(np.array([17 / 32]))[0]


@given(st.integers(16, 90), st.floats(0.0, 1.0), st.integers(0, 2**32))
def test_a_mask_has_its_ratio_to_the_pixel(size: int, ratio: float, seed: int) -> None:
    mask = draw_mask(size, ratio, np.random.default_rng(seed))
    assert mask.shape == (size, size)
    assert mask.sum() == max(round(ratio * size**2), 1)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"size": 8}, "--size: 8 is not from 16 to 4096"),
        ({"entries": 0}, "--entries: 0 is not"),
        ({"mix": "x"}, "--mix: 'x' is not one of"),
    ],
)
def test_options_out_of_range_are_named(values: dict[str, int | str], message: str) -> None:
    with pytest.raises(PerfError, match=message):
        InputOptions(**values)  # type: ignore[arg-type]


@pytest.mark.parametrize("count", [2, 10, 400])
def test_arrivals_come_at_the_rate_asked_for(count: int) -> None:
    gaps = draw_gaps(2.5, count, np.random.default_rng(3))
    assert len(gaps) == count
    assert gaps[1:].mean() == pytest.approx(0.4)


def test_arrivals_are_poisson() -> None:
    gaps = draw_gaps(1.0, 4000, np.random.default_rng(3))
    assert gaps.std() == pytest.approx(1.0, rel=0.1)
    assert (gaps < np.log(2)).mean() == pytest.approx(0.5, abs=0.05)


def test_a_load_is_spelled_for_the_tool(tmp_path: Path) -> None:
    rate = Load("request_rate", 0.5)
    assert rate.arguments(4, 0, tmp_path) == ["--request-intervals", f"{tmp_path}/arrivals.txt"]
    written = [int(line) for line in (tmp_path / "arrivals.txt").read_text().splitlines()]
    assert sum(written[1:]) == pytest.approx(6e6, abs=3)
    built_in = Load("request_rate", 0.5, built_in=True).arguments(4, 0, tmp_path)
    assert built_in == ["--request-rate-range", "0.5", "--request-distribution", "poisson"]
    assert Load("concurrency", 8.0).arguments(4, 0, tmp_path) == ["--concurrency-range", "8"]


def test_loads_are_read_from_text() -> None:
    assert parse_loads("request_rate", "0.5, 2") == [
        Load("request_rate", 0.5),
        Load("request_rate", 2.0),
    ]
    for kind, text in [("request_rate", "nan"), ("request_rate", "1,"), ("concurrency", "1.5")]:
        option = kind.replace("_", "-")
        with pytest.raises(PerfError, match=rf"--{option}: '.*' is not accepted"):
            parse_loads(kind, text)


def test_each_front_has_its_protocols() -> None:
    everything = [("edit", "http"), ("edit", "grpc"), ("edit_stream", "grpc")]
    assert [(t.front, t.protocol) for t in targets(None, None)] == everything
    assert targets(None, "http") == [Target("edit", "http")]
    assert targets("edit_stream", None) == [Target("edit_stream", "grpc")]
    with pytest.raises(PerfError, match="use --protocol grpc"):
        targets("edit_stream", "http")


def test_addresses_of_a_running_worker() -> None:
    assert running_server("localhost:9001", None).http == "localhost:9000"
    assert running_server("h:9001", "g:80").url("http") == "g:80"
    for url in ("localhost", "http://localhost:9001", ":9001", "h:0"):
        with pytest.raises(PerfError, match="give host:port"):
            running_server(url, None)


# Written by perf_analyzer 2.50, shortened.
REPORT = """\
Concurrency,Inferences/Second,Response Throughput,Client Send,Network+Server Send/Recv,Server Queue\
,Server Compute Input,Server Compute Infer,Server Compute Output,Client Recv,p50 latency\
,p90 latency,p95 latency,p99 latency,Avg latency,request/response,response wait
1,0.312242,1.87345,0,3004821,41,35,445,9,0,2548226,4373166,4373166,4373166,3005352,0,0
"""
EXPORT = (
    b'{"experiments":[{"experiment":{"mode":"concurrency","value":1},"requests":['
    b'{"timestamp":1000000000,"request_inputs":{"PROMPT":"\\"timestamp\\":5,","IMAGE":"\x89PNG\xff"},'
    b'"response_timestamps":[1100000000,1400000000],"response_outputs":[{"META":"{\\"a\\":1}"}]},'
    b'{"timestamp":1500000000,"request_inputs":{},"response_timestamps":[1600000000,1700000000],'
    b'"response_outputs":[]}],"window_boundaries":[1,2]}],"version":""}'
)


def test_the_report_is_read() -> None:
    report = parse_report(REPORT)
    assert report.requests_per_s == 0.312242
    assert report.to_json()["p50"] == 2548.23
    assert (report.latencies.mean, report.latencies.p99) == (3005.352, 4373.166)
    for broken in ("", REPORT.replace("p95", "p94"), REPORT + REPORT.splitlines()[1]):
        with pytest.raises(PerfError, match="report"):
            parse_report(broken)


def test_times_are_read_from_the_export() -> None:
    stamps = parse_stamps(EXPORT)
    assert stamps.sent == (1000000000, 1500000000)
    assert (stamps.latencies(0).mean, stamps.latencies().mean) == (100.0, 300.0)
    assert (stamps.latencies().p50, stamps.latencies().p99) in [(200.0, 400.0), (400.0, 400.0)]
    assert stamps.sent_per_s == 2.0
    assert stamps.answered_per_s == pytest.approx(2 / 0.7)
    assert stamps.responses_per_request == 2
    assert stamps.metas == ({"a": 1}, {})
    with pytest.raises(PerfError, match="2 requests and 1 answers"):
        parse_stamps(EXPORT.replace(b"[1600000000,1700000000]", b"[]"))


def test_errors_are_found_in_what_the_tool_prints() -> None:
    tool_output = "Request Rate: 4\nThread [0] had error: [OVERLOADED] full\nThread [1] had error: "
    assert parse_errors(tool_output + "[OVERLOADED] full\n\n") == ["[OVERLOADED] full"]
    assert parse_errors("error: failed to get model metadata: no\n") == [
        "failed to get model metadata: no"
    ]
    assert parse_errors("    Error: bad flag\nError: bad flag\nUsage: …\n") == ["bad flag"]
    assert parse_errors("p99 latency: 3 usec\n") == []


def program(folder: Path, text: str) -> Path:
    path = folder / tool.NAME
    path.write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize(
    ("text", "limit_s", "error"),
    [
        (
            "echo 'Thread [0] had error: [ENGINE_FAILED] gone' >&2; exit 99",
            30.0,
            "[ENGINE_FAILED] gone",
        ),
        ("echo strange; exit 3", 30.0, "perf_analyzer ended with exit code 3: strange"),
        ("sleep 30", 0.5, "not done after 0.5 s"),
    ],
)
def test_a_run_that_fails_says_why(tmp_path: Path, text: str, limit_s: float, error: str) -> None:
    target, load = Target("edit", "http"), Load("concurrency", 1.0)
    measurement = Measurement(target, load, "localhost:1", 2, tmp_path / "edits.json", 0, limit_s)
    outcome = measure(tool.Tool(program(tmp_path, text), None, "fake"), measurement)
    run = outcome.to_json()
    assert run["errors"] == [error]
    assert "answer_ms" not in run
    assert str(tmp_path) not in run["command"]


def test_a_tool_that_does_nothing_is_started_again(tmp_path: Path) -> None:
    target, load = Target("edit", "http"), Load("concurrency", 1.0)
    measurement = Measurement(target, load, "localhost:1", 2, tmp_path / "edits.json", 0, 0.5)
    marker = tmp_path / "once"
    text = f"if [ -e {marker} ]; then echo strange; exit 3; fi; touch {marker}; sleep 30"
    outcome = measure(tool.Tool(program(tmp_path, text), None, "fake"), measurement)
    assert outcome.errors == ("perf_analyzer ended with exit code 3: strange",)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interruption_while_the_tool_starts_ends_it(
    tmp_path: Path, number: signal.Signals
) -> None:
    started: list[subprocess.Popen[str]] = []

    def interrupted(of: tool.Tool, arguments: list[str]) -> subprocess.Popen[str]:
        started.append(start(of, arguments))
        signal.raise_signal(number)
        return started[0]

    target, load = Target("edit", "http"), Load("concurrency", 1.0)
    measurement = Measurement(target, load, "localhost:1", 2, tmp_path / "edits.json", 0, 30.0)
    fake = tool.Tool(program(tmp_path, "exec sleep 60"), None, "fake")
    # As the script has it; a SIGTERM is an interruption too.
    previous_handler = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            measure_once(fake, measurement, interrupted)
    finally:
        signal.signal(signal.SIGTERM, previous_handler)
        (process,) = started
        is_running = process.poll() is None
        with process:  # closes its pipe
            process.kill()
    assert not is_running


def test_a_named_tool_is_used_and_a_broken_one_refused(tmp_path: Path) -> None:
    works = program(tmp_path, "echo 'Perf Analyzer Version 2.66.0 (commit abc)'")
    perf_tool = tool.find_tool(works, tmp_path / "cache")
    assert (perf_tool.binary, perf_tool.version) == (
        works,
        "Perf Analyzer Version 2.66.0 (commit abc)",
    )
    for text, why in [("exit 127", "does not start: exit code 127"), ("true", "is not perf_an")]:
        with pytest.raises(PerfError, match=f"--tool: .*{why}"):
            tool.find_tool(program(tmp_path, text), tmp_path / "cache")
    with pytest.raises(PerfError, match="--tool: there is no file"):
        tool.find_tool(tmp_path / "none", tmp_path / "cache")


@pytest.mark.parametrize(
    ("system", "machine", "libc", "why"),
    [
        ("Darwin", "arm64", ("", ""), "this is Darwin on arm64"),
        ("Linux", "aarch64", ("glibc", "2.36"), "this is Linux on aarch64"),
        ("Linux", "x86_64", ("", ""), "another libc"),
        ("Linux", "x86_64", ("glibc", "2.31"), "glibc 2.31"),
    ],
)
def test_other_systems_are_refused(
    system: str, machine: str, libc: tuple[str, str], why: str
) -> None:
    tool.check_platform("Linux", "x86_64", ("glibc", "2.36"))
    with pytest.raises(PerfError, match=f"{why}.*--tool"):
        tool.check_platform(system, machine, libc)


def test_without_a_package_index_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    with pytest.raises(PerfError, match=r"cannot install perf_analyzer: pip cannot download trit"):
        tool.find_tool(None, tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_the_help_has_examples() -> None:
    from subprocess import run

    script = [sys.executable, str(ROOT / "scripts" / "bench"), "perf_analyzer"]
    result = run([*script, "--help"], capture_output=True, text=True, check=True)
    assert "python scripts/bench perf_analyzer --json" in result.stdout


class Warmed:
    """Counts the edits that are sent to a server before it is measured."""

    def __init__(self) -> None:
        self.sent: list[object] = []

    def warm(self, edits: list[object]) -> None:
        self.sent += edits


@pytest.mark.parametrize(
    ("requests", "warmup", "sent"), [(8, None, 8), (60, None, 32), (8, 0, 0), (8, 40, 40)]
)
def test_no_edit_is_sent_that_is_not_measured(requests: int, warmup: int | None, sent: int) -> None:
    server, options = Warmed(), argparse.Namespace(requests=requests, warmup=warmup)
    command.warm(server, list(range(32)), options)  # type: ignore[arg-type]
    assert len(server.sent) == sent
