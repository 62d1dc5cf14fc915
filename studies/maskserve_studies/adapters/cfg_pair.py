"""Classifier-free guidance on two devices: one process per pass of a row (`batch.cfg_parallel`),
compared with both passes in one process. Two workers with one edit each are timed for comparison.

The first step of a way packs the passes and computes their prompts' keys and values. An edit does
that once, so it is not measured.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from maskserve_benchmarks.steps.step_rig import Bench
from maskserve_benchmarks.steps.unet_rig import UnetBench
from maskserve_engine.batch.sequence_parallel import Exchange, GangExchange
from maskserve_engine.families.unet.rows import Guidance

_CPU = torch.device("cpu")
_TIMEOUT_S = 600.0
_RATIO = 0.2
"""Computed tokens of the cached row, as a share of all tokens."""
VARIANTS = ("alone", "pair", "beside")
"""`alone`: one process takes both passes while the other waits. `pair`: each process takes one
pass. `beside`: each process takes both passes of its own row.
"""


Step = Callable[[Exchange | None], None]
Times = dict[tuple[str, str], list[float]]
"""Seconds by step and way."""


class _Rank:
    def __init__(self, rank: int, store: str, dtype: torch.dtype) -> None:
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[rank % len(cores)]})
        torch.set_num_threads(1)
        torch.manual_seed(0)  # the same weights and rows in both processes
        self.rank = rank
        meeting: Any = dist  # torch's stubs do not name its stores
        file_store = meeting.FileStore(store, 2)
        self.ranks = GangExchange(file_store, rank, 2, _CPU, _TIMEOUT_S, deals=True)
        self.steps = {**_unet_steps(dtype), **_flux_steps(dtype)}

    def measure(self, rounds: int, clock: str) -> Times:
        """Seconds per round, from the common start until both processes are done. With the clock
        `cpu` only the seconds that this process computes.
        """
        read_clock = {"wall": time.perf_counter, "cpu": time.process_time}[clock]
        times: Times = {}
        for _ in range(rounds):
            for name, step in self.steps.items():
                for variant in VARIANTS:
                    self._take(step, variant)
                    self._meet()
                    begin = read_clock()
                    self._take(step, variant)
                    self._meet()
                    times.setdefault((name, variant), []).append(read_clock() - begin)
        return times

    def _take(self, step: Step, variant: str) -> None:
        if variant == "pair":
            step(self.ranks)
        elif variant == "beside" or self.rank == 0:
            step(None)

    def _meet(self) -> None:
        tensor = torch.zeros(1)
        self.ranks.all_to_all([tensor, tensor], [1, 1])


def _unet_steps(dtype: torch.dtype) -> dict[str, Step]:
    """SDXL at 0.3 of its width, 384 pixels, a dense and a cached row."""
    bench = UnetBench("sdxl-narrow", dtype, _CPU, "int4")
    bench.fill_entry("kv")
    steps: dict[str, Step] = {}
    for name, ratio in (("", None), ("_cached", _RATIO)):
        row = bench.row(ratio, 1)
        row.guidance = Guidance(row.prompt, 7.5)

        def step(exchange: Exchange | None, row: Any = row) -> None:
            bench.step([row], "kv", exchange)

        steps[f"cfg_pair{name}"] = step
    return steps


def _flux_steps(dtype: torch.dtype) -> dict[str, Step]:
    """FLUX's width at 256 pixels, one double and one single block, a dense row."""
    bench = Bench("flux-256", (1, 1), dtype, _CPU, "int8")
    row = bench.row(None, 1)
    row.passes = (row.prompt, replace(row.prompt, scale=4.0))

    def step(exchange: Exchange | None) -> None:
        row.step = 1  # not the step that makes vectors of later steps
        bench.step([row], "dense", exchange=exchange)

    return {"cfg_pair_flux": step}


def _run(rank: int, store: str, dtype: torch.dtype, rounds: int, clock: str, out: Any) -> None:
    out.put(_Rank(rank, store, dtype).measure(rounds, clock))


def cfg_pair(args: argparse.Namespace) -> dict[str, Any]:
    context = multiprocessing.get_context("spawn")
    out = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        arguments = f"{folder}/store", getattr(torch, args.dtype), args.repeat, args.clock, out
        ranks = [context.Process(target=_run, args=(i, *arguments), daemon=True) for i in range(2)]
        for rank in ranks:
            rank.start()
        rank_times: list[Times] = [out.get(timeout=_TIMEOUT_S) for _ in ranks]
        for rank in ranks:
            rank.join(60.0)
    figures: dict[str, Any] = {}
    times = {  # of the slower rank
        key: list(map(max, *(rank[key] for rank in rank_times))) for key in rank_times[0]
    }
    for name in dict.fromkeys(name for name, _ in times):
        seconds = {variant: times[name, variant] for variant in VARIANTS}
        # Rounds are paired: other work on the machine affects both ways of a round.
        pairs = zip(seconds["alone"], seconds["pair"], strict=True)
        workers = zip(seconds["alone"], seconds["beside"], strict=True)
        figures[f"{name}_step_ms"] = round(1e3 * statistics.median(seconds["pair"]), 1)
        figures[name] = round(statistics.median(alone_s / pair for alone_s, pair in pairs), 3)
        figures[f"{name}_two_workers"] = round(
            statistics.median(2.0 * alone_s / beside_s for alone_s, beside_s in workers), 3
        )
    return figures
