"""Time the status record: to encode it, and to read it."""

from __future__ import annotations

import argparse
import json
import time
import zlib
from collections.abc import Callable

from maskserve_core.contracts.status_record import Kind, RowStatus, WorkerStatus

SIZES = ((0, 0), (40, 50), (256, 50), (40, 1000))
"""(rows that wait, templates) of a record with 8 running rows."""


def record(waiting: int, templates: int) -> WorkerStatus:
    def rows(kind: Kind, count: int) -> tuple[RowStatus, ...]:
        return tuple(RowStatus(f"{i:032x}", kind, 100, 4096, 20, f"{i:032x}") for i in range(count))

    return WorkerStatus(
        "worker-0",
        "demo",
        "ready",
        max_rows=8,
        max_waiting=256,
        running=rows("cached", 8),
        waiting=rows("dense", waiting),
        tier_bytes={"device": 2**30},
        counters={f"counter_{i}_total": 1.5 * i for i in range(16)},
        templates={"device": tuple(f"{i:032x}" for i in range(templates))},
    )


def microseconds(work: Callable[[], object], calls: int = 200, tries: int = 7) -> float:
    """The best of several tries, so that another process's turn does not count."""
    best = float("inf")
    for _ in range(tries):
        begin = time.perf_counter()
        for _ in range(calls):
            work()
        best = min(best, time.perf_counter() - begin)
    return best / calls * 1e6


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    options = parser.parse_args()
    figures = []
    for waiting, templates in SIZES:
        status = record(waiting, templates)
        raw = status.to_json()
        figures.append(
            {
                "waiting": waiting,
                "templates": templates,
                "bytes": len(raw),
                "encode_us": microseconds(lambda s=status: zlib.crc32(s.to_json())),  # type: ignore[misc]
                "read_us": microseconds(lambda r=raw: WorkerStatus.from_json(r)),  # type: ignore[misc]
            }
        )
    if options.json:
        print(json.dumps(figures))
        return 0
    for row in figures:
        print(
            f"{row['waiting']:4} waiting, {row['templates']:4} templates, {row['bytes']:6} bytes: "
            f"encode {row['encode_us']:.1f} us, read {row['read_us']:.1f} us"
        )
    return 0
