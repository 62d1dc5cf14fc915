"""results.json as a page and its plots."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from maskserve_benchmarks.rivals.measurement import UNSEEN_STEPS

Figures = Mapping[str, Any]
MODELS = {
    "bench": "FLUX Fill of width 512 (2 + 4 blocks, random weights), 8 steps",
    "demo": "The demo model (FLUX Fill of width 128, 2 + 4 blocks), 20 steps",
    "pictures": "Text to image (the demo edit model, FLUX.2 klein of width 128), 20 steps",
    "adapters": "Text to image with adapters (the demo UNet, cut to four channels), 20 steps",
}
_COLOURS = {"diffusers": "0.45", "first_block": "0.6", "crop": "0.75", "dense": "tab:blue"}
_MASKSERVE_COLOUR = "tab:orange"
_TIMES = ("mean", "p50", "p95", "p99", "waited")


def write_page(report: Figures, folder: Path) -> None:
    """Write README.md and its plots to `folder`."""
    (folder / "README.md").write_text(page(report), encoding="utf-8")
    plot_throughput(report, folder / "throughput.png")
    plot_latency(report, folder / "latency.png")
    plot_studies(report, folder / "studies.png")


def page(report: Figures) -> str:
    summary = report["summary"]
    lines = [
        "# Beside what people would use instead",
        "",
        _written(report["about"]),
        "",
        "Load by perf_analyzer over gRPC. Every system serves the same edits (production mask "
        "ratios, mean 0.11; four pictures, whose templates are primed) in the same Triton, in "
        "turn. *diffusers' pipeline* is FluxFillPipeline, or for text to image "
        "Flux2KleinPipeline and StableDiffusionControlNetPipeline, in a Triton Python model with "
        "dynamic batching.",
        "",
        "*Good*: the share answered within twice what the pipeline takes alone. *Waits*: mean ms "
        "until an edit has a row of maskserve's, or is in a call of the pipeline. *Like it*: SSIM "
        "and dB in the mask, or in the whole picture without one, against the pipeline's own whole "
        "picture of the same seed.",
        "",
        f"**At saturation {summary['throughput_vs_diffusers']:g} times the edits per second of "
        "diffusers' pipeline with the larger model** (bar 3), "
        f"{summary['throughput_vs_diffusers_demo']:g} times with the demo model; at the rate where "
        f"the pipeline saturates, held for {summary['saturated_for_s']:.0f} s, the mean latency is "
        f"{summary['mean_latency_vs_diffusers_at_saturation']:g} times lower (bar 14.7).",
        *_queue(report, summary),
        *_products(report),
        *_pictures(summary),
        "",
        "![edits per second](throughput.png)",
        "",
        "![latencies](latency.png)",
        "",
    ]
    for name in _models(report):
        lines += _model(MODELS[name], report[name])
    lines += _studies(report)
    limit = report["bench"]["flop_limit"]
    lines += [READING.format(limit=f"1/{limit:g}", of_limit=summary["of_flop_limit"]), ""]
    return "\n".join(lines)


def _models(report: Figures) -> list[str]:
    """Return the models that were measured: a page of an older report has no text to image."""
    return [name for name in MODELS if name in report]


def _written(about: Figures) -> str:
    """Return the sentence that says how, where and when figures were measured."""
    return (
        f"Written by `{about['command']}` ({about['hardware']}, {about['date']}, commit "
        f"{about['commit']}, {about['minutes']:g} minutes, {about['stolen_share']:.0%} of the "
        "processor's time taken by others)."
    )


def _queue(report: Figures, summary: Figures) -> list[str]:
    """Return the parts of the ratio of mean latencies, if it is below its bar."""
    if summary["mean_latency_vs_diffusers_at_saturation"] >= 14.7:
        return []
    systems = report["bench"]["systems"]
    maskserve_ms, pipeline_ms = (
        systems[name]["rate 1"]["mean_ms"] for name in ("maskserve", "diffusers")
    )
    single_ms = systems["maskserve"]["alone"]["mean_ms"]
    return [
        f"An edit of ours takes {maskserve_ms / 1e3:.2f} s there and {single_ms / 1e3:.2f} s "
        f"alone, one of the pipeline's {pipeline_ms / 1e3:.1f} s; the longer the rate is held, "
        "the longer."
    ]


def _pictures(summary: Figures) -> list[str]:
    """Return the figures of text to image, as far as it was measured."""
    lines = []
    if "pictures_vs_diffusers" in summary:
        lines += [
            "",
            f"Text to image of mixed sizes, {summary['pictures_vs_diffusers']:g} times the "
            "pictures per second at saturation (bar 1); the P95 at the rate where the pipeline "
            f"saturates is {summary['pictures_p95_vs_diffusers']:g} times lower (bar 1.3).",
        ]
    if "adapters_vs_diffusers" in summary:
        lines += [
            "",
            "Text to image with ControlNets and LoRAs in the numbers of Katz's service B (Table 1: "
            "98 and 93 % have one or more; eight of each, all in memory), "
            f"{summary['adapters_vs_diffusers']:g} times the pictures per second at saturation; "
            "the P95 at the rate where the pipeline saturates is "
            f"{summary['adapters_p95_vs_diffusers']:g} times lower.",
        ]
    return lines


def _products(report: Figures) -> list[str]:
    """Return the part of the ratios that does not come from the cache."""
    if not report["about"].get("onednn"):
        return []
    systems = report["bench"]["systems"]
    dense, pipeline_rate = (
        systems[name]["saturated production"]["edits_per_s"] for name in ("dense", "diffusers")
    )
    return [
        "",
        "On this processor maskserve's products are [oneDNN's](../../decisions/devices.md"
        f"#on-cpus), so its dense edits of the larger model are {dense / pipeline_rate:.2f} times "
        "as many as the pipeline's: that part of the ratios is no reuse.",
    ]


def _model(title: str, model: Figures) -> list[str]:
    lines = [
        f"## {title}",
        "",
        f"Pictures of {model['pictures']}, {model['edits_per_run']} edits a run, "
        f"{_rounds(model['rounds'])}.",
        *([_written(model["about"])] if "about" in model else []),
        "",
        *_saturated(model),
    ]
    for kind in model["systems"]["diffusers"]:
        if kind.startswith("rate "):
            lines += _paced(model["systems"], kind)
    return [*lines, "", *_tuning(model), ""]


def _saturated(model: Figures) -> list[str]:
    """Return the table of edits per second with 8 in flight, and what it implies."""
    systems = model["systems"]
    unseen, one_size = (model["studies"].get(study, {}) for study in ("unseen", "one_size"))
    second_rates = one_size or unseen
    second = f"pictures never seen, {UNSEEN_STEPS} steps" if unseen else ""
    second = "all of one size" if one_size else second
    lines = [
        f"| system | edits/s, 8 in flight (rounds) | {second} | alone ms | like it |",
        "|---|---|---|---|---|",
    ]
    for key, system in systems.items():
        full, like = system["saturated production"], system["likeness"]
        low, high = full["spread"]
        lines.append(
            f"| {system['label']} | **{full['edits_per_s']:.2f}** ({low:.2f} to {high:.2f}) | "
            f"{format(second_rates[key], '.2f') if key in second_rates else ''} | "
            f"{system['alone']['mean_ms']:.0f} | {like['ssim_in_mask']:.3f}, "
            f"{like['psnr_in_mask']:.1f} dB |"
        )
    if unseen:
        pipeline_rate = unseen["diffusers"]
        lines += [
            "",
            f"Pictures never seen: {unseen['maskserve'] / pipeline_rate:.2f} times the pipeline's "
            f"edits; primed, at as many steps, {unseen['primed'] / pipeline_rate:.2f} times as "
            f"many ({unseen['primed']:.2f} edits/s).",
        ]
    if "saturated public" in systems["diffusers"]:
        public_rates = (
            f"{s['label']} {s['saturated public']['edits_per_s']:.2f}" for s in systems.values()
        )
        lines += [
            "",
            f"With the public distribution (mean ratio 0.19), edits/s: {', '.join(public_rates)}.",
        ]
    return lines


def _paced(systems: Figures, kind: str) -> list[str]:
    """Return the table of latencies at one rate of arrivals."""
    lines = [
        "",
        f"Poisson arrivals at {float(kind.split()[1]):g} of the pipeline's edits per second "
        f"({systems['diffusers'][kind]['sent_per_s']:.2f}/s):",
        "",
        "| system | mean ms | P50 | P95 | P99 | waits | good |",
        "|---|---|---|---|---|---|---|",
    ]
    for system in systems.values():
        if kind in system:
            run = system[kind]
            times = " | ".join(f"{run[name + '_ms']:.0f}" for name in _TIMES)
            lines.append(f"| {system['label']} | {times} | {run['good_share']:.0%} |")
    return lines


def _tuning(model: Figures) -> list[str]:
    """Return how both sides share the cores."""
    ways = ", ".join(f"{way} {rate:.2f}" for way, rate in model["own_tuning"].items())
    lines = [
        f"Ways of maskserve to share the cores, edits/s with 8 in flight: {ways}. The first, the "
        "default, runs unless another has over 5 % more.",
        "",
    ]
    if not model["tuning"]:
        return [
            *lines,
            "The pipeline ran as two instances of one thread, in batches of up to 4.",
        ]
    settings = "; ".join(
        f"batches of {tuning['batch']}, {tuning['delay_ms']} ms of delay, {tuning['instances']} x "
        f"{tuning['threads']} threads {tuning['edits_per_s']:.2f}"
        for tuning in model["tuning"]
    )
    return [*lines, f"Settings of the pipeline that were tried, edits/s: {settings}."]


def _studies(report: Figures) -> list[str]:
    lines = [
        "## Looked at more closely",
        "",
        "Edits/s by the number in flight (FlashPS Fig. 14), and seconds of one edit alone by its "
        "mask's share (Fig. 15); results.json has the numbers.",
        "",
        "![studies](studies.png)",
        "",
    ]
    for name in _models(report):
        studies, systems = report[name]["studies"], report[name]["systems"]
        if "ablation" in studies:
            dense = systems["dense"]
            workers = {
                **studies["ablation"],
                "no cached rows: all tokens": {
                    "edits_per_s": dense["saturated production"]["edits_per_s"],
                    "alone_ms": dense["alone"]["p50_ms"],
                },
            }
            lines += ["maskserve without a part, or configured otherwise:", ""]
            lines += ["| worker | edits/s, 8 in flight | alone ms |", "|---|---|---|"]
            lines += [
                f"| {name} | {worker['edits_per_s']:.2f} | {worker['alone_ms']:.0f} |"
                for name, worker in workers.items()
            ]
            lines.append("")
        if "routing" in studies:
            routed = studies["routing"]
            p95 = ", ".join(f"{name} {ms:.0f} ms" for name, ms in routed["p95_ms"].items())
            lines += [
                f"Two workers that share the cores behind a router (Fig. 16), the public mix, "
                f"{routed['edits']} edits a run at {routed['sent_per_s']:.2f}/s "
                f"({routed['load']:g} of what both can do), P95 by policy: {p95}. With a device "
                "for each worker a policy matters more ([simulated](../../decisions/routing.md)).",
                "",
            ]
        if "loras" in studies:
            pipeline_rate, maskserve_rate = (
                studies["loras"][key] for key in ("diffusers", "maskserve")
            )
            lines += [
                "One of eight LoRAs of rank 16 on 95 % of the edits (Katz's shares), edits/s with "
                f"8 in flight: diffusers' pipeline {pipeline_rate:.2f} (one set per call), "
                f"maskserve {maskserve_rate:.2f} (any mix in a batch): "
                f"{maskserve_rate / pipeline_rate:.2f} times.",
                "",
            ]
    return lines


def _rounds(count: int) -> str:
    return "one round" if count == 1 else f"medians of {count} rounds"


READING = """## Reading these numbers

- **A CPU is bound by FLOPs**: batching gains little, and a mask gains what it saves in FLOPs. With
  these masks a cached step has {limit} of a dense one's where no ring is computed; maskserve
  reaches {of_limit:.0%} of that limit over its own dense rows.
- **The larger model has random weights**: judge pictures by the demo model's table."""


def plot_throughput(report: Figures, path: Path) -> None:
    """Plot edits per second at saturation, one bar per system."""
    pyplot, names = _pyplot(), _models(report)
    figure, axes = pyplot.subplots(1, len(names), figsize=(5.5 * len(names), 3.4))
    for ax, name in zip(axes, names, strict=True):
        systems = report[name]["systems"]
        keys = list(systems)[::-1]
        rates = [systems[key]["saturated production"]["edits_per_s"] for key in keys]
        bars = ax.barh(
            [systems[key]["label"] for key in keys],
            rates,
            color=[_COLOURS.get(key, _MASKSERVE_COLOUR) for key in keys],
        )
        ax.bar_label(bars, [f"{rate:.2f}" for rate in rates], padding=3)
        ax.set_title(MODELS[name].split(",")[0].split(" (")[0], fontsize=10)
        ax.set_xlabel("edits/s, 8 in flight")
        ax.margins(x=0.15)
        ax.spines[["top", "right"]].set_visible(False)
    _save(figure, path)


def plot_latency(report: Figures, path: Path) -> None:
    """Plot mean and P95 at each rate, one group of bars per rate."""
    pyplot, names = _pyplot(), _models(report)
    figure, axes = pyplot.subplots(1, len(names), figsize=(5.5 * len(names), 3.6))
    for ax, name in zip(axes, names, strict=True):
        systems = report[name]["systems"]
        kinds = [kind for kind in systems["diffusers"] if kind.startswith("rate ")]
        width = 0.8 / len(systems)
        for index, (key, system) in enumerate(systems.items()):
            if not all(kind in system for kind in kinds):
                continue
            positions = [place + index * width for place in range(len(kinds))]
            mean = [system[kind]["mean_ms"] / 1e3 for kind in kinds]
            p95 = [system[kind]["p95_ms"] / 1e3 for kind in kinds]
            colour = _COLOURS.get(key, _MASKSERVE_COLOUR)
            alpha = 1.0 if key in ("maskserve", *_COLOURS) else 0.5
            ax.bar(positions, p95, width, color=colour, alpha=0.3 * alpha)
            ax.bar(positions, mean, width, color=colour, alpha=alpha, label=system["label"])
        sent_rates = [systems["diffusers"][kind]["sent_per_s"] for kind in kinds]
        ax.set_xticks(
            [place + 0.4 - width / 2 for place in range(len(kinds))],
            [f"{rate:.2f}/s" for rate in sent_rates],
        )
        ax.set_ylabel("seconds: mean, and P95 (pale)")
        ax.set_title(MODELS[name].split(",")[0].split(" (")[0], fontsize=10)
        ax.spines[["top", "right"]].set_visible(False)
    most = max(axes, key=lambda ax: len(ax.get_legend_handles_labels()[0]))
    figure.legend(
        *most.get_legend_handles_labels(), loc="upper center", ncols=4, fontsize=8, frameon=False
    )
    _save(figure, path, top=0.86)


def plot_studies(report: Figures, path: Path) -> None:
    """Plot the studies of Figs. 14 and 15 for each model, side by side."""
    panels = [
        (report[name], study, axis, unit, scale)
        for study, axis, unit, scale in (
            ("batch_size", "edits in flight", "edits/s", 1.0),
            ("mask_ratio", "mask's share of the picture", "seconds, one edit alone", 1e-3),
        )
        for name in _models(report)
        if study in report[name]["studies"]
    ]
    pyplot = _pyplot()
    figure, grid = pyplot.subplots(1, len(panels), figsize=(5.5 * len(panels), 3.4), squeeze=False)
    for ax, (model, study, axis, unit, scale) in zip(grid[0], panels, strict=True):
        for key, values in model["studies"][study].items():
            ax.plot(
                [float(point) for point in values],
                [scale * value for value in values.values()],
                marker="o",
                color=_COLOURS.get(key, _MASKSERVE_COLOUR),
                label=model["systems"][key]["label"],
            )
        ax.set_xlabel(axis)
        ax.set_ylabel(unit)
        ax.set_ylim(bottom=0)
        ax.set_title(f"pictures of {model['pictures']}", fontsize=10)
        ax.spines[["top", "right"]].set_visible(False)
    grid[0][0].legend(fontsize=8, frameon=False)
    _save(figure, path)


def _pyplot() -> Any:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    return pyplot


def _save(figure: Any, path: Path, top: float = 1.0) -> None:
    figure.tight_layout(rect=(0.0, 0.0, 1.0, top))
    figure.savefig(path, dpi=110)
