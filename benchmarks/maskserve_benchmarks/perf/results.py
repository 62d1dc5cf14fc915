"""Figures of one run, from the two files that perf_analyzer writes.

The profile export has the time of every request and response; all figures are taken from there.
The CSV report is kept beside them, and differs in two ways. Its throughput is the number of
requests over a window that ends up to two seconds late: 100 requests in 5.0 s are reported as
16.7/s. And its latencies of a decoupled model are to the last response, though perf_analyzer 2.50
says that they are to the first.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from maskserve_benchmarks.perf.errors import PerfError

PERCENTILES = (50, 90, 95, 99)
# Quotation marks inside the embedded pictures are escaped, so these never match there.
_REQUEST = re.compile(rb'\{"timestamp":(\d+),')
_RESPONSES = re.compile(rb',"response_timestamps":\[([\d,]*)\]')
_META = re.compile(rb'"META":("(?:[^"\\]|\\.)*")')
_THREAD_ERROR = re.compile(r"Thread \[\d+\] had error: (.+)")
_PLAIN_ERROR = re.compile(r"^error: (.+)", re.MULTILINE | re.IGNORECASE)
_MS = 1e-6  # nanoseconds to milliseconds


@dataclass(frozen=True, slots=True)
class Latencies:
    """Milliseconds from sending a request to a response."""

    mean: float
    p50: float
    p90: float
    p95: float
    p99: float

    def to_json(self) -> dict[str, float]:
        return {name: round(getattr(self, name), 2) for name in self.__slots__}


@dataclass(frozen=True, slots=True)
class Report:
    """perf_analyzer's CSV report of one load."""

    latencies: Latencies
    requests_per_s: float

    def to_json(self) -> dict[str, float]:
        return {"requests_per_s": self.requests_per_s, **self.latencies.to_json()}


@dataclass(frozen=True, slots=True)
class Stamps:
    """Times of one run's requests in nanoseconds, in the order of sending."""

    sent: tuple[int, ...]
    responses: tuple[tuple[int, ...], ...]
    """Times of the responses of each request; the last one is its answer."""
    metas: tuple[dict[str, Any], ...] = ()
    """META of each request's answer; empty if there is none."""

    @property
    def sent_per_s(self) -> float:
        """Return the rate of the arrivals between the first and the last."""
        span = (self.sent[-1] - self.sent[0]) / 1e9
        return (len(self.sent) - 1) / span if span else 0.0

    @property
    def answered_per_s(self) -> float:
        """Return the number of requests over the time from the first request to the last answer."""
        return len(self.sent) / ((max(r[-1] for r in self.responses) - self.sent[0]) / 1e9)

    @property
    def responses_per_request(self) -> float:
        return sum(map(len, self.responses)) / len(self.sent)

    def latencies(self, response: int = -1) -> Latencies:
        """Return the latencies of each request's response with this index: 0 the first, -1 the
        answer.
        """
        pairs = zip(self.sent, self.responses, strict=True)
        return _latencies([(responses[response] - start_ns) * _MS for start_ns, responses in pairs])


def parse_report(text: str) -> Report:
    """Read the CSV report of one load, written with --verbose-csv.

    Raises:
        PerfError: the text is not such a report.
    """
    rows = list(csv.DictReader(text.splitlines()))
    if len(rows) != 1:
        raise PerfError(f"perf_analyzer's report has {len(rows)} rows, not one")
    try:
        values = {name: float(value) for name, value in rows[0].items() if value}
        points = {f"p{p}": values[f"p{p} latency"] / 1e3 for p in PERCENTILES}
        mean = values["Avg latency"] / 1e3
        return Report(Latencies(mean, **points), values["Inferences/Second"])
    except (KeyError, ValueError, TypeError) as error:
        raise PerfError(f"perf_analyzer's report cannot be read: {error!r}") from error


def parse_stamps(export: bytes) -> Stamps:
    """Return the times in a profile export. The export is not decoded, because it holds pictures as
    invalid UTF-8.

    Raises:
        PerfError: a request has no response.
    """
    begins = list(_REQUEST.finditer(export))
    send_times = [int(match[1]) for match in begins]
    responses = [
        tuple(int(stamp) for stamp in match.split(b",") if stamp)
        for match in _RESPONSES.findall(export)
    ]
    if not send_times or len(send_times) != len(responses) or not all(responses):
        answered = sum(map(bool, responses))
        raise PerfError(
            f"perf_analyzer's export has {len(send_times)} requests and {answered} answers"
        )
    starts = [match.start() for match in begins]
    pieces = zip(starts, [*starts[1:], len(export)], strict=True)
    metas = [_meta(_META.findall(export, start, end)) for start, end in pieces]
    ordered = sorted(zip(send_times, responses, metas, strict=True), key=lambda one: one[0])
    return Stamps(*zip(*ordered, strict=True))


def _meta(matches: Sequence[bytes]) -> dict[str, Any]:
    """Return the last META of a request."""
    return dict(json.loads(json.loads(matches[-1]))) if matches else {}


def parse_errors(output: str) -> list[str]:
    """Return the different errors that perf_analyzer printed, in its order."""
    lines = _THREAD_ERROR.findall(output) or _PLAIN_ERROR.findall(output)
    return list(dict.fromkeys(line.strip() for line in lines))


def _latencies(values: Sequence[float]) -> Latencies:
    # Percentiles as perf_analyzer chooses them: each is the latency of a request.
    points = np.percentile(values, PERCENTILES, method="nearest")
    return Latencies(float(np.mean(values)), *(float(point) for point in points))
