"""The load that perf_analyzer sends: a front, a protocol and an arrival process."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from maskserve_benchmarks.perf.errors import PerfError
from maskserve_benchmarks.simulator.workload import draw_gaps

FRONTS = ("edit", "edit_stream")
PROTOCOLS = ("http", "grpc")


@dataclass(frozen=True, slots=True)
class Target:
    """A front and a protocol."""

    front: str
    protocol: str

    @property
    def streams(self) -> bool:
        return self.front == "edit_stream"

    def arguments(self) -> list[str]:
        """Return perf_analyzer's arguments for this target.

        Calls are asynchronous. With synchronous calls perf_analyzer keeps a few threads that wait
        for responses. Under a request rate it then sends the edits behind a slow one late, and the
        figures do not include their waiting time.
        """
        how = "--streaming" if self.streams else "--async"
        return ["-m", self.front, "-i", self.protocol, how]

    def __str__(self) -> str:
        return f"{self.front} ({'gRPC stream' if self.streams else self.protocol})"


COMBINATIONS = (Target("edit", "http"), Target("edit", "grpc"), Target("edit_stream", "grpc"))


def targets(front: str | None, protocol: str | None) -> list[Target]:
    """Return the combinations of a front and a protocol; None stands for any.

    Raises:
        PerfError: perf_analyzer cannot measure this combination.
    """
    if (front, protocol) == ("edit_stream", "http"):
        raise PerfError(
            "--protocol http: edit_stream sends several responses, which perf_analyzer takes over "
            "gRPC streaming only; use --protocol grpc"
        )
    return [
        target
        for target in COMBINATIONS
        if front in (None, target.front) and protocol in (None, target.protocol)
    ]


@dataclass(frozen=True, slots=True)
class Load:
    """A pattern of arrivals."""

    kind: str
    """`request_rate`: Poisson arrivals, `value` per second on average, independent of the
    responses. `concurrency`: `value` edits in flight at any time."""
    value: float
    built_in: bool = False
    """Whether perf_analyzer draws the arrivals. It draws the same few with every run, and they
    begin slowly: 60 requests at its 1/s come at 0.82/s, 10 at 0.43/s."""

    def arguments(self, requests: int, seed: int, folder: Path) -> list[str]:
        """Return perf_analyzer's arguments for `requests` edits; any file that they name is written
        to `folder`.

        Arrivals of one seed are the same at every rate, except for a constant factor.
        """
        if self.kind == "concurrency":
            return ["--concurrency-range", f"{self.value:g}"]
        if self.built_in:
            rate = ["--request-rate-range", f"{self.value:g}"]
            return [*rate, "--request-distribution", "poisson"]
        file = folder / "arrivals.txt"
        gaps = draw_gaps(self.value, requests, np.random.default_rng(seed))
        file.write_text("".join(f"{max(round(1e6 * gap), 1)}\n" for gap in gaps), encoding="utf-8")
        return ["--request-intervals", str(file)]

    def __str__(self) -> str:
        rate = self.kind == "request_rate"
        return f"{self.value:g}/s Poisson" if rate else f"{self.value:g} in flight"


def parse_loads(kind: str, text: str, built_in: bool = False) -> list[Load]:
    """Parse loads from numbers separated by commas.

    Raises:
        PerfError: a number is invalid; the message names the option and the accepted values.
    """
    option = "--" + kind.replace("_", "-")
    whole = kind == "concurrency"
    highest = 1000
    loads = []
    for part in text.split(","):
        try:
            value = float(int(part) if whole else float(part))
        except ValueError:
            value = 0.0
        if not 0 < value <= highest:
            accepted = "whole numbers from 1" if whole else "numbers above 0"
            raise PerfError(
                f"{option}: {part.strip()!r} is not accepted; {accepted} to {highest}, separated "
                "by commas"
            )
        loads.append(Load(kind, value, built_in))
    return loads
