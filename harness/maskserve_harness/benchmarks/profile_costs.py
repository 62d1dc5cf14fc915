"""Measure what steps and loads cost on this machine, and fit the cost model (FlashPS Fig. 11).

Steps of dense, project and kv rows over batches and mask ratios against their counted FLOPs; loads
over sizes against their bytes, from memory, from a tmpfs and from a disk. The least of several
times counts: whatever else the machine does makes a step longer, never shorter.

    python scripts/bench profile_costs --preset small --json costs.json --plot costs.png
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from maskserve_core.planning.cost_model import CostModel, Line, fit
from maskserve_engine.cache.codec import encode
from maskserve_engine.cache.entries import AnchorEntry, BlockEntry
from maskserve_engine.cache.folder_tier import FolderTier
from maskserve_engine.cache.movers import HostMover
from maskserve_engine.cache.tier import Note
from maskserve_harness.benchmarks.machine import machine
from maskserve_harness.benchmarks.page import write_page
from maskserve_harness.benchmarks.pipeline_rig import tokens
from maskserve_harness.benchmarks.step_rig import PRESETS, Bench
from maskserve_harness.benchmarks.timing import forget

BATCHES, RATIOS = (1, 2, 4), (0.05, 0.2, 0.5)
LOAD_TOKENS = (256, 1024, 4096, 16384)
_WIDTH = 1024
PAGE = """
Seconds of dense, project and kv steps over batches and mask ratios against their counted FLOPs,
and of loads against their bytes, from memory, a tmpfs and a disk (the page cache told to forget):
lines with the least squares of relative errors (FlashPS Fig. 11 has R² 0.99 for compute). The
least of several times counts.
"""
Samples = dict[str, list[tuple[float, float]]]
"""By line: (FLOPs or bytes, seconds)."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--preset", choices=PRESETS, default="small")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--batches", type=int, nargs="+", default=list(BATCHES))
    parser.add_argument("--mask-ratios", type=float, nargs="+", default=list(RATIOS))
    parser.add_argument("--disk", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--page", type=Path, help="write a page of docs/benchmarks")
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args(argv)
    device = torch.device(args.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    bench = Bench(args.preset, None, dtype, device, "int8")
    bench.fill_entry("both")
    samples = {
        "compute": steps(bench, args.batches, args.mask_ratios, args.repeat),
        **loads(args.repeat, args.disk),
    }
    lines = {name: fit(*zip(*each, strict=True)) for name, each in samples.items()}
    compute = lines.pop("compute")
    model = CostModel(machine(), compute, lines)
    for name, line in {"compute": compute, **lines}.items():
        print(
            f"{name:8} {1e3 * line.fixed:8.3f} ms + {1e9 * line.per_unit:.4g} ns per "
            f"{'FLOP' if name == 'compute' else 'byte'}  R² {line.r2:.4f}  ({line.samples} sizes)"
        )
    if args.json:
        args.json.write_text(json.dumps(model.to_json(), indent=1) + "\n", encoding="utf-8")
    if args.plot:
        plot(samples, {"compute": compute, **lines}, args.plot)
    if args.page:
        rows = [
            {
                "line": name,
                "fixed ms": 1e3 * line.fixed,
                "ns per FLOP or byte": 1e9 * line.per_unit,
                "R²": line.r2,
                "sizes": line.samples,
            }
            for name, line in {"compute": compute, **lines}.items()
        ]
        write_page(args.page, "Costs of steps and loads", PAGE, [rows], args.plot)
    return 0


def steps(
    bench: Bench, batches: Sequence[int], ratios: Sequence[float], repeat: int
) -> list[tuple[float, float]]:
    """(FLOPs, seconds) of steps whose entries are there."""
    measured = []
    for batch in batches:
        for ratio in ratios:
            rows = [bench.row(ratio, seed) for seed in range(batch)]
            for kind in ("dense", "project", "kv"):
                flops = bench.work.step_flops([tokens(row) for row in rows], kind)
                seconds = least(lambda r=rows, k=kind: bench.step(r, k), repeat)  # type: ignore[misc]
                measured.append((flops, seconds))
    return measured


def loads(repeat: int, disk: Path) -> Samples:
    """(bytes, seconds) of loads of half the tokens of a tensor, by tier."""
    samples: Samples = {"device": [], "host": [], "disk": []}
    mover, note = HostMover(), Note("profile", 1, 1.0)
    with (
        tempfile.TemporaryDirectory(dir="/dev/shm") as host,
        tempfile.TemporaryDirectory(dir=disk) as far,
    ):
        tiers = {"host": FolderTier("host", host, 2**34), "disk": FolderTier("disk", far, 2**34)}
        for count in LOAD_TOKENS:
            entry = _entry(count)
            ids = np.arange(0, count, 2)
            size = sum(coded.nbytes_of(len(ids)) for coded in entry.blocks[0].part("kv"))

            def gather(source: AnchorEntry, ids: NDArray[np.int64] = ids) -> None:
                mover.move(source.blocks[0].part("kv"), ids)

            samples["device"].append((size, least(lambda e=entry: gather(e), repeat)))  # type: ignore[misc]
            for name, tier in tiers.items():
                tier.put(str(count), entry, note)

                def fetch(t: FolderTier = tier, key: str = str(count)) -> None:
                    if t.name == "disk":
                        for path in (t.folder / key).glob("*.safetensors"):
                            forget(path)
                    found = t.get(key, entry.anchor)  # noqa: B023
                    assert found is not None
                    gather(found)

                samples[name].append((size, least(fetch, repeat)))
    return samples


def least(work: Callable[[], object], repeat: int) -> float:
    """Seconds of the fastest of several runs, after one that warms up."""
    work()
    times = []
    for _ in range(repeat):
        begin = time.perf_counter()
        work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return min(times)


def plot(samples: Samples, lines: dict[str, Line], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 2, figsize=(9, 3.6))
    for name, each in samples.items():
        panel = panels[0] if name == "compute" else panels[1]
        x, seconds = np.array(each).T
        panel.plot(x, 1e3 * seconds, "o", label=f"{name}, R² {lines[name].r2:.3f}")
        panel.plot(x, [1e3 * lines[name].seconds(each) for each in x], "-", color="0.6")
    panels[0].set(xlabel="FLOPs of the step", ylabel="ms")
    panels[1].set(xlabel="bytes of the load", ylabel="ms")
    for panel in panels:
        panel.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=100)


def _entry(count: int) -> AnchorEntry:
    from maskserve_core.contracts.entry_key import Anchor

    keys, values = (encode(torch.randn(count, _WIDTH), "int8") for _ in range(2))
    return AnchorEntry(Anchor(0.5, 500.0), (BlockEntry(None, keys, values),))


if __name__ == "__main__":
    sys.exit(main())
