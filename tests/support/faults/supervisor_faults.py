"""The supervisor is killed and restarted at once; the test measures when a worker serves again."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from maskserve_serving import files
from maskserve_serving.files import WorkerFiles
from maskserve_serving.options import ServeOptions
from maskserve_serving.ports import free_base_port
from maskserve_serving.runtime import find_runtime
from maskserve_serving.spec import Spec
from maskserve_serving.worker import WorkerProcess
from tests.support.faults.worker_faults import (
    CLIENTS,
    LOAD_S,
    PATIENCE_S,
    WorkerTrial,
    begin_visits,
)
from tests.support.faults.worker_site import Site, until


def running_files(base_port: int) -> list[WorkerFiles]:
    """The folders of the workers that a supervisor runs at this base port."""
    globs = [
        sorted(Path(root).glob(f"{files._prefix(base_port)}*"))
        for root in (files._memory(), files._disk())
    ]
    return [
        WorkerFiles(folder, disk / folder.name)
        for memory, disk in zip(*globs, strict=True)
        for folder in sorted(memory.glob("worker-*"))
    ]


class _Serving:
    """`maskserve serve` with one worker, in its own process."""

    def __init__(self, options: ServeOptions) -> None:
        self._options = options
        self._command = [sys.executable, "-m", "maskserve_client.cli", "serve"]
        self._command += ["--model", options.model, "--base-port", str(options.base_port)]
        self._command += ["--log-dir", str(options.log_dir)]
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> float:
        """Start it and wait until it is ready. Returns the seconds that the worker took to load."""
        self._process = subprocess.Popen(self._command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        for line in self._process.stdout:
            match = re.search(r"ready after (\d+) s", line)
            if match is not None:
                return float(match.group(1))
        raise TimeoutError("maskserve serve ended without being ready")

    def site(self, side: int, steps: int) -> Site:
        """The site of its worker."""
        options = self._options
        [worker_files] = running_files(options.base_port)
        runtime = find_runtime(options.tritonserver, options.cache_dir)
        return Site(WorkerProcess(Spec(0, options, runtime, {}, worker_files)), side, steps)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def stop(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGTERM)
            self._process.communicate(timeout=PATIENCE_S)


def try_supervisor_kill(model: str, log_dir: Path, side: int, steps: int) -> WorkerTrial:
    """Run five long edits, kill the supervisor, start it again, and edit.

    Raises:
        TimeoutError: a client was never answered, or the worker did not return.
    """
    serving = _Serving(ServeOptions(model, base_port=free_base_port(), log_dir=log_dir))
    harm = threading.Event()
    try:
        serving.start()
        site = serving.site(side, steps)
        with ThreadPoolExecutor(CLIENTS) as pool:
            answers = begin_visits(site, pool, harm)
            harm.set()
            began = time.monotonic()
            serving.kill()
            load_s = serving.start()
            ends = [answer.result(PATIENCE_S) for answer in answers]
        serves = until("it serves again", site.serves, LOAD_S)
    finally:
        serving.stop()
    return WorkerTrial(
        messages=tuple(sorted({message for _, message in ends})),
        serves_s=serves - began,
        load_s=load_s,
        as_told=True,  # no process of ours is left to answer clients
    )
