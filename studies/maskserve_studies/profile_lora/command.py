"""Find for how many steps an edit may run without its LoRA (`adapters: fast`), judged on finished
pictures.

    python scripts/bench profile_lora assets/adapters/{hollow,ninth-colour}.safetensors \
        --out assets/adapters/profiles.json --plot docs/images/lora_profiles.png

The same edits run with the LoRA from step K on, for K = 1, 2, …, and with the LoRA from the start.
Their pictures agree inside the mask if they meet BARS. The largest K up to which all pictures agree
gives the sigma that `[adapters] profiles` reads: steps at a higher sigma may run without the LoRA.
A LoRA that fails at K = 1 is not written, and its fast edits are exact.

The report also has Katz's rule (§6): the first step after which the latents with and without the
LoRA have a cosine similarity under 0.99. The rule ignores pictures. `--plot` draws both.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from maskserve_benchmarks.checkout import DEMO_MODEL
from maskserve_benchmarks.demo_model.scenes import Edit, held_out_edits
from maskserve_benchmarks.reports import write_json
from maskserve_engine.adapters.lora_file import read_lora
from maskserve_engine.base.job import EditJob
from maskserve_engine.layers.low_rank import LowRankSet
from maskserve_lora.base_layers import BaseLayers
from maskserve_studies.demo_model.looks import LOOKS, edits_with
from maskserve_studies.quality.metrics import Quality, compare, summary
from maskserve_studies.quality.systems import Rig

BARS = {"mean": 40.0, "worst": 30.0}
"""PSNR in dB inside the mask: the mean over all edits, and the least of all edits."""
KATZ = 0.99

Picture = NDArray[np.uint8]


class Run(NamedTuple):
    """Finished edits."""

    pictures: list[Picture]
    latents: list[list[NDArray[np.float32]]]
    """Latents after each step, for each edit."""


class Profiler(Rig):
    """A model and its edits, with a LoRA from a given step on."""

    def lora(self, path: Path) -> LowRankSet:
        """The denoiser's part of a LoRA file."""
        base = BaseLayers.of_folder(self.config.model.path)
        parts = read_lora(path, base, self.config.model.path)
        return self.adapter.low_rank(parts.get("denoiser", {}))

    def run_edits(
        self, edits: Sequence[Edit], jobs: Sequence[EditJob], lora: LowRankSet, begin: int
    ) -> Run:
        """Run dense rows that have the LoRA from step `begin` on."""
        rows = [self.adapter.dense_row(job) for job in jobs]
        latents = []
        for step in range(rows[0].steps):
            if step == begin:
                for row, job in zip(rows, jobs, strict=True):
                    self.adapter.attach(row, job, ((lora, 1.0),))
            self.adapter.step(rows, None)
            latents.append([row.result().array().copy() for row in rows])
        pictures = [self.finish(e, last) for e, last in zip(edits, latents[-1], strict=True)]
        return Run(pictures, latents)


def meets_bars(quality: Quality) -> bool:
    return quality.psnr_in_mask >= BARS["mean"] and quality.worst_psnr_in_mask >= BARS["worst"]


def likeness(with_lora: Run, without: Run) -> list[float]:
    """Cosine similarity of both runs' latents after each step, mean over edits."""
    cosines = []
    for lora_latents, plain_latents in zip(with_lora.latents, without.latents, strict=True):
        pairs = [(a.ravel(), b.ravel()) for a, b in zip(lora_latents, plain_latents, strict=True)]
        similarities = [float(a @ b / (np.linalg.norm(a) * np.linalg.norm(b))) for a, b in pairs]
        cosines.append(float(np.mean(similarities)))
    return cosines


def steps_by_cosine(cosines: Sequence[float]) -> int:
    """Katz's K: the number of steps before the first whose similarity is below KATZ."""
    return next(
        (step for step, similarity in enumerate(cosines) if similarity < KATZ), len(cosines)
    )


def profile_lora(profiler: Profiler, path: Path, edits: Sequence[Edit]) -> dict[str, Any]:
    """K and its sigma, Katz's K, and the PSNR of the pictures at each K that was tried."""
    lora, jobs = profiler.lora(path), profiler.jobs(edits)
    exact = profiler.run_edits(edits, jobs, lora, 0)
    steps = len(exact.latents)
    without = profiler.run_edits(edits, jobs, lora, steps)
    cosines = likeness(exact, without)
    katz = steps_by_cosine(cosines)
    sigmas = [sigma for sigma, _ in profiler.adapter.sigmas(jobs[0])]
    late: dict[int, Quality] = {}
    best = 0
    for k in range(1, steps):
        run = profiler.run_edits(edits, jobs, lora, k)
        late[k] = summary(compare(edits, run.pictures, exact.pictures))
        if not meets_bars(late[k]):
            break
        best = k
    if 0 < katz < steps and katz not in late:
        run = profiler.run_edits(edits, jobs, lora, katz)
        late[katz] = summary(compare(edits, run.pictures, exact.pictures))
    return {
        "steps": steps,
        "k": best,
        "sigma": sigmas[best] if best else None,
        "katz_k": katz,
        "psnr_in_mask": {
            k: {
                "mean": round(quality.psnr_in_mask, 2),
                "worst": round(quality.worst_psnr_in_mask, 2),
            }
            for k, quality in sorted(late.items())
        },
        "sigmas": sigmas,
        "cosines": cosines,
    }


def draw(report: Mapping[str, Mapping[str, Any]], path: Path) -> None:
    """Draw a column for each LoRA over the sigmas of an edit: the similarity of latents with and
    without the LoRA, and the PSNR of finished pictures that have the LoRA from that sigma on.

    Args:
        report: the result of `profile_lora` for each LoRA by name.
        path: the PNG file to write.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(
        2, len(report), figsize=(6.5 * len(report), 7.0), squeeze=False, sharey="row"
    )
    for (name, profile), (above, below) in zip(report.items(), panels.T, strict=True):
        sigmas, trials = profile["sigmas"], profile["psnr_in_mask"]
        # The latents after a step are those that the next step begins with.
        above.plot(
            sigmas[1:], profile["cosines"][:-1], ".-", color="tab:blue", label="latents alike"
        )
        above.axhline(KATZ, linestyle="--", color="tab:red", label=f"the paper's rule: {KATZ}")
        above.set(title=name, ylabel="cosine similarity of latents")
        for statistic, colour in (("mean", "tab:blue"), ("worst", "tab:orange")):
            ys = [trial[statistic] for trial in trials.values()]
            label = f"pictures, {statistic}; at least {BARS[statistic]:g}"
            below.plot([sigmas[k] for k in trials], ys, "o", color=colour, label=label)
            below.axhline(BARS[statistic], linestyle="--", color=colour)
        below.set(xlabel="sigma from which on the LoRA is there", ylabel="PSNR in mask, dB")
        for axes in (above, below):
            for k, rule, colour in (
                (profile["k"], "ours", "tab:green"),
                (profile["katz_k"], "the paper's", "tab:red"),
            ):
                at = sigmas[min(k, len(sigmas) - 1)]
                label = f"{rule}: {k} of {profile['steps']} steps without"
                axes.axvline(at, linestyle=":", color=colour, label=label)
            axes.set_xlim(1.02, -0.02)
            axes.grid(alpha=0.3)
        above.legend(fontsize=8, loc="lower left")
        below.legend(fontsize=8, loc="upper right")
    figure.tight_layout()
    figure.savefig(path, dpi=80)
    pyplot.close(figure)


def keep(report: Mapping[str, Mapping[str, Any]], path: Path) -> None:
    """Write the file that `[adapters] profiles` reads. Entries of other LoRAs stay."""
    profiles = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    profiles = {name: sigma for name, sigma in profiles.items() if name not in report}
    profiles |= {name: profile["sigma"] for name, profile in report.items() if profile["k"]}
    write_json(profiles, path)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("loras", type=Path, nargs="+", help="files; a file's name is the LoRA's")
    parser.add_argument("--model", type=Path, default=DEMO_MODEL)
    parser.add_argument("--steps", type=int, default=28)
    parser.add_argument("--edits", type=int, default=8)
    parser.add_argument("--out", type=Path, help="[adapters] profiles, which others stay in")
    parser.add_argument("--json", type=Path, help="all figures")
    parser.add_argument("--plot", type=Path, help="a PNG: latents, pictures and both rules")
    args = parser.parse_args(arguments)
    profiler = Profiler(args.model, args.steps)
    report = {}
    for path in args.loras:
        name = path.name.removesuffix(".safetensors")
        edits = edits_with(name, args.edits) if name in LOOKS else held_out_edits(args.edits)
        report[name] = profile_lora(profiler, path, edits)
        figures = {key: x for key, x in report[name].items() if key not in ("sigmas", "cosines")}
        print(json.dumps({name: figures}, indent=2), flush=True)
    if args.out:
        keep(report, args.out)
    if args.plot:
        draw(report, args.plot)
    write_json(report, args.json)
    return 0
