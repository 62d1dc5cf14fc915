"""Measure how long jobs of one key take while another key lists a million ended jobs.

A router process with two emulated workers that answer at once has a database in which one key has
`--jobs` ended jobs. Another key gives two jobs a second and waits for each: first alone (`calm`),
then while the first key requests one page after the other on `--connections` connections. The
figures are 95th percentiles over `--rounds` jobs: the time of the POST and the time of the job.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import http.client
import io
import json
import multiprocessing
import os
import platform
import sqlite3
import sys
import tempfile
import threading
import time
from contextlib import closing
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any, Final

import numpy as np
from PIL import Image

from maskserve_benchmarks.emulator.worker import EmulatedWorker
from maskserve_benchmarks.router_site import RouterSite
from maskserve_router.jobs.store import open_store
from maskserve_router.keys import scope_of_key

_HISTORY, _OTHER = "history", "other"
_BAR: Final = 2.0
_POLL_S, _GAP_S = 0.02, 0.5
"""Seconds between two polls of a job, and from the start of one job to the start of the next."""
_BUSY: Final = 1.2
"""Processes per core that run or wait to run; above this the machine is too busy to judge."""
_FILLED = """
WITH RECURSIVE numbers(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM numbers WHERE n < :jobs)
INSERT INTO maskserve_jobs_2 (id, scope, state, waits, created, not_before, started, ended, expires,
    gone, owner, fence, runs, tries, bytes, progress, error, digest)
SELECT printf('%032x', n), :scope, 'succeeded', '', t, t, t, t, t + 86400, t + 86400, '', 1, 1, 0,
    0, '{"step": 28, "steps": 28}', 'null', zeroblob(32)
FROM (SELECT n, :now - 3600.0 * (:jobs - n) / :jobs AS t FROM numbers)
"""


def main() -> int:
    """Measure and print. The exit code is 0 if the bar held, 1 if not, 3 if it was not judged."""
    parser = argparse.ArgumentParser(prog=sys.argv[0], description=__doc__)
    parser.add_argument("--jobs", type=int, default=1_000_000, help="ended ones of the one key")
    parser.add_argument("--connections", type=int, default=16, help="that list them")
    parser.add_argument("--rounds", type=int, default=100, help="jobs of the other key, each time")
    parser.add_argument("--json", type=Path, help="where the result is written")
    args = parser.parse_args()
    load = os.getloadavg()[0] / (os.cpu_count() or 1)
    with tempfile.TemporaryDirectory(prefix="maskserve-history-") as folder:
        result = asyncio.run(_measure(args, Path(folder)))
    result |= {"machine": platform.processor() or platform.machine(), "cores": os.cpu_count()}
    result["load_per_core_before"] = round(load, 2)
    ratio = max(result["listing"][name] / result["calm"][name] for name in ("post_s", "job_s"))
    busy = load > _BUSY
    result["verdict"] = "not judged" if busy else "passed" if ratio <= _BAR else "failed"
    print(json.dumps(result, indent=1))
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    return 3 if busy else int(ratio > _BAR)


async def _measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    database = folder / "jobs.sqlite"
    filled_s = _fill(database, args.jobs)
    workers = [EmulatedWorker(f"w{number}", None, answer=_picture()) for number in range(2)]
    for worker in workers:
        await worker.start()
    tables: dict[str, Any] = {
        "jobs": {"database": str(database), "keep_jobs": 2 * args.jobs},
        "keys": [
            {"name": name, "sha256": hashlib.sha256(name.encode()).hexdigest()}
            for name in (_HISTORY, _OTHER)
        ],
    }
    site = RouterSite([worker.address for worker in workers], folder, tables)
    try:
        await asyncio.to_thread(site.start)
        figures = await asyncio.to_thread(_compared, site.http_url, args)
    finally:
        await asyncio.to_thread(site.stop)
        for worker in workers:
            await worker.stop()
    return {"jobs": args.jobs, "connections": args.connections, "filled_s": filled_s, **figures}


def _compared(url: str, args: argparse.Namespace) -> dict[str, Any]:
    _times(url, 10)
    calm = _percentiles(_times(url, args.rounds))
    context = multiprocessing.get_context("spawn")
    stop, pages = context.Event(), context.Value("q", 0)
    lister = context.Process(target=_list, args=(url, args.connections, stop, pages))
    lister.start()
    time.sleep(3.0)  # until all connections have begun
    try:
        pages_before, begin = pages.value, time.monotonic()
        listing = _percentiles(_times(url, args.rounds))
        rate = (pages.value - pages_before) / (time.monotonic() - begin)
    finally:
        stop.set()
        lister.join(30)
        lister.kill()
    return {"calm": calm, "listing": listing, "pages_per_s": round(rate, 1)}


def _fill(database: Path, jobs: int) -> float:
    begin = time.monotonic()
    open_store(str(database)).close()
    scope = scope_of_key(_HISTORY)
    with closing(sqlite3.connect(database)) as db, db:
        db.execute(_FILLED, {"jobs": jobs, "scope": scope, "now": time.time()})
        counts = "INSERT INTO maskserve_job_counts_2 VALUES (?, 0, 0, 0, ?, 0, 0)"
        db.execute(counts, (scope, jobs))
    return round(time.monotonic() - begin, 1)


def _times(url: str, rounds: int) -> list[tuple[float, float]]:
    """Return the seconds of a POST and of a whole job, for several jobs of the other key."""
    body, kind = _form()
    headers = {"authorization": f"Bearer {_OTHER}", "content-type": kind}
    times = []
    with closing(http.client.HTTPConnection(url, timeout=120)) as connection:
        for _ in range(rounds):
            begin = time.monotonic()
            job = _call(connection, "POST", "/v1/jobs", headers, body)
            post_s = time.monotonic() - begin
            while job["status"] in ("queued", "running"):
                time.sleep(_POLL_S)
                job = _call(connection, "GET", f"/v1/jobs/{job['id']}", headers)
            if job["status"] != "succeeded":
                raise RuntimeError(f"a job has {job['status']}: {job['error']}")
            times.append((post_s, time.monotonic() - begin))
            time.sleep(max(0.0, begin + _GAP_S - time.monotonic()))
    return times


def _list(url: str, connections: int, stop: Event, pages: Any) -> None:
    """Request one page after the other, on `connections` connections."""
    headers = {"authorization": f"Bearer {_HISTORY}"}

    def list_pages() -> None:
        with closing(http.client.HTTPConnection(url, timeout=300)) as connection:
            page_query = ""
            while not stop.is_set():
                page = _call(connection, "GET", f"/v1/jobs?limit=100{page_query}", headers)
                page_query = f"&after={page['last_id']}" if page["has_more"] else ""
                with pages.get_lock():
                    pages.value += 1

    for _ in range(connections):
        threading.Thread(target=list_pages, daemon=True).start()
    stop.wait()


def _call(
    connection: http.client.HTTPConnection,
    method: str,
    path: str,
    headers: dict[str, str],
    body: bytes | None = None,
) -> dict[str, Any]:
    connection.request(method, path, body, headers)
    answer = connection.getresponse()
    content = answer.read()
    if answer.status >= 300:
        raise RuntimeError(f"{method} {path}: {answer.status} {content[:200]!r}")
    reply: dict[str, Any] = json.loads(content)
    return reply


def _percentiles(times: list[tuple[float, float]]) -> dict[str, float]:
    posts, jobs = (np.percentile([pair[i] for pair in times], 95) for i in (0, 1))
    return {"post_s": round(float(posts), 4), "job_s": round(float(jobs), 4)}


def _picture() -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (64, 64), "red").save(file, "png")
    return file.getvalue()


def _form() -> tuple[bytes, str]:
    mask = io.BytesIO()
    Image.new("L", (64, 64), 255).save(mask, "png")
    boundary = "maskserve-history"
    parts = []
    for name, value, kind in (
        ("image", _picture(), "; filename=a.png"),
        ("mask", mask.getvalue(), "; filename=m.png"),
        ("prompt", b"a star", ""),
        ("mask_mode", b"white", ""),
    ):
        head = f'--{boundary}\r\ncontent-disposition: form-data; name="{name}"{kind}\r\n\r\n'
        parts.append(head.encode() + value + b"\r\n")
    return b"".join(parts) + f"--{boundary}--\r\n".encode(), (
        f"multipart/form-data; boundary={boundary}"
    )


if __name__ == "__main__":
    sys.exit(main())
