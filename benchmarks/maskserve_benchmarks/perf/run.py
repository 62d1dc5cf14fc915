"""One measurement: perf_analyzer run once, against one front, under one load."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from maskserve_benchmarks.perf.errors import PerfError
from maskserve_benchmarks.perf.load import Load, Target
from maskserve_benchmarks.perf.results import (
    Report,
    Stamps,
    parse_errors,
    parse_report,
    parse_stamps,
)
from maskserve_benchmarks.perf.tool import Tool
from maskserve_client.interrupts import deferred

_RETRIES = 2


@dataclass(frozen=True, slots=True)
class Measurement:
    """One run of perf_analyzer: target, load and inputs."""

    target: Target
    load: Load
    url: str
    """host:port for the target's protocol."""
    requests: int
    """Number of edits to send; the run ends when all are answered."""
    inputs: Path
    """File with the edits."""
    seed: int
    """Seed of the arrivals."""
    limit_s: float
    """Seconds that the run may take."""

    def arguments(self, folder: Path) -> list[str]:
        """Return perf_analyzer's arguments without its output files; its input files go to
        `folder`.
        """
        load = self.load.arguments(self.requests, self.seed, folder)
        options = ["-u", self.url, "--request-count", str(self.requests)]
        return [*self.target.arguments(), *load, *options, "--input-data", str(self.inputs)]


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a measurement: figures or errors."""

    measurement: Measurement
    command: str
    """The command that ran. Files appear by name only, because they were in temporary folders."""
    report: Report | None = None
    stamps: Stamps | None = None
    errors: tuple[str, ...] = ()
    """perf_analyzer stops at a request's first error, so a run has either errors or figures."""
    late: bool = False
    """Whether the run was stopped at its limit."""

    def to_json(self) -> dict[str, Any]:
        """Return the run as it appears in the results; the keys name the event that ends each
        latency.
        """
        target, load = self.measurement.target, self.measurement.load
        run: dict[str, Any] = {
            "front": target.front,
            "protocol": target.protocol,
            load.kind: load.value,
            "arrivals": "poisson" if load.kind == "request_rate" else "closed loop",
            "requests": self.measurement.requests,
            "errors": list(self.errors),
        }
        if self.report is not None and self.stamps is not None:
            run["sent_per_s"] = round(self.stamps.sent_per_s, 3)
            run["answered_per_s"] = round(self.stamps.answered_per_s, 3)
            if target.streams:
                run["first_response_ms"] = self.stamps.latencies(0).to_json()
                run["final_response_ms"] = self.stamps.latencies().to_json()
                run["responses_per_request"] = round(self.stamps.responses_per_request, 2)
            else:
                run["answer_ms"] = self.stamps.latencies().to_json()
            run["perf_analyzer_reports"] = self.report.to_json()
        run["command"] = self.command
        return run


def start(tool: Tool, arguments: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [str(tool.binary), *arguments],
        env=tool.environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        # perf_analyzer must not receive Ctrl-C: it would go on until every request is sent.
        start_new_session=True,
    )


def measure(tool: Tool, measurement: Measurement) -> Outcome:
    """Run perf_analyzer, and up to twice more if it did not finish in time.

    perf_analyzer 2.50 can hang forever. One of its sending threads sometimes misses the signal to
    start, because its condition variable is notified without the lock. The other threads then wait
    for it.

    Args:
        tool: perf_analyzer.
        measurement: the run to make.

    Raises:
        PerfError: perf_analyzer ended without its report, or its output is unknown.
    """
    outcome = measure_once(tool, measurement)
    for _ in range(_RETRIES):
        if outcome.late:
            print(f"{measurement.target}: {outcome.errors[0]}, once more", flush=True)
            outcome = measure_once(tool, measurement)
    return outcome


def measure_once(
    tool: Tool,
    measurement: Measurement,
    launch: Callable[[Tool, list[str]], subprocess.Popen[str]] = start,
) -> Outcome:
    """Run perf_analyzer. On an interruption, stop it before the interruption continues.

    Args:
        tool: perf_analyzer.
        measurement: the run to make.
        launch: starts perf_analyzer with arguments.

    Raises:
        PerfError: perf_analyzer ended without its report, or its output is unknown.
    """
    with tempfile.TemporaryDirectory() as scratch:
        report, export = Path(scratch) / "report.csv", Path(scratch) / "export.json"
        arguments = measurement.arguments(Path(scratch))
        words = [Path(word).name if os.path.isabs(word) else word for word in arguments]
        command = " ".join(["perf_analyzer", *words])
        output_options = ["--verbose-csv", "-f", str(report), "--profile-export-file", str(export)]
        process: subprocess.Popen[str] | None = None
        try:
            with deferred():
                process = launch(tool, [*arguments, *output_options])
            output, _ = process.communicate(timeout=measurement.limit_s)
        except subprocess.TimeoutExpired:
            late = f"not done after {measurement.limit_s:g} s"
            return Outcome(measurement, command, errors=(late,), late=True)
        finally:
            if process is not None and process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)  # also the children of a wrapper script
                process.communicate()
        errors = parse_errors(output)
        if process.returncode != 0 or errors:
            if not errors:
                last = output.strip().splitlines()[-1:] or ["it said nothing"]
                errors = [f"perf_analyzer ended with exit code {process.returncode}: {last[0]}"]
            return Outcome(measurement, command, errors=tuple(errors))
        if not (report.is_file() and export.is_file()):
            raise PerfError("perf_analyzer ended without an error and without its report")
        figures = parse_report(report.read_text(encoding="utf-8"))
        return Outcome(measurement, command, figures, parse_stamps(export.read_bytes()))
