"""Measure a step whose entries must be loaded: before the step, during it, by Algorithm 1 and by
our planner.

    python scripts/bench pipeline --json pipeline.json --plot pipeline.png

One row reads another entry at every step (FlashPS Fig. 4, left). The link is emulated: the real
bytes are copied, then the loader's thread sleeps for the rest of the time. Ways are timed in turn,
round after round. The least time of each way is reported, because other work on the machine only
makes a step longer. Predictions come from compute steps timed at other mask ratios.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from maskserve_benchmarks.machine import machine
from maskserve_benchmarks.reports import about, table, write_json
from maskserve_benchmarks.steps.replay import in_memory, plan_of_kinds
from maskserve_benchmarks.steps.step_rig import PRESETS, Bench
from maskserve_common.contracts.keys import Anchor
from maskserve_common.line_fit import Line, fit
from maskserve_engine.cache.entries import AnchorEntry
from maskserve_engine.cache.loader import Arrival, HostMover, Loader, PartTensors, Selection
from maskserve_engine.cache.memory_tier import MemoryTier
from maskserve_engine.cache.reader import EntryReader
from maskserve_engine.cache.reserve import Block
from maskserve_engine.cache.store import Store
from maskserve_engine.cache.tier import Note
from maskserve_engine.families.mmdit.rows import FlowRow
from maskserve_engine.loop.measured_costs import MeasuredCosts
from maskserve_engine.loop.step_planner import PlannedRow, StepPlanner, parts_of
from maskserve_engine.planning.cost_model import CostModel
from maskserve_engine.planning.flops import KINDS, RowTokens, Totals
from maskserve_engine.planning.two_stream import StepCosts, evaluate, step_costs
from maskserve_studies.block_plans.algorithm_1 import algorithm_1

PIPELINES: Final = ("naive", "strawman", "greedy", "ours", "ideal")
PROFILED: Final = (0.02, 0.15, 0.4, 0.65)
"""Mask ratios of the steps that the predictions come from. No case uses one of them."""
RATIOS: Final = (0.05, 0.1, 0.2, 0.5, 0.8)
LOADS: Final = (0.5, 0.9, 2.0)
"""Seconds to load everything over seconds to compute a step that has it."""
ENTRIES: Final = 3
"""Number of anchors. They are read in turn, so a step never finds the entry of the step before it.
"""


class Throttled(HostMover):
    """A mover that copies the real bytes, then sleeps until a link of this speed would be done."""

    def __init__(self, bytes_per_s: float) -> None:
        self.bytes_per_s = bytes_per_s

    def move(
        self, parts: PartTensors, ids: NDArray[np.int64] | None, room: Block | None = None
    ) -> Arrival:
        begin = time.perf_counter()
        arrival = super().move(parts, ids, room)
        size = sum(coded.nbytes for coded in arrival.get())
        remaining_s = size / self.bytes_per_s - (time.perf_counter() - begin)
        if remaining_s > 0:
            time.sleep(remaining_s)
        return arrival


class Pipeline:
    """One row that is stepped over and over while its entries travel over an emulated link.

    Args:
        bench: model and entries.
        mask_ratio: of the row.
        bytes_per_s: speed of the link; None: loads are free.
        costs: for the predictions; their load line is the link's.
    """

    def __init__(
        self, bench: Bench, mask_ratio: float, bytes_per_s: float | None, costs: CostModel
    ) -> None:
        self.bench, self.row = bench, bench.row(mask_ratio, seed=7)
        self.totals = totals_of(bench, self.row)
        self.planner = StepPlanner(MeasuredCosts(costs))
        self.predicted = 0.0
        """The planner's prediction for one of our steps, in seconds."""
        mover = HostMover() if bytes_per_s is None else Throttled(bytes_per_s)
        self._store = Store(MemoryTier(2**40), [], None, Loader(mover))
        self._anchors = [Anchor(0.5, 500.0 + n) for n in range(ENTRIES)]
        entries = [AnchorEntry(anchor, bench.entry.blocks) for anchor in self._anchors]
        for entry in entries:
            self._store.put("k", entry, Note("t", ENTRIES, 1.0))
        self._free = [in_memory(entry, self._selection) for entry in entries]

    @property
    def kv_bytes(self) -> float:
        """Bytes that a step reads when it uses every block's keys and values."""
        return float(self._free[0].load.sizes[:, 1].sum())

    def run(self, pipeline_name: str, steps: int) -> list[float]:
        """Seconds of each of `steps` steps."""
        if pipeline_name == "ideal":
            return [self.plain("kv", n) for n in range(steps)]
        walk = [self._anchors[n % ENTRIES] for n in range(steps + 1)]
        reader = EntryReader(self._store, "k", walk, self._selection)
        step: Callable[[EntryReader, int], float] = {
            "naive": self._load_then_step,
            "strawman": self._load_during_step,
            "greedy": self._by_algorithm_1,
            "ours": self._by_planner,
        }[pipeline_name]
        seconds = [step(reader, n) for n in range(steps)]
        reader.release()
        return seconds

    def plain(self, kind: str, number: int = 0) -> float:
        """Seconds of one step whose entry is on the device, with every block of `kind`."""
        self.row.entry = self._free[number % ENTRIES]
        begin = time.perf_counter()
        self.bench.step([self.row], plan_of_kinds([kind] * self.bench.blocks).kinds)
        return time.perf_counter() - begin

    def close(self) -> None:
        self._store.check_integrity()
        self._store.close()

    @property
    def _selection(self) -> Selection:
        assert self.row.selection is not None
        return self.row.selection

    def _load_then_step(self, reader: EntryReader, n: int) -> float:
        """Load everything, then run the step."""
        plan = evaluate(self._costs(reader, n), ["kv"] * self.bench.blocks, lead=0.0)
        assert reader.entry is not None
        begin = time.perf_counter()
        reader.entry.want(parts_of(plan), n)
        for block in range(self.bench.blocks):
            reader.entry.wait(block, "kv")
        self.bench.step([self.row], plan.kinds)
        return time.perf_counter() - begin

    def _load_during_step(self, reader: EntryReader, n: int) -> float:
        """Load every block while the step runs; nothing is loaded before the step begins."""
        return self._within(reader, n, ["kv"] * self.bench.blocks)

    def _by_algorithm_1(self, reader: EntryReader, n: int) -> float:
        """FlashPS Algorithm 1 chooses the blocks to load. It assumes that a dense block finds
        cached tokens without a load.
        """
        costs = self._costs(reader, n)
        cached, dense = (costs.compute[:, KINDS.index(kind)].tolist() for kind in ("kv", "dense"))
        use, _ = algorithm_1(cached, dense, costs.loads[:, 1].tolist())
        return self._within(reader, n, ["kv" if is_cached else "dense" for is_cached in use])

    def _by_planner(self, reader: EntryReader, n: int) -> float:
        """The engine's planner with its prefetch, as `StepRunner` uses them."""
        begin = time.perf_counter()
        handle = reader.entry_at(n)
        assert handle is not None
        self.row.entry = handle
        planned = self.planner.plan(
            self.bench.work, [PlannedRow(self.totals, (handle.load,), 1)], None
        )
        handle.want(parts_of(planned.plan), n)
        ahead = reader.look_ahead(n)
        if ahead is not None:
            ahead[0].want(parts_of(planned.next_plan), ahead[1])
        self.bench.step([self.row], planned.plan.kinds)
        self.predicted = planned.next_plan.latency
        return time.perf_counter() - begin

    def _within(self, reader: EntryReader, n: int, kinds: Sequence[str]) -> float:
        plan = evaluate(self._costs(reader, n), kinds, lead=0.0)
        assert reader.entry is not None
        begin = time.perf_counter()
        reader.entry.want(parts_of(plan), n)
        self.bench.step([self.row], plan.kinds)
        return time.perf_counter() - begin

    def _costs(self, reader: EntryReader, n: int) -> StepCosts:
        """Costs of a step, given the entries that have arrived."""
        handle = reader.entry_at(n)
        assert handle is not None
        self.row.entry = handle
        missing = {handle.load.tier: handle.load.missing[:, :2]}
        return step_costs(self.bench.work, self.totals, self.planner.costs.model, missing)


@dataclass
class Case:
    """A mask ratio and a speed of the link."""

    mask_ratio: float
    load_to_compute: float
    naive_ms: float
    strawman_ms: float
    greedy_ms: float
    ours_ms: float
    ideal_ms: float
    predicted_ms: float
    ours_over_ideal: float
    ours_over_predicted: float
    ours_over_greedy: float


def totals_of(bench: Bench, row: FlowRow) -> Totals:
    """The work of one step of a row."""
    return bench.work.totals([RowTokens((float(len(row.latents)),), float(len(row.prompt.text)))])


def profile(bench: Bench, rounds: int) -> Line:
    """Seconds of a step against its FLOPs, from steps whose entries are on the device."""
    flops, seconds = [], []
    for mask_ratio in PROFILED:
        pipeline = Pipeline(bench, mask_ratio, None, CostModel("", Line(0.0, 1e-11)))
        tokens = RowTokens(
            (float(len(pipeline.row.latents)),), float(len(pipeline.row.prompt.text))
        )
        for kind in ("dense", "project", "kv"):
            flops.append(bench.work.step_flops([tokens], kind))
            seconds.append(min(pipeline.plain(kind, n) for n in range(4 * rounds)))
        pipeline.close()
    return fit(flops, seconds)


def measure(
    bench: Bench, line: Line, mask_ratio: float, load: float, steps: int, rounds: int
) -> Case:
    """Time all ways at one mask ratio and one speed of the link.

    Args:
        bench: model and entries.
        line: seconds of compute against FLOPs.
        mask_ratio: of the row.
        load: seconds to load everything over seconds to compute.
        steps: of each way in each round.
        rounds: each round takes all ways in turn.
    """
    probe = Pipeline(bench, mask_ratio, None, CostModel("", line))
    speed = probe.kv_bytes / (load * min(probe.run("ideal", 4 * steps)))
    probe.close()
    costs = CostModel("", line, {"device": Line(0.0, 1.0 / speed)})
    pipeline = Pipeline(bench, mask_ratio, speed, costs)
    best = dict.fromkeys(PIPELINES, float("inf"))
    for _ in range(rounds):
        for pipeline_name in PIPELINES:  # the first steps of each set the pipeline up
            best[pipeline_name] = min(
                best[pipeline_name], *pipeline.run(pipeline_name, steps + 2)[2:]
            )
    predicted = pipeline.predicted
    pipeline.close()
    return Case(
        mask_ratio=mask_ratio,
        load_to_compute=load,
        naive_ms=round(1e3 * best["naive"], 2),
        strawman_ms=round(1e3 * best["strawman"], 2),
        greedy_ms=round(1e3 * best["greedy"], 2),
        ours_ms=round(1e3 * best["ours"], 2),
        ideal_ms=round(1e3 * best["ideal"], 2),
        predicted_ms=round(1e3 * predicted, 2),
        ours_over_ideal=round(best["ours"] / best["ideal"], 3),
        ours_over_predicted=round(best["ours"] / predicted, 3),
        ours_over_greedy=round(best["ours"] / best["greedy"], 3),
    )


def bars(cases: Sequence[Case]) -> dict[str, bool]:
    """The bars that every case must meet."""
    hidden_cases = [case for case in cases if case.load_to_compute <= 0.9]
    bound_cases = [case for case in cases if case.load_to_compute > 0.9]
    return {
        "ours <= 1.05 x ideal where loads hide": all(
            c.ours_over_ideal <= 1.05 for c in hidden_cases
        ),
        "ours <= 1.10 x its prediction elsewhere": all(
            c.ours_over_predicted <= 1.10 for c in bound_cases
        ),
        "ours <= 1.05 x greedy": all(c.ours_over_greedy <= 1.05 for c in cases),
    }


def plot(cases: Sequence[Case], path: Path) -> None:
    """Step time by mask ratio, a panel per link."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    loads = sorted({case.load_to_compute for case in cases})
    size = (4 * len(loads), 3.4)
    figure, axes = pyplot.subplots(1, len(loads), figsize=size, sharey=True, squeeze=False)
    for panel, load in zip(axes[0], loads, strict=True):
        at_load = [case for case in cases if case.load_to_compute == load]
        ratios = [case.mask_ratio for case in at_load]
        for pipeline_name in PIPELINES:
            milliseconds = [getattr(case, f"{pipeline_name}_ms") for case in at_load]
            panel.plot(ratios, milliseconds, marker="o", label=pipeline_name)
        panel.set(title=f"load / compute = {load:g}", xlabel="mask ratio", ylim=(0, None))
    axes[0][0].set_ylabel("ms per step")
    axes[0][-1].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=100)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--mask-ratios", type=float, nargs="+", default=list(RATIOS))
    parser.add_argument("--loads", type=float, nargs="+", default=list(LOADS))
    parser.add_argument("--steps", type=int, default=6, help="of each way, in each round")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--preset", choices=PRESETS, default="medium")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)  # the loader uses the other core
    torch.manual_seed(0)
    bench = Bench(args.preset, None, torch.float32, torch.device("cpu"), "int8")
    bench.fill_entry("both")
    line, cases = profile(bench, args.rounds), list[Case]()
    for mask_ratio in sorted(args.mask_ratios):
        for load in sorted(args.loads):
            cases.append(measure(bench, line, mask_ratio, load, args.steps, args.rounds))
            print(*asdict(cases[-1]).values(), flush=True)
    bar_results = bars(cases)
    print(table(list(asdict(cases[0])), [list(asdict(case).values()) for case in cases]))
    print(
        *(f"{'held' if holds else 'MISSED':7} {bar}" for bar, holds in bar_results.items()),
        sep="\n",
    )
    figures = {
        "compute": asdict(line),
        "cases": [asdict(case) for case in cases],
        "bars": bar_results,
    }
    write_json({**about(machine()), **figures}, args.json)
    if args.plot:
        plot(cases, args.plot)
    return 0 if all(bar_results.values()) else 1
