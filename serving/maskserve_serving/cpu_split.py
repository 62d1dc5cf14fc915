"""`maskserve serve --devices-per-worker auto`: how many processes share a worker's cores.

The engine tries it with the model, in processes of its own.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import tomli_w

from maskserve_common.config import cores
from maskserve_serving.errors import ServeError
from maskserve_serving.files import checked
from maskserve_serving.options import ServeOptions

_OF_ENTRIES = {"enabled", "entry_format", "entry_kind", "stride", "budget_bytes"}
"""Keys of `[cache]` that decide what a cached step reads."""


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(command, check=False, capture_output=True)


def tried_devices(
    options: ServeOptions,
    tables: dict[str, Any],
    run: Callable[[Sequence[str]], subprocess.CompletedProcess[bytes]] = _run,
) -> int:
    """Return the devices per worker: on a CPU the fastest number of processes, else 1.

    Args:
        options: options of the supervisor.
        tables: configuration with the model's local path.
        run: runs a command.

    Raises:
        ServeError: the model could not be tried.
    """
    threads = tables["model"].get("torch_threads") or max(1, cores() // options.workers)
    with tempfile.TemporaryDirectory(prefix="maskserve-trial-") as folder:
        # The trial uses no entries, LoRAs or logs of the worker.
        cache = {name: v for name, v in tables.get("cache", {}).items() if name in _OF_ENTRIES}
        tried: dict[str, Any] = {"model": tables["model"], "cache": cache, "runtime_dir": folder}
        checked(tried)
        config = Path(folder) / "config.toml"
        config.write_text(tomli_w.dumps(tried), encoding="utf-8")
        command = [sys.executable, "-m", "maskserve_engine.start.thread_trial", str(config)]
        ended = run([*command, "--threads", str(threads)])
    last = next(reversed(ended.stdout.decode().strip().splitlines()), "")
    if ended.returncode or not last:
        stderr_lines = ended.stderr.decode(errors="replace").strip().splitlines()
        raise ServeError(
            "--devices-per-worker auto: the trial of the model failed: "
            + next(reversed(stderr_lines), "it ended without a message")
        )
    trial = json.loads(last)
    devices = int(trial["processes"])
    rates = ", ".join(f"{count}: {rate:g}" for count, rate in trial["rows_per_s"].items())
    options.report(
        f"devices per worker: {devices}"
        + (f" (rows stepped per second by processes: {rates})" if rates else ", as it has GPUs")
    )
    return devices
