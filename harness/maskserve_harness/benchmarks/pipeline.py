"""A step whose entries travel: loaded first, block by block, by Algorithm 1, by our planner.

One row, another entry at every step. The link is emulated: the real bytes are copied, then the
loader's thread sleeps for the time that is left. Ways are timed in turn, round after round; the
least of each is reported, because whatever else the machine does makes a step longer, never
shorter. Predictions are made from compute steps timed at other mask ratios.

    python scripts/bench pipeline --json pipeline.json --plot pipeline.png [--emulate-ms 1200]
    python scripts/bench pipeline --tiers /var/tmp --mask-ratios 0.1

With `--tiers` nothing is emulated: the first edit of a template that lies on the device, the host,
a disk or nowhere, and what the ways of moving its tokens move and take.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from maskserve_core.config import cores
from maskserve_core.planning.cost_model import CostModel, Line, fit
from maskserve_harness.benchmarks.machine import processor
from maskserve_harness.benchmarks.page import write_page
from maskserve_harness.benchmarks.pipeline_rig import WAYS, Pipeline, tokens
from maskserve_harness.benchmarks.pipeline_tiers import first_edits, travels
from maskserve_harness.benchmarks.step_rig import PRESETS, Bench

PROFILED = (0.02, 0.15, 0.4, 0.65)
"""Mask ratios of the steps that predictions are made from; none of them is a case."""
RATIOS = (0.05, 0.1, 0.2, 0.5, 0.8)
LOADS = (0.5, 0.9, 2.0)
"""Seconds to load everything over seconds to compute a step that has it."""


PAGE = """
A step of one row whose entry is another at every step, in ms, the least of several: everything
loaded first (naive), loads beside the step (strawman), FlashPS Algorithm 1 (greedy), our planner
and prefetch (ours), and loads that are free (ideal). The link is emulated: the real bytes are
copied, then the loader's thread sleeps for the time that is left. `load_to_compute` is the time to
load every block's keys and values over that of the ideal step. Predictions are made from steps
profiled at other mask ratios. A transformer of FLUX's form (`--preset`), one thread.
"""
TIERS_PAGE = """
The first edit of a template by a worker that has just started, by where the template lies, with
one anchor and with seven; nothing is emulated, and the page cache was told to forget what lies on
the disk (`read_mib` is what storage sent). The first step computes all tokens where the entry is
still being mapped and checked. Below, what three ways to bring the inactive tokens of one int8
tensor of FLUX at 1024x1024 move, over the bytes of those tokens, and what they take: gathered
tokens, runs of tokens coalesced over gaps of up to eight, and whole blocks with a gather on the
device. `gathered_pages` counts the 4 KiB pages that a gather from a file touches.
"""


@dataclass
class Case:
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


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--mask-ratios", type=float, nargs="+", default=list(RATIOS))
    parser.add_argument("--loads", type=float, nargs="+", default=list(LOADS))
    parser.add_argument("--steps", type=int, default=6, help="of each way, in each round")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument(
        "--emulate-ms",
        type=float,
        metavar="MS",
        help="blocks sleep instead of computing, and a dense step takes so long: what is left is "
        "the pipeline's own work, on a machine that does other things",
    )
    parser.add_argument("--preset", choices=PRESETS, default="medium")
    parser.add_argument(
        "--tiers", type=Path, metavar="DIR", help="time first edits instead; a folder on a disk"
    )
    parser.add_argument(
        "--beside", type=Path, nargs="+", default=[], metavar="JSON",
        help="earlier reports, judged, listed and drawn with this one",
    )  # fmt: skip
    parser.add_argument("--json", type=Path)
    parser.add_argument("--page", type=Path, help="write a page of docs/benchmarks")
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)  # the other core is the loader's
    torch.manual_seed(0)
    if args.tiers:
        return tiers(args)
    bench = Bench(args.preset, None, torch.float32, torch.device("cpu"), "int8")
    bench.fill_entry("both")
    if args.emulate_ms is None:
        line = profile(bench, args.rounds)
    else:
        dense = bench.work.step_flops([bench.work.row_at(1.0, bench.text)], "dense")
        line = Line(0.0, args.emulate_ms / 1e3 / dense)
    cases = [measure(bench, line, m, load, args) for m in args.mask_ratios for load in args.loads]
    for path in args.beside:
        cases += [Case(**case) for case in json.loads(path.read_text(encoding="utf-8"))["cases"]]
    cases.sort(key=lambda case: (case.mask_ratio, case.load_to_compute))
    held = bars(cases)
    report = {
        "machine": f"{cores()} cores of {processor()}",
        "emulated_dense_step_ms": args.emulate_ms,
        "compute": asdict(line),
        "cases": [asdict(case) for case in cases],
        "bars": held,
    }
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    if args.plot:
        plot(cases, args.plot)
    if args.page:
        said = [{"bar": name, "held": "yes" if holds else "no"} for name, holds in held.items()]
        write_page(args.page, "Pipeline", PAGE, [[asdict(c) for c in cases], said], args.plot)
    for name, holds in held.items():
        print(f"{'held' if holds else 'MISSED':7} {name}")
    return 0 if all(held.values()) else 1


def tiers(args: argparse.Namespace) -> int:
    """First edits of one mask ratio by tier, and the ways of moving tokens."""
    bench = Bench(args.preset, None, torch.float32, torch.device("cpu"), "int4")
    bench.fill_entry("kv")
    report = {
        "first_edits": [asdict(e) for e in first_edits(bench, args.tiers, args.mask_ratios[0], 14)],
        "travels": [asdict(w) for w in travels((0.1, 0.3, 0.5, 0.8), 4 * args.rounds)],
    }
    for line in (*report["first_edits"], *report["travels"]):
        print(json.dumps(line))
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    if args.page:
        write_page(args.page, "First edits by tier", TIERS_PAGE, list(report.values()))
    return 0


def profile(bench: Bench, rounds: int) -> Line:
    """Seconds of a step against its FLOPs, from steps whose entries are there."""
    flops, seconds = [], []
    for mask_ratio in PROFILED:
        row = bench.row(mask_ratio, seed=3)
        for kind in ("dense", "project", "kv"):
            work = bench.work.step_flops([tokens(row)], kind)
            pipeline = Pipeline(bench, mask_ratio, None, CostModel("", Line(0.0, 1e-11)))
            taken = [pipeline.plain(kind) for _ in range(4 * rounds)]
            pipeline.close()
            flops.append(work)
            seconds.append(min(taken))
    return fit(flops, seconds)


def measure(
    bench: Bench, line: Line, mask_ratio: float, load: float, args: argparse.Namespace
) -> Case:
    """All ways at one mask ratio and one speed of the link."""
    emulated = args.emulate_ms is not None
    probe = Pipeline(bench, mask_ratio, None, CostModel("", line), emulated=emulated)
    compute = min(probe.run("ideal", 4 * args.steps))
    size = probe.kv_bytes
    probe.close()
    speed = size / (load * compute)
    costs = CostModel("", line, {"device": Line(0.0, 1.0 / speed)})
    pipeline = Pipeline(bench, mask_ratio, speed, costs, emulated=emulated)
    best = dict.fromkeys(WAYS, float("inf"))
    for _ in range(args.rounds):
        for way in WAYS:
            # The first steps set the pipeline up.
            best[way] = min(best[way], *pipeline.run(way, args.steps + 2)[2:])
    predicted = pipeline.predicted
    pipeline.close()
    case = Case(
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
    print(json.dumps(asdict(case)), flush=True)
    return case


def bars(cases: Sequence[Case]) -> dict[str, bool]:
    """What must hold of every case."""
    hidden = [c for c in cases if c.load_to_compute <= 0.9]
    bound = [c for c in cases if c.load_to_compute > 0.9]
    return {
        "ours <= 1.05 x ideal where loads hide": all(c.ours_over_ideal <= 1.05 for c in hidden),
        "ours <= 1.10 x its prediction elsewhere": all(
            c.ours_over_predicted <= 1.10 for c in bound
        ),
        "ours <= 1.05 x greedy": all(c.ours_over_greedy <= 1.05 for c in cases),
    }


def plot(cases: Sequence[Case], path: Path) -> None:
    """Step time by mask ratio, a panel per link (FlashPS Fig. 4, left)."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    loads = sorted({case.load_to_compute for case in cases})
    figure, panels = pyplot.subplots(1, len(loads), figsize=(4 * len(loads), 3.4), sharey=True)
    for panel, load in zip(panels if len(loads) > 1 else [panels], loads, strict=True):
        own = [case for case in cases if case.load_to_compute == load]
        ratios = [case.mask_ratio for case in own]
        for way in WAYS:
            panel.plot(ratios, [getattr(c, f"{way}_ms") for c in own], marker="o", label=way)
        panel.set(title=f"load / compute = {load:g}", xlabel="mask ratio", ylim=(0, None))
    (panels if len(loads) == 1 else panels[0]).set_ylabel("ms per step")
    (panels if len(loads) == 1 else panels[-1]).legend()
    figure.tight_layout()
    figure.savefig(path, dpi=100)


if __name__ == "__main__":
    sys.exit(main())
