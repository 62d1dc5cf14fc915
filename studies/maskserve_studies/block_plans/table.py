"""Print the gain from planning with realistic costs: a table, and a plot over mask ratios.

    python scripts/bench plan_table --markdown build/plan_table.md --plot docs/images/plan_gain.png

Costs are the cost model's estimate of an H100 (half of the 16-bit peak) and three links. Steps are
steady, with one row and 2 GB of prefetch. Nothing here was measured on a GPU.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from maskserve_benchmarks.published_models import FLUX_DEV, SDXL
from maskserve_benchmarks.step_counts import flop_limit
from maskserve_common.line_fit import Line
from maskserve_engine.families.flux.spec import flux_work
from maskserve_engine.families.unet.spec import unet_work
from maskserve_engine.planning.cost_model import H100, CostModel, estimate
from maskserve_engine.planning.entry_bytes import FORMATS, block_bytes
from maskserve_engine.planning.flops import KINDS, ModelWork
from maskserve_engine.planning.planner import plan
from maskserve_engine.planning.two_stream import StepCosts, evaluate, step_costs
from maskserve_studies.block_plans.algorithm_1 import algorithm_1

LINKS = {"PCIe 5 (50 GB/s)": 50.0, "PCIe 4 (25 GB/s)": 25.0, "NVMe (7 GB/s)": 7.0}
BUDGET = 2e9
"""Bytes that loads may run ahead."""


@dataclass(frozen=True)
class Case:
    """A model at its native size; `copies` entries per token (2: both halves of a CFG pair)."""

    name: str
    work: ModelWork
    text: int
    copies: int


def cases() -> list[Case]:
    """FLUX.1 dev and SDXL base at 1024x1024."""
    return [
        Case("FLUX.1 1024", flux_work(FLUX_DEV, 128, 128), 512, 1),
        Case("SDXL 1024", unet_work(SDXL, 128, 128, guidance=True), 77, 2),
    ]


def costs_of(case: Case, mask: float, link_gbytes: float, fmt: str) -> StepCosts:
    """Return the costs of a step of one row, without the fixed seconds of launching it.

    Args:
        case: the model.
        mask: mask ratio.
        link_gbytes: gigabytes per second of the link.
        fmt: storage format of the entries.
    """
    work = case.work
    row = work.row_at(mask, case.text)
    inactive = tuple(n - a for n, a in zip(work.tokens, row.active, strict=True))
    loads = block_bytes(work, [inactive], FORMATS[fmt], copies=case.copies)
    compute = Line(0.0, estimate(H100).compute.per_unit)
    model = CostModel("H100", compute, {"host": Line(0.0, 1e-9 / link_gbytes)}, "estimate")
    return step_costs(work, work.totals([row]), model, {"host": loads}, budget_bytes=BUDGET)


def greedy(costs: StepCosts, kind: str) -> float:
    """Return the steady seconds of a step by FlashPS's Algorithm 1, whose cached blocks run as
    `kind`.
    """
    cached, load = (
        costs.compute[:, KINDS.index(kind)],
        costs.loads[:, ("project", "kv").index(kind)],
    )
    use, _ = algorithm_1(cached.tolist(), costs.compute[:, 0].tolist(), load.tolist())
    return evaluate(costs, [kind if with_cache else "dense" for with_cache in use]).latency


def row_of(case: Case, mask: float, link: str, fmt: str) -> dict[str, Any]:
    """Return milliseconds per step by each way to choose kinds, and what the best plan chose."""
    costs = costs_of(case, mask, LINKS[link], fmt)
    n = len(costs.compute)
    best = plan(costs, tolerance=1e-4)
    seconds = {
        "dense": evaluate(costs, ["dense"] * n).latency,
        "project": evaluate(costs, ["project"] * n).latency,
        "kv": evaluate(costs, ["kv"] * n).latency,
        "greedy": min(greedy(costs, "project"), greedy(costs, "kv")),
        "plan": best.latency,
        "stall": best.stall,
    }
    return {
        "model": case.name,
        "mask_ratio": mask,
        "link": link,
        "format": fmt,
        "blocks": n,
        "ms": {k: round(1e3 * v, 3) for k, v in seconds.items()},
        "kinds": {k: best.kinds.count(k) for k in KINDS},
        "proved_within": round(best.latency / best.bound - 1, 6),
        "flop_limit": round(flop_limit(case.work, mask, case.text), 2),
        "speedup": round(seconds["dense"] / seconds["plan"], 2),
        "gain_over_greedy": round(seconds["greedy"] / seconds["plan"] - 1, 4),
    }


def markdown(rows: list[dict[str, Any]]) -> str:
    """The rows as a table."""
    lines = [
        "| model | link | format | all dense | all project | all kv | Algorithm 1 | plan "
        "| dense / project / kv | over dense (limit) | over Algorithm 1 |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        ms, kinds = r["ms"], r["kinds"]
        lines.append(
            f"| {r['model']} | {r['link']} | {r['format']} | {ms['dense']:.1f} | "
            f"{ms['project']:.1f} | {ms['kv']:.1f} | {ms['greedy']:.1f} | **{ms['plan']:.1f}** | "
            f"{kinds['dense']} / {kinds['project']} / {kinds['kv']} | {r['speedup']:.2f}x "
            f"({r['flop_limit']:.2f}x) | {100 * r['gain_over_greedy']:.0f} % |"
        )
    return "\n".join(lines) + "\n"


def draw(path: Path, models: list[Case]) -> None:
    """Step times over mask ratios, one panel per model and link."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    masks = [0.02, 0.05, 0.08, 0.11, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5]
    lines = [
        ("dense", "bfloat16", "all dense", {"color": "0.6"}),
        ("greedy", "bfloat16", "Algorithm 1, 16 bit", {"color": "C1", "ls": "--"}),
        ("plan", "bfloat16", "plan, 16 bit", {"color": "C0"}),
        ("plan", "int8", "plan, 8 bit", {"color": "C2"}),
    ]
    figure, panels = plt.subplots(
        len(models), len(LINKS), figsize=(11, 6), sharex=True, sharey="row", squeeze=False
    )
    for axes, case in zip(panels, models, strict=True):
        for axis, link in zip(axes, LINKS, strict=True):
            rows = {f: [row_of(case, m, link, f) for m in masks] for f in ("bfloat16", "int8")}
            for key, fmt, label, style in lines:
                axis.plot(masks, [r["ms"][key] for r in rows[fmt]], label=label, **style)
            limit = [r["ms"]["dense"] / r["flop_limit"] for r in rows["int8"]]
            axis.plot(masks, limit, color="k", lw=0.8, ls=":", label="FLOP limit")
            axis.set_title(f"{case.name}, {link}", fontsize=9)
            axis.set_ylim(bottom=0)
            axis.grid(alpha=0.3)
        axes[0].set_ylabel("ms per step, one row")
    for axis in panels[-1]:
        axis.set_xlabel("mask ratio")
    panels[0][0].legend(fontsize=7)
    figure.suptitle("Estimated steps on an H100 (half of peak), steady state", fontsize=10)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--mask-ratio", type=float, default=0.11)
    parser.add_argument("--markdown", type=Path, help="where to write the table")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    parser.add_argument("--plot", type=Path, help="where to write the plot (needs matplotlib)")
    args = parser.parse_args()
    models = cases()
    rows = [
        row_of(case, args.mask_ratio, link, fmt)
        for case in models
        for link in LINKS
        for fmt in ("bfloat16", "int8")
    ]
    table = markdown(rows)
    print(table)
    for path, text in ((args.markdown, table), (args.json, json.dumps(rows, indent=2) + "\n")):
        if path:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    if args.plot:
        draw(args.plot, models)
    return 0
