"""`maskserve serve --devices-per-worker auto`: how many processes share a worker's cores.

The engine tries it with the model, in processes of its own.
"""

from __future__ import annotations

import json
import tempfile
from typing import Any

import tomli_w

from maskserve_common.config import cores
from maskserve_serving.engine_process import Run, ask_engine, run_command
from maskserve_serving.errors import ServeError
from maskserve_serving.files import checked
from maskserve_serving.options import ServeOptions

_TRIAL = "maskserve_engine.start.thread_trial"
_ENTRY_KEYS = {"enabled", "entry_format", "entry_kind", "stride", "budget_bytes"}
"""Keys of `[cache]` that decide what a cached step reads."""


def fastest_devices(options: ServeOptions, tables: dict[str, Any], run: Run = run_command) -> int:
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
        cache = {name: v for name, v in tables.get("cache", {}).items() if name in _ENTRY_KEYS}
        config: dict[str, Any] = {"model": tables["model"], "cache": cache, "runtime_dir": folder}
        checked(config)
        content = tomli_w.dumps(config).encode()
        output, problem = "", ""
        try:
            output = ask_engine(_TRIAL, content, "--threads", str(threads), run=run)
        except ServeError as error:
            problem = str(error)
    lines = output.strip().splitlines()
    if not lines:
        last = next(reversed(problem.strip().splitlines()), "it ended without a message")
        raise ServeError(f"--devices-per-worker auto: the trial of the model failed: {last}")
    trial = json.loads(lines[-1])
    devices = int(trial["processes"])
    rates = ", ".join(f"{count}: {rate:g}" for count, rate in trial["rows_per_s"].items())
    options.report(
        f"devices per worker: {devices}"
        + (f" (rows stepped per second by processes: {rates})" if rates else ", as it has GPUs")
    )
    return devices
