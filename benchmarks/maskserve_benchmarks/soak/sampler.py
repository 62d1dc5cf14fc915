"""Samples of a worker: sizes of its processes, and its status record."""

from __future__ import annotations

import contextlib
import json
import os
import stat
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from maskserve_benchmarks.soak.ledger import Ledger, Window
from maskserve_benchmarks.triton_calls import Grpc
from maskserve_engine.stages.moments_folder import MOMENTS
from maskserve_serving.shm_cleanup import SHARED_MEMORY, region_prefix
from maskserve_serving.worker import WorkerProcess


@dataclass(frozen=True, slots=True)
class ProcessSample:
    """One process. Sizes are bytes."""

    pid: int
    memory: int
    """Memory that it allocated: its share of anonymous and shared memory, including swapped pages.
    Pages of files (libraries, weights) do not count. They belong to the page cache, and other
    processes that map the same libraries change this process's share."""
    rss: int
    pss: int
    handles: int
    threads: int


@dataclass(frozen=True, slots=True)
class Sample:
    """One sample of a worker."""

    time_s: float
    """Seconds since the load began."""
    processes: dict[str, ProcessSample]
    """`server`, and each model's processes by the model's name."""
    shared_memory: int
    """Bytes in use by its regions in /dev/shm."""
    shared_memory_size: int
    """Bytes that fit the regions without growth."""
    runtime_files: int
    """Number of files in its runtime folder, without templates' kept moments. Those are a store
    with a budget, which grows until it is full (`[stages] template_bytes`)."""
    runtime_bytes: int
    log_bytes: int
    running: int
    waiting: int
    in_flight: int
    """Number of edits that the fronts have accepted and not answered."""
    cached: int
    """Number of templates with entries."""
    cache_bytes: int
    registered: int
    """Number of templates whose images clients have registered."""
    pinned: int
    """Number of templates pinned by an operator."""
    priming: int
    in_use: int
    """Number of templates whose entries running rows hold."""
    drift_mean: float | None
    """Mean drift of the audited edits of templates with entries; None before the first audit."""
    drift_max: float | None
    counters: dict[str, float]
    restarts: int
    window: Window

    @property
    def memory(self) -> int:
        """Return the bytes that the worker's processes hold together; shared pages count once."""
        return sum(process.memory for process in self.processes.values())

    def to_json(self) -> str:
        return json.dumps({**asdict(self), "memory": self.memory}, separators=(",", ":"))


class Sampler:
    """Takes samples in a thread and appends them to a file, one JSON object per line."""

    def __init__(self, worker: WorkerProcess, ledger: Ledger, every_s: float, file: Path) -> None:
        self.samples: list[Sample] = []
        self._worker, self._ledger, self._every_s, self._file = worker, ledger, every_s, file
        self._grpc = Grpc(worker.grpc_url)
        self._began = self._last = time.monotonic()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sampler", daemon=True)

    def start(self) -> None:
        self._began = self._last = time.monotonic()
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()

    def close(self) -> None:
        self._grpc.close()

    def take(self) -> Sample:
        """Take one sample now, and do not store it.

        Raises:
            psutil.NoSuchProcess: the worker ends or restarts.
            InferenceServerException: `control` did not respond.
        """
        now_s, worker = time.monotonic(), self._worker
        window = self._ledger.window(now_s - self._last)
        self._last = now_s
        status = self._grpc.control("status")
        templates = self._grpc.control("templates")["templates"]
        entries = [entry for template in templates for entry in template["entries"]]
        mean, largest = drifts(entries)
        regions = _stats(SHARED_MEMORY, f"{region_prefix(worker.spec.ports.http)}*")
        files = _stats(worker.spec.files.runtime, "**/*", but=MOMENTS)
        return Sample(
            time_s=round(now_s - self._began, 2),
            processes=processes(worker.pid),
            shared_memory=sum(512 * region.st_blocks for region in regions),
            shared_memory_size=sum(region.st_size for region in regions),
            runtime_files=len(files),
            runtime_bytes=sum(file.st_size for file in files),
            log_bytes=worker.spec.log.stat().st_size,
            running=len(status["running"]),
            waiting=len(status["waiting"]),
            in_flight=status["in_flight"],
            cached=len(entries),
            cache_bytes=sum(status["tier_bytes"].values()),
            registered=sum(template["registered"] for template in templates),
            pinned=sum(entry["pinned"] for entry in entries),
            priming=sum(entry["priming"] for entry in entries),
            in_use=len({r["template_id"] for r in status["running"] if r["kind"] == "cached"}),
            drift_mean=mean,
            drift_max=largest,
            counters=status["counters"],
            restarts=worker.restarts,
            window=window,
        )

    def _run(self) -> None:
        with self._file.open("w", encoding="utf-8") as lines:
            while not self._stop.wait(self._every_s):
                try:
                    sample = self.take()
                except Exception as error:
                    self._ledger.complain("sampler", repr(error))
                    continue
                self.samples.append(sample)
                lines.write(sample.to_json() + "\n")
                lines.flush()


def drifts(entries: Sequence[Mapping[str, Any]]) -> tuple[float | None, float | None]:
    """Return mean and largest drift of the audited edits, from `control templates`."""
    audited = [entry for entry in entries if entry.get("audits")]
    if not audited:
        return None, None
    total = sum(entry["audits"] * entry["drift_mean"] for entry in audited)
    mean = total / sum(entry["audits"] for entry in audited)
    return mean, max(entry["drift_max"] for entry in audited)


def processes(pid: int | None) -> dict[str, ProcessSample]:
    """Return a Triton server and its models' processes, by name."""
    server = psutil.Process(pid)
    samples = {"server": sample_process(server)}
    # A model may have several instances: their names follow the order of their start.
    for child in sorted(server.children(recursive=True), key=lambda process: process.pid):
        name, number = _model_of(child), 2
        while name in samples:
            name, number = f"{_model_of(child)} {number}", number + 1
        samples[name] = sample_process(child)
    return samples


def sample_process(process: psutil.Process) -> ProcessSample:
    sizes = rollup(Path(f"/proc/{process.pid}/smaps_rollup").read_text(encoding="ascii"))
    memory = sum(sizes[name] for name in ("Pss_Anon", "Pss_Shmem", "SwapPss"))
    return ProcessSample(
        pid=process.pid,
        memory=memory,
        rss=sizes["Rss"],
        pss=sizes["Pss"],
        handles=process.num_fds(),
        threads=process.num_threads(),
    )


def rollup(text: str) -> dict[str, int]:
    """Return the sizes in /proc/PID/smaps_rollup, in bytes."""
    rows = (line.split() for line in text.splitlines()[1:])
    return {row[0].rstrip(":"): 1024 * int(row[1]) for row in rows}


def _model_of(stub: psutil.Process) -> str:
    """Return the model's name in a stub's command line: …/NAME/VERSION/model.py."""
    for argument in stub.cmdline():
        path = Path(argument)
        if path.name == "model.py":
            return path.parent.parent.name
    return f"process-{stub.pid}"


def _stats(folder: Path, pattern: str, but: str = "") -> list[os.stat_result]:
    """Return the stats of files in a folder that may change meanwhile; `but` is a folder to leave
    out.
    """
    stats = []
    for path in folder.glob(pattern):
        if path.parent.name == but:
            continue
        with contextlib.suppress(FileNotFoundError):
            stats.append(path.stat())
    return [entry for entry in stats if stat.S_ISREG(entry.st_mode)]
