"""A trial of how many processes should share a CPU's cores, with steps of the model.

One process with all cores finishes a single edit soonest. But steps of cached rows are small matrix
products, which gain little from a second thread. So several processes with some of the cores each
may serve more edits together. `maskserve serve --devices-per-worker auto` runs this before its
workers:

    python -m maskserve_engine.start.thread_trial CONFIG [--threads N]

For each number of processes, all processes load the model as a worker does, and then step eight
rows in total at the same time. The trial prints a `Trial` as JSON.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import msgspec
from msgspec.structs import replace

from maskserve_common.config import Config, cores
from maskserve_common.config_file import load_config
from maskserve_engine.stages.loader import device_of
from maskserve_engine.stages.unused_libraries import hide_unused_libraries
from maskserve_engine.start.assembly import load_engine

ROWS = 8
"""Edits that run at once."""
_COUNTS = (1, 2, 4, 8)
_SECONDS = 2.0
_MODULE = "maskserve_engine.start.thread_trial"
_READY = "ready"
_GAIN = 1.1
"""Least gain in rows per second for which more processes are chosen: they slow down a single edit,
and each takes memory for the model.
"""


class Trial(msgspec.Struct, frozen=True):
    processes: int
    """Number of processes to serve with."""
    rows_per_s: dict[int, float]
    """Rows per second of all processes together, by their number."""


def best(rows_per_s: Mapping[int, float]) -> int:
    """Return the number of processes to serve with: a larger one only for a tenth more rows."""
    chosen = 1
    for count in sorted(rows_per_s):
        if rows_per_s[count] > _GAIN * rows_per_s.get(chosen, 0.0):
            chosen = count
    return chosen


def try_counts(config: Path, threads: int) -> Trial:
    """Try every number of processes that have a core each, and divide the rows evenly.

    Args:
        config: file of the worker's configuration.
        threads: cores of all processes.

    Raises:
        RuntimeError: the model cannot be stepped in one process.
    """
    rates = {}
    for count in _COUNTS:
        if count == 1 or count <= threads:
            rate = _try_count(config, count, max(1, threads // count))
            if rate is None and count == 1:
                raise RuntimeError("the model took no step in one process")
            if rate is None:  # it ended early, for example because memory was short
                break
            rates[count] = round(rate, 2)
    return Trial(best(rates), rates)


def _try_count(config: Path, count: int, threads: int) -> float | None:
    """Return the rows per second of `count` processes together; None: one of them ended early."""
    command = [sys.executable, "-m", _MODULE, str(config), "--rows", str(ROWS // count)]
    command += ["--threads", str(threads)]
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
    with ExitStack() as stack:
        children = []
        for _ in range(count):
            child = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True
            )
            stack.enter_context(child)
            stack.callback(child.kill)
            children.append(child)
        if any(_line(child) != _READY for child in children):
            return None
        for child in children:
            assert child.stdin is not None
            child.stdin.write("\n")
            child.stdin.flush()
        rates = [_line(child) for child in children]
        return sum(map(float, rates)) if all(rates) else None


def _line(child: subprocess.Popen[str]) -> str:
    assert child.stdout is not None
    return child.stdout.readline().strip()


def _step(config: Config, rows: int) -> None:
    """Run one process of the trial: load, wait for a line, step for a while, print the rate."""
    hide_unused_libraries(config, text=False)
    engine = load_engine(config)
    engine.start()
    try:
        engine.warm_up()
        print(_READY, flush=True)
        sys.stdin.readline()
        print(engine.rows_per_s(rows, _SECONDS), flush=True)
    finally:
        engine.close(1.0)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="thread_trial", description=__doc__)
    parser.add_argument("config", type=Path, help="of the worker")
    parser.add_argument("--threads", type=int, default=cores(), help="cores of all processes")
    parser.add_argument("--rows", type=int, default=0, help="be one of the processes")
    options = parser.parse_args(arguments)
    config = load_config(options.config)
    if options.rows:
        _step(
            replace(config, model=replace(config.model, torch_threads=options.threads)),
            options.rows,
        )
    elif device_of(config).type != "cpu":
        print(msgspec.json.encode(Trial(1, {})).decode())
    else:
        print(msgspec.json.encode(try_counts(options.config, options.threads)).decode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
