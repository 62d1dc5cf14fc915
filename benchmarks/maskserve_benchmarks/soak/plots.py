"""The plot of a soak: memory, files, threads and rows of the worker over time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from maskserve_benchmarks.soak.judge import GROWTH
from maskserve_benchmarks.soak.sampler import Sample

_SIZE = (8.0, 14.5)
_DPI = 90
_MIB = 2**20


def plot(samples: Sequence[Sample], warm_s: float, title: str, path: Path) -> None:
    """Draw seven panels over the minutes; the warm-up is shaded.

    Args:
        samples: samples under load, at least one.
        warm_s: end of the warm-up, in seconds.
        title: title of the figure.
        path: file for the PNG.
    """
    figure, panels = plt.subplots(7, 1, figsize=_SIZE, sharex=True)
    minutes = [sample.time_s / 60 for sample in samples]
    names = sorted(samples[-1].processes, key=lambda n: -samples[-1].processes[n].memory)

    def line(axes: Any, label: str, value: Callable[[Sample], float | None], **style: Any) -> None:
        values = [value(sample) for sample in samples]
        numbers = [float("nan") if value is None else value for value in values]
        axes.plot(minutes, numbers, label=label, linewidth=1.1, **style)

    def of_process(
        name: str, field: str, unit: float = 1, less: float = 0
    ) -> Callable[[Sample], float | None]:
        def read(sample: Sample) -> float | None:
            process = sample.processes.get(name)
            return None if process is None else getattr(process, field) / unit - less

        return read

    memory, change, shared, counts, work, guard, speed = panels
    line(memory, "together", lambda s: s.memory / _MIB, color="black")
    for name in names:
        line(memory, name, of_process(name, "memory", _MIB))
    memory.set_yscale("log")
    memory.set_ylabel("memory, MiB")
    warm = next((s for s in samples if s.time_s > warm_s), samples[-1])
    line(change, "together", lambda s: 100 * (s.memory / warm.memory - 1), color="black")
    for name in names:
        if name in warm.processes:
            base = warm.processes[name].memory / 100
            line(change, name, of_process(name, "memory", base, less=100))
    change.axhline(100 * GROWTH, color="0.6", linestyle="--", linewidth=0.8)
    change.set_ylim(-5, 10)
    change.set_ylabel("since the warm-up, %")
    line(shared, "taken", lambda s: s.shared_memory / _MIB)
    line(shared, "reserved", lambda s: s.shared_memory_size / _MIB, color="0.6")
    shared.set_ylabel("shared memory, MiB")
    for i, name in enumerate(names):
        line(counts, name, of_process(name, "handles"), color=f"C{i}")
        line(counts, "", of_process(name, "threads"), color=f"C{i}", linestyle=":")
    counts.set_yscale("log")
    counts.set_ylabel("handles (threads dotted)")
    line(work, "running", lambda s: s.running)
    line(work, "waiting", lambda s: s.waiting)
    line(work, "in flight", lambda s: s.in_flight)
    line(work, "cached templates", lambda s: s.cached)
    line(work, "in use by rows", lambda s: s.in_use)
    line(work, "pinned", lambda s: s.pinned)
    line(work, "cache, MiB", lambda s: s.cache_bytes / _MIB, color="0.6")
    work.set_ylabel("rows and templates")
    line(guard, "edits made again", lambda s: s.counters["audits_total"])
    line(guard, "templates put to dense", lambda s: s.counters["cache_distrusts_total"])
    guard.set_ylabel("drift guard")
    drift_axes = guard.twinx()
    line(drift_axes, "drift, mean", lambda s: s.drift_mean, color="tab:green")
    line(drift_axes, "largest", lambda s: s.drift_max, color="tab:red")
    drift_axes.set_ylabel("drift")
    drift_axes.set_ylim(bottom=0)
    line(speed, "visits per s", lambda s: s.window.per_s)
    speed.set_ylabel("visits per s")
    times = speed.twinx()
    line(times, "P50 of a hot edit", lambda s: s.window.p50_ms, color="tab:orange")
    times.set_ylabel("P50, ms")
    times.set_ylim(bottom=0)
    for axes in panels:
        axes.axvspan(0, warm_s / 60, color="0.93", zorder=0)
        axes.set_xlim(left=0)
        if axes not in (memory, change, counts):
            axes.set_ylim(bottom=0)
        _legend(axes)
    drift_axes.legend(frameon=False, fontsize=7, loc="lower right")
    times.legend(frameon=False, fontsize=7, loc="lower right")
    speed.set_xlabel("minutes (warm-up shaded)")
    figure.suptitle(title, fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=_DPI)
    plt.close(figure)


def _legend(axes: Any) -> None:
    # Place it beside the lines, not over them.
    axes.legend(frameon=False, fontsize=7, loc="upper left", bbox_to_anchor=(1.08, 1.0))
