"""A cluster at work, drawn from what Prometheus has scraped of it.

Two workers behind a router, as `maskserve serve --workers 2 --router` runs them. Clients come in
three waves; in the middle of the second one a worker is killed, which the supervisor restarts.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from maskserve_client.aio import AsyncClient
from maskserve_harness.checkout import CHECKOUT, DEMO_MODEL
from maskserve_harness.soaking.pictures import draw
from maskserve_serving.options import ServeOptions
from maskserve_serving.ports import free_base_port
from maskserve_serving.supervisor import Supervisor

_WAVES = (2, 8, 4)
"""Clients at a time."""
_SIDE, _TEMPLATES, _COVERS = 128, 4, (0.05, 0.1, 0.2, 0.5)
_SCRAPE_S = 1
_RATE = "[15s]"
_UP_S = 60.0
_QUANTILES = " or ".join(
    f"label_replace(histogram_quantile({q}, sum by (le) (rate("
    f"maskserve_routed_edit_seconds_bucket{_RATE}))), 'worker', 'P{100 * q:.0f}', '', '')"
    for q in (0.5, 0.95)
)
PANELS = {
    "edits answered per second": "sum by (worker) (rate(maskserve_edit_ends_total"
    f"{{outcome='done'}}{_RATE}))",
    "rows in the running batch": "maskserve_running_rows",
    "seconds of an edit at its worker": _QUANTILES,
    "tokens computed per second": "label_replace(sum(rate(maskserve_active_tokens_total"
    f"{_RATE})), 'worker', 'both workers', '', '')",
}
"""Title -> PromQL; each curve is named by its label `worker`."""
Curves = dict[str, tuple[list[float], list[float]]]
"""Name -> seconds since the first edit, values."""


def main() -> int:
    """Serve, load, harm, and draw."""
    options = _parser().parse_args()
    base = free_base_port(4)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        serving = ServeOptions(
            model=str(options.model),
            workers=2,
            base_port=base,
            router=True,
            router_port=base + 20,
            entries=folder / "entries",
            log_dir=folder,
        )
        with Supervisor(serving) as supervisor:
            assert supervisor.router is not None
            scraped = [worker.metrics_url for worker in supervisor.workers]
            scraped.append(supervisor.router.metrics_url)
            with prometheus(options.prometheus, scraped, base + 30, folder) as server:
                begin = time.time()
                killed, status = asyncio.run(_load(supervisor, options.seconds / len(_WAVES)))
                panels = {
                    title: query_range(server, query, begin, time.time())
                    for title, query in PANELS.items()
                }
    plot(panels, killed - begin, options.out)
    print(status)
    print(f"{options.out}: {options.out.stat().st_size / 1024:.0f} KiB")
    return 0


# Prometheus.


@contextmanager
def prometheus(program: str, pages: Sequence[str], port: int, folder: Path) -> Iterator[str]:
    """Prometheus, scraping these pages; its address.

    Raises:
        RuntimeError: it does not start.
    """
    jobs = [
        {
            "job_name": f"page-{i}",
            "static_configs": [{"targets": [urllib.parse.urlsplit(page).netloc]}],
        }
        for i, page in enumerate(pages)
    ]
    config = folder / "prometheus.yml"  # JSON is YAML too
    scrape = {"scrape_interval": f"{_SCRAPE_S}s"}
    config.write_text(json.dumps({"global": scrape, "scrape_configs": jobs}))
    address = f"127.0.0.1:{port}"
    arguments = [
        f"--config.file={config}",
        f"--storage.tsdb.path={folder / 'prometheus'}",
        f"--web.listen-address={address}",
    ]
    log = folder / "prometheus.log"
    with log.open("wb") as output:
        process = subprocess.Popen([program, *arguments], stdout=output, stderr=output)
    try:
        end = time.monotonic() + _UP_S
        while not _answers(f"http://{address}/-/ready"):
            if process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"{program} does not serve: {log.read_text()[-2000:]}")
            time.sleep(0.2)
        yield f"http://{address}"
    finally:
        process.terminate()
        process.wait()


def _answers(url: str) -> bool:
    with suppress(OSError), urllib.request.urlopen(url, timeout=2):
        return True
    return False


def query_range(server: str, query: str, begin: float, end: float) -> Curves:
    """Every series of a query, by its label `worker`; times are seconds after `begin`."""
    asked = urllib.parse.urlencode({"query": query, "start": begin, "end": end, "step": _SCRAPE_S})
    with urllib.request.urlopen(f"{server}/api/v1/query_range?{asked}", timeout=30) as answer:
        found = json.load(answer)["data"]["result"]
    return {
        series["metric"].get("worker", ""): (
            [at - begin for at, _ in series["values"]],
            [float(value) for _, value in series["values"]],
        )
        for series in found
    }


# The load.


async def _load(supervisor: Supervisor, wave_s: float) -> tuple[float, str]:
    """Three waves of clients; when a worker was killed, and what `maskserve status` said then."""
    assert supervisor.router is not None
    url = supervisor.router.grpc_url
    killed, status = 0.0, ""
    for number, clients in enumerate(_WAVES):
        leave = asyncio.Event()
        tasks = [asyncio.create_task(_client(url, 100 * number + i, leave)) for i in range(clients)]
        await asyncio.sleep(wave_s / 2)
        if number == 1:
            status = await asyncio.to_thread(_status, url)
            killed = time.time()
            pid = supervisor.workers[0].pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
        await asyncio.sleep(wave_s / 2)
        leave.set()
        await asyncio.gather(*tasks)
    return killed, status


async def _client(url: str, number: int, leave: asyncio.Event) -> None:
    """Edits one after the other, of a few pictures with masks of several sizes."""
    dice = random.Random(number)
    async with AsyncClient(url) as client:
        while not leave.is_set():
            cover = dice.choice(_COVERS)
            picture = draw(dice.randrange(_TEMPLATES), _SIDE, _SIDE, cover)
            await client.edit(picture.image, picture.mask, "a red star", num_inference_steps=28)


def _status(url: str) -> str:
    command = [sys.executable, "-m", "maskserve_client.cli", "status", "--url", url]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout


# The picture.


def plot(panels: dict[str, Curves], killed: float, path: Path) -> None:
    """One small chart per panel; a dashed line where the worker was killed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, grid = pyplot.subplots(2, 2, figsize=(9.0, 4.8), sharex=True)
    for axes, (title, curves) in zip(grid.flat, panels.items(), strict=True):
        for name, (seconds, values) in sorted(curves.items()):
            axes.plot(seconds, values, label=name, linewidth=1.2)
        axes.axvline(killed, color="0.5", linestyle="--", linewidth=0.8)
        axes.set_title(title, fontsize=10)
        axes.set_ylim(bottom=0)
        axes.legend(frameon=False, fontsize=8, loc="upper left")
    for axes in grid[-1]:
        axes.set_xlabel("seconds; dashed: worker-0 is killed", fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=90)
    pyplot.close(figure)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Run two workers behind a router under a changing load, with Prometheus, and "
        "draw what it has scraped; a worker is killed on the way. Prints `maskserve status`."
    )
    add = parser.add_argument
    add("--model", type=Path, default=DEMO_MODEL, help="folder in diffusers format")
    add("--seconds", type=float, default=120.0, help="of load (default 120)")
    add("--prometheus", default="prometheus", metavar="PROGRAM", help="default: that on the PATH")
    add(
        "--out",
        type=Path,
        default=CHECKOUT / "docs" / "images" / "cluster.png",
        metavar="FILE",
        help="default docs/images/cluster.png",
    )
    return parser
