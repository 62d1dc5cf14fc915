"""Measure the cost of communication for ranks that share a step: the time of the same shares
without any exchange over the time with it.

    python scripts/bench bench_sp --json docs/benchmarks/sequence_parallel.json

Each rank is a process with one thread; they exchange over gloo. The model has random weights at
FLUX's width, a few first blocks, and one row. A round takes each sort of step once, all ranks at
the same time. The slowest rank's time counts in a round. The fastest round counts overall, because
other work on the machine only adds time. `cpu` is the same by processor time, of the median round:
it includes the exchange's computing and copying, but no waiting. `bytes` are those that one rank
sends in a step. `counted` is core's count of them (planning/degree_costs.py) plus the model's
answer, which is gathered at the end of a step.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from maskserve_benchmarks.machine import processor
from maskserve_benchmarks.steps.step_rig import PRESETS, Bench
from maskserve_engine.batch.sequence_parallel import Exchange, GangExchange, share_of
from maskserve_engine.families.flux.adapter import FluxBatch
from maskserve_engine.families.mmdit.rows import FlowRow
from maskserve_engine.planning.degree_costs import sent_bytes
from maskserve_engine.planning.flops import RowTokens

_TIMEOUT_S = 600.0
_CPU = torch.device("cpu")


class Silent:
    """An `Exchange` that exchanges nothing: the values of other ranks are zeros."""

    deals = False

    def __init__(self, rank: int, count: int) -> None:
        self.rank, self.count = rank, count
        self._zeros: dict[int, torch.Tensor] = {}

    def all_to_all(self, parts: Sequence[torch.Tensor], sizes: Sequence[int]) -> torch.Tensor:
        total = sum(sizes)
        if total not in self._zeros:
            self._zeros[total] = parts[0].new_zeros(total)
        return self._zeros[total]


class _Rank:
    """One rank's model, rows and exchange."""

    def __init__(self, args: argparse.Namespace, rank: int, store: str) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(0)  # the same weights and rows on each rank
        dtype = getattr(torch, args.dtype)
        self.bench = Bench(args.preset, args.blocks, dtype, _CPU, args.format)
        self.bench.fill_entry("kv")
        self.rows = {"dense": self.bench.row(None, 1), "kv": self.bench.row(args.ratio, 1)}
        meeting: Any = dist  # torch's stubs do not name its stores
        self.ranks = GangExchange(
            meeting.FileStore(store, args.ranks), rank, args.ranks, _CPU, _TIMEOUT_S
        )
        self._silent = Silent(rank, args.ranks)
        self._alone = rank == 0 and args.alone

    def measure(self, rounds: int) -> dict[str, Any]:
        """Seconds per round of each sort of step, and the bytes of one step."""
        steps: dict[str, Callable[[], None]] = {}
        sent_bytes = {}
        for kind, row in self.rows.items():
            steps[f"{kind} alone"] = self._stepper(row, kind, None)
            steps[f"{kind} silent"] = self._stepper(row, kind, self._silent)
            steps[f"{kind} together"] = self._stepper(row, kind, self.ranks)
            steps[f"{kind} together"]()
            sent_before = self.ranks.sent
            steps[f"{kind} together"]()
            sent_bytes[kind] = self.ranks.sent - sent_before
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
        for number in range(-1, rounds):  # the first round warms up
            for name, step in steps.items():
                if name.endswith("alone") and not self._alone:
                    continue
                self._meet()
                begin = time.perf_counter(), time.process_time()
                step()
                if number >= 0:
                    wall, cpu = time.perf_counter() - begin[0], time.process_time() - begin[1]
                    times[name].append((wall, cpu))
        return {"times": times, "sent": sent_bytes}

    def _meet(self) -> None:
        tensor = torch.zeros(1)
        self.ranks.all_to_all([tensor] * self.ranks.count, [1] * self.ranks.count)

    def _stepper(self, row: FlowRow, kind: str, exchange: Exchange | None) -> Callable[[], None]:
        kinds = () if kind == "dense" else (kind,) * self.bench.blocks
        batches: list[FluxBatch] = []

        def step() -> None:
            with torch.inference_mode():
                row.step = row.step % (row.steps - 1) or 1  # never the step that makes the vectors
                batches[:] = [FluxBatch.of([row], batches[0] if batches else None)]
                batches[0].step(self.bench.weights, kinds, exchange)

        return step


def _run(args: argparse.Namespace, rank: int, store: str, out: Any) -> None:
    out.put((rank, _Rank(args, rank, store).measure(args.rounds)))


def counted(bench: Bench, row: FlowRow, rank: int, ranks: int, value_bytes: int) -> dict[str, int]:
    """Bytes of a step in the blocks, as core counts them for equal shares, and bytes of the model's
    answer.
    """
    tokens, channels = row.latents.shape
    blocks = sent_bytes(
        bench.work, RowTokens((float(tokens),), float(bench.text)), ranks, value_bytes
    )
    begin, end = share_of(tokens, rank, ranks)
    return {
        "blocks": round(blocks),
        "answer": (ranks - 1) * (end - begin) * channels * value_bytes,
    }


def measure(args: argparse.Namespace) -> dict[str, Any]:
    context = multiprocessing.get_context("spawn")
    out = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(target=_run, args=(args, rank, f"{folder}/store", out), daemon=True)
            for rank in range(args.ranks)
        ]
        for process in ranks:
            process.start()
        by_rank = dict(out.get(timeout=_TIMEOUT_S) for _ in ranks)
        for process in ranks:
            process.join(60.0)
    rank_reports = [by_rank[rank] for rank in range(args.ranks)]
    report: dict[str, Any] = {
        "hardware": f"{processor()}, {args.ranks} processes of one thread, gloo",
        "settings": {k: v for k, v in vars(args).items() if k != "json"},
        "steps": {},
        "summary": {},
    }
    torch.manual_seed(0)
    small = Bench(args.preset, (0, 1), getattr(torch, args.dtype), _CPU, args.format)
    for kind, ratio in (("dense", None), ("kv", args.ratio)):

        def rounds(way: str, clock: int, kind: str = kind) -> list[float]:
            """Seconds of the slowest rank in each round."""
            times = [
                [sample[clock] for sample in rank_report["times"][f"{kind} {way}"]]
                for rank_report in rank_reports
            ]
            return [max(sample) for sample in zip(*times, strict=True)]

        together, silent = (min(rounds(way, 0)) for way in ("together", "silent"))
        cpu = [statistics.median(rounds(way, 1)) for way in ("silent", "together")]
        size = torch.empty(0, dtype=small.dtype).element_size()
        count = counted(small, small.row(ratio, 1), 0, args.ranks, size)
        count["blocks"] *= sum(args.blocks)
        step: dict[str, Any] = {
            "together_s": together,
            "silent_s": silent,
            "efficiency": silent / together,
            "efficiency_cpu": cpu[0] / cpu[1],
            "bytes": rank_reports[0]["sent"][kind],
            "counted": count["blocks"] + count["answer"],
        }
        if args.alone:
            step["alone_s"] = min(wall for wall, _ in rank_reports[0]["times"][f"{kind} alone"])
        report["steps"][kind] = step
        report["summary"][f"efficiency_{kind}"] = round(silent / together, 4)
        report["summary"][f"efficiency_{kind}_cpu"] = round(cpu[0] / cpu[1], 4)
        report["summary"][f"bytes_equal_{kind}"] = step["bytes"] == step["counted"]
    return report


def _blocks(text: str) -> tuple[int, int]:
    double, single = text.split("+")
    return int(double), int(single)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--preset", default="flux-512", choices=[*PRESETS])
    parser.add_argument("--blocks", type=_blocks, default=(1, 2), metavar="DOUBLE+SINGLE")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--ratio", type=float, default=0.1, help="of active tokens of the kv row")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--format", default="int8", help="of the entries")
    parser.add_argument("--alone", action="store_true", help="time a whole step of one rank, too")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    report = measure(args)
    print(
        f"{'':8}{'together':>10}{'silent':>10}{'efficiency':>12}{'cpu':>8}{'bytes':>14}{'counted':>14}"
    )
    for kind, step in report["steps"].items():
        print(
            f"{kind:8}{1e3 * step['together_s']:8.1f}ms{1e3 * step['silent_s']:8.1f}ms"
            f"{step['efficiency']:12.3f}{step['efficiency_cpu']:8.3f}{step['bytes']:14}{step['counted']:14}"
        )
    print(json.dumps(report["summary"]))
    if args.json:
        report["settings"]["blocks"] = list(args.blocks)
        args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
