"""Measure the time and the bytes of each part of a whole edit, and compare them with diffusers'
pipeline in the same run.

A real Triton serves the demo model and a larger one of random weights (FLUX Fill of width 512, 2+4
blocks, 256 x 256 pixels). The command measures edits/s with one and with eight in flight, CPU
milliseconds per edit of each process, META's times of the stages, and the bytes that the ensemble's
models pass to one another. It does so for production masks and for single mask ratios, with hot
templates (registered and primed) and cold ones (new to the worker). These systems take turns:

- a worker with one process;
- a worker whose steps run in a process per core, as with `--devices-per-worker auto`;
- a worker without `[stages]`, which shows what stored and partial stages save;
- FluxFillPipeline with batches of eight, in one process with all cores and in a process per core.

    python scripts/bench bench_edit --quick --json edit.json
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import tomli_w
import torch
from PIL import Image

from maskserve_benchmarks.checkout import CHECKOUT, DEMO_MODEL
from maskserve_benchmarks.machine import machine, stolen_s
from maskserve_benchmarks.perf.inputs import Edit, InputOptions, draw_mask, find_photos, make_edits
from maskserve_benchmarks.reports import write_json
from maskserve_benchmarks.triton_calls import Grpc, decode
from maskserve_common.config import cores
from maskserve_common.config_file import config_of
from maskserve_common.contracts.meta import STAGES
from maskserve_common.contracts.settings import parse_settings
from maskserve_common.contracts.tensors import ensemble_steps
from maskserve_common.imaging.images import encode_image
from maskserve_common.liveness import signed_in
from maskserve_engine.families.registry import load_encoder
from maskserve_engine.families.specs import counted_work, load_spec
from maskserve_engine.stages.encoded import pack_conditioning
from maskserve_serving.command import TUNING
from maskserve_serving.options import ServeOptions
from maskserve_serving.ports import free_base_port
from maskserve_serving.supervisor import Supervisor
from maskserve_triton.accept import accept_edit
from maskserve_triton.preprocess import prepare_edit

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

RATIOS = (0.02, 0.05, 0.15, 0.3, 0.5)
OFF = {"prompt_bytes": 0, "template_bytes": 0, "encode_halo": 0, "decode_halo": 0}
"""`[stages]` of a worker that encodes and decodes every edit in full."""
ROUNDS = 3
"""Number of rounds in which workers and the pipeline take turns; reports hold the median."""
_PROCESSES = min(8, 1 << (cores().bit_length() - 1))
"""Processes of a worker that divides its cores among them: a power of two."""
_PRIME_LIMIT_S = 120.0
Figures = dict[str, Any]


def large_model(folder: Path, *, pictures: bool = False) -> Path:
    """Make a copy of the demo model's folder with a larger transformer of random weights.

    Args:
        folder: where the copy goes.
        pictures: whether it makes pictures of a text, as FLUX.1 dev; else it fills masks.
    """
    from diffusers import FluxTransformer2DModel

    small = json.loads((DEMO_MODEL / "transformer" / "config.json").read_text(encoding="utf-8"))
    sizes = {name: value for name, value in small.items() if not name.startswith("_")}
    if pictures:
        sizes["in_channels"] = sizes["out_channels"]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = FluxTransformer2DModel(**{**sizes, "num_attention_heads": 16})
    folder.mkdir()
    written = ("model_index.json", "maskserve.toml", ".maskserve-digests.json")
    for part in DEMO_MODEL.iterdir():
        if part.name not in ("transformer", *written):
            (folder / part.name).symlink_to(part.resolve())
    index = (DEMO_MODEL / "model_index.json").read_text(encoding="utf-8")
    if pictures:
        index = index.replace("FluxFillPipeline", "FluxPipeline")
    (folder / "model_index.json").write_text(index, encoding="utf-8")
    model.save_pretrained(folder / "transformer")
    tables = {
        "model": {"max_sequence_length": 16, "native_resolution": 256, "num_inference_steps": 8}
    }
    (folder / "maskserve.toml").write_text(tomli_w.dumps(tables), encoding="utf-8")
    return folder


class Site:
    """A worker under measurement.

    Args:
        supervisor: supervisor of the one worker.
    """

    def __init__(self, supervisor: Supervisor) -> None:
        [worker] = supervisor.workers
        self.grpc = Grpc(worker.grpc_url)
        self._processes = {
            pid: (model, psutil.Process(pid)) for model, pid in signed_in(worker.spec.files.runtime)
        }
        servers = {process.ppid() for _, process in self._processes.values()}
        for model, process in list(self._processes.values()):
            for rank in process.children(recursive=True):
                self._processes[rank.pid] = (model, rank)
        for pid in servers:
            self._processes[pid] = ("tritonserver", psutil.Process(pid))

    def prime(self, image: bytes) -> None:
        """Register a picture and wait until it is primed."""
        answer = self.grpc.control("register", image=base64.b64encode(image).decode())
        end = time.monotonic() + _PRIME_LIMIT_S
        while self.grpc.control("prime", template_id=answer["template_id"])["state"] != "primed":
            if time.monotonic() > end:
                raise TimeoutError("a template is not primed")
            time.sleep(0.05)

    def cpu_ms(self) -> Counter[str]:
        """Return the processor milliseconds that each model's processes have used so far."""
        used: Counter[str] = Counter()
        for model, process in self._processes.values():
            times = process.cpu_times()
            used[model] += int(1e3 * (times.user + times.system))
        return used

    def run(self, edits: Sequence[Edit], concurrent: int) -> Figures:
        """Send edits, at most `concurrent` at a time, and count."""
        cpu_before_ms, stolen, begin = self.cpu_ms(), stolen_s(), time.perf_counter()
        with ThreadPoolExecutor(concurrent) as pool:
            answers = list(pool.map(lambda edit: self.grpc.edit(edit.tensors()), edits))
        took = time.perf_counter() - begin
        used, metas = self.cpu_ms() - cpu_before_ms, [meta for _, meta in answers]
        count = len(edits)
        per_model = {model: round(ms / count, 1) for model, ms in sorted(used.items())}
        return {
            "edits": count,
            "edits_per_s": round(count / took, 3),
            "stolen_share": round((stolen_s() - stolen) / took / cores(), 3),
            "cpu_ms": round(sum(used.values()) / count, 1),
            "cpu_ms_outside_steps": round((used.total() - used["denoiser"]) / count, 1),
            "cpu_ms_by_model": per_model,
            "stages_ms": {
                stage: round(statistics.median(meta["timings_ms"][stage] for meta in metas), 1)
                for stage in STAGES
            },
            "cache": dict(Counter(meta["cache"] for meta in metas)),
            "decoded": round(statistics.mean(meta["decoded"] for meta in metas), 3),
            "encoded": dict(Counter(_encoded(meta) for meta in metas)),
            "mask_ratio": round(statistics.mean(edit.mask_ratio for edit in edits), 3),
            "dense_steps": round(statistics.mean(meta.get("dense_steps", 0) for meta in metas), 2),
            "active_tokens": round(statistics.mean(meta["active_tokens"] for meta in metas), 1),
        }


def _encoded(meta: dict[str, Any]) -> str:
    """Return META's words on the encoding of an edit's parts, without the number of edits that
    shared a call.
    """
    return " ".join(how for part, how in meta["encoded"].items() if part != "batch")


@contextmanager
def worker_of(
    model: Path,
    folder: Path,
    stages: dict[str, int] | None = None,
    processes: int = 1,
    tables: Mapping[str, Mapping[str, Any]] | None = None,
    *,
    mps: bool = False,
) -> Iterator[Site]:
    """Run a worker of a model while the context lasts; its steps use `processes` processes,
    `tables` are further tables of its configuration, and `mps` is the option of `maskserve serve`.
    """
    folder.mkdir()
    config = folder / "config.toml"
    tables = {"stages": stages or {}, **(tables or {})}
    tables["model"] = {**tables.get("model", {}), "path": str(model)}
    config.write_text(tomli_w.dumps(tables), encoding="utf-8")
    options = ServeOptions(
        model=str(model),
        base_port=free_base_port(),
        config=config,
        devices_per_worker=processes,
        mps=mps,
        log_dir=folder / "logs",
        report=lambda line: None,
    )
    with Supervisor(options) as supervisor:
        site = Site(supervisor)
        try:
            yield site
        finally:
            site.grpc.close()


def production_edits(size: int, count: int, templates: int) -> list[Edit]:
    """Return edits with production masks."""
    options = InputOptions(size, count, templates, settings={"cache": "auto"})
    return make_edits(options, find_photos(CHECKOUT / "assets"))


def with_ratio(edits: Sequence[Edit], size: int, ratio: float) -> list[Edit]:
    """Return the same edits with masks of one ratio."""
    rng = np.random.default_rng(1)
    masked_edits = []
    for edit in edits:
        mask = draw_mask(size, ratio, rng)
        encoded = encode_image(mask * np.uint8(255), "png")
        masked_edits.append(replace(edit, mask=encoded, mask_ratio=float(mask.mean())))
    return masked_edits


def cold_edits(edits: Sequence[Edit], seed: int) -> list[Edit]:
    """Return the same edits, each with a picture and a prompt of its own."""
    rng, fresh_edits = np.random.default_rng(seed), []
    for number, edit in enumerate(edits):
        pixels = decode(edit.image).copy()
        pixels[0, :8] = rng.integers(0, 256, (8, 3))
        prompt = f"{edit.prompt} {seed}.{number}"
        fresh_edits.append(replace(edit, image=encode_image(pixels, "png"), prompt=prompt))
    return fresh_edits


def tensor_bytes(model: Path, edit: Edit) -> Figures:
    """Return the bytes of the tensors that the ensemble's models pass to one another for an edit.
    Each tensor is written to shared memory once, and each model that takes it reads it there.
    """
    config = config_of({"model": {"path": str(model)}})
    spec = load_spec(config.model.path)
    edit_settings = parse_settings(json.dumps(edit.settings).encode())
    accepted = accept_edit(edit_settings, edit.prompt.encode(), spec, config)
    ready = prepare_edit(edit.image, edit.mask, accepted, spec, config)
    encoded = load_encoder(config).encode(ready.pixels, ready.edit_mask, edit.prompt)
    _, height, width = encoded.moments.shape
    sizes = {
        "IMAGE": len(edit.image),
        "MASK": len(edit.mask),
        "PIXELS": ready.pixels.nbytes,
        "EDIT_MASK": ready.edit_mask.nbytes,
        "REQUEST": len(ready.request.to_json()),
        "CONTEXT": ready.context.pack().nbytes,
        "MOMENTS": encoded.moments.nbytes,
        "MASKED_MOMENTS": encoded.masked_moments.nbytes,
        "CONDITIONING": pack_conditioning(encoded.conditioning, encoded.negative).nbytes,
        "LATENTS": 4 * spec.latent_channels * height * width,
    }
    reads: Counter[str] = Counter()
    for step in ensemble_steps():
        reads.update(name for name in step.inputs if name in sizes)
    return {
        "by_tensor": {name: {"bytes": sizes[name], "reads": reads[name]} for name in sizes},
        "total": sum(sizes[name] * (1 + reads[name]) for name in sizes),
    }


def flop_limit(model: Path, size: int, active: float) -> float:
    """Return FLOPs of a dense step over FLOPs of a cached step that computes `active` image tokens:
    the largest possible gain of the steps alone.
    """
    spec = load_spec(str(model))
    side = size // spec.vae_scale_factor
    length = config_of({"model": {"path": str(model)}}).model.max_sequence_length
    work = counted_work(spec, side, side)
    row = work.row_at(active / work.row_at(1.0, length).active[0], length)
    return float(work.step_flops([row], "dense") / work.step_flops([row], "kv"))


class Pipeline:
    """FluxFillPipeline with batches of eight and a fixed number of threads."""

    def __init__(self, model: Path, edits: Sequence[Edit], threads: int) -> None:
        from diffusers import FluxFillPipeline

        tables = tomllib.loads((model / "maskserve.toml").read_text(encoding="utf-8"))["model"]
        self._steps, self._length = tables["num_inference_steps"], tables["max_sequence_length"]
        self._pipe = FluxFillPipeline.from_pretrained(str(model))
        self._pipe.set_progress_bar_config(disable=True)
        self._edits = list(edits)
        torch.set_num_threads(threads)

    def run(self, number: int) -> Figures:
        """Run one batch of the edits."""
        batch = [self._edits[(8 * number + i) % len(self._edits)] for i in range(8)]
        side = decode(batch[0].image).shape[0]
        begin, used = time.perf_counter(), time.process_time()
        self._pipe(
            prompt=[edit.prompt for edit in batch],
            image=[Image.fromarray(decode(edit.image)) for edit in batch],
            mask_image=[Image.fromarray(decode(edit.mask)[..., 0]) for edit in batch],
            height=side,
            width=side,
            num_inference_steps=self._steps,
            max_sequence_length=self._length,
            generator=[torch.Generator("cpu").manual_seed(i) for i in range(8)],
        )
        return {
            "edits_per_s": round(8 / (time.perf_counter() - begin), 3),
            "cpu_ms": round(1e3 * (time.process_time() - used) / 8, 1),
        }


class Pipelines:
    """Several processes that work at the same time, each with a pipeline of one thread."""

    def __init__(self, model: Path, edits: Sequence[Edit], processes: int) -> None:
        self._count = processes
        self._pool = ProcessPoolExecutor(
            processes, get_context("spawn"), _load_pipeline, (model, edits)
        )

    def run(self, number: int) -> Figures:
        """Run one batch in each process."""
        begin = time.perf_counter()
        numbers = range(number * self._count, (number + 1) * self._count)
        used = [float(run["cpu_ms"]) for run in self._pool.map(_run_pipeline, numbers)]
        rate = 8 * self._count / (time.perf_counter() - begin)
        return {"edits_per_s": round(rate, 3), "cpu_ms": round(statistics.mean(used), 1)}

    def close(self) -> None:
        self._pool.shutdown()


_pipelines: list[Pipeline] = []
"""The one pipeline of a process of `Pipelines`."""


def _load_pipeline(model: Path, edits: Sequence[Edit]) -> None:
    _pipelines.append(Pipeline(model, edits, 1))


def _run_pipeline(number: int) -> Figures:
    return _pipelines[0].run(number)


def median_of(runs: Sequence[Figures]) -> Figures:
    """Return the run of median speed, with the speeds of all runs."""
    ordered = sorted(runs, key=lambda run: float(run["edits_per_s"]))
    rates = [run["edits_per_s"] for run in runs]
    return {**ordered[len(ordered) // 2], "edits_per_s": statistics.median(rates), "runs": rates}


def measure_model(
    model: Path, size: int, folder: Path, scale: int, rounds: int, *, sweep: bool
) -> Figures:
    """Measure everything for one model.

    Args:
        model: folder of the model.
        size: side of the pictures, in pixels.
        folder: folder for files of the workers.
        scale: number of edits divided by eight.
        rounds: rounds in which workers and the pipeline take turns.
        sweep: whether to also measure mask ratios and cold templates.
    """
    edits = production_edits(size, 8 * scale, 4)
    small = with_ratio(edits, size, 0.1)
    report: Figures = {"pictures": f"{size}x{size}", "bytes": tensor_bytes(model, edits[0])}
    cases = {
        "one": (edits[: 2 * scale], 1),
        "eight": (edits, 8),
        "small_one": (small[: 2 * scale], 1),
        "small_eight": (small, 8),
    }
    with ExitStack() as stack:
        workers = {
            "hot": worker_of(model, folder / "hot"),
            "off": worker_of(model, folder / "off", OFF),
            "ranks": worker_of(model, folder / "ranks", processes=_PROCESSES),
        }
        sites = {name: stack.enter_context(worker) for name, worker in workers.items()}
        pipelines: dict[str, Pipeline | Pipelines] = {
            "one": Pipeline(model, edits, cores()),
            "ranks": stack.enter_context(closing(Pipelines(model, edits, _PROCESSES))),
        }
        for site in sites.values():
            for image in sorted({edit.image for edit in edits}):
                site.prime(image)
            site.run(edits[:8], 8)  # work that a worker does only once
        for pipeline in pipelines.values():
            pipeline.run(0)
        runs: dict[str, dict[str, list[Figures]]] = {
            name: {case: [] for case in cases} for name in sites
        }
        batches: dict[str, list[Figures]] = {name: [] for name in pipelines}
        for number in range(rounds):
            for case, (case_edits, concurrent) in cases.items():
                for name, site in sites.items():
                    runs[name][case].append(site.run(case_edits, concurrent))
            for name, pipeline in pipelines.items():
                batches[name].append(pipeline.run(number))
        for name in sites:
            report[name] = {case: median_of(runs[name][case]) for case in cases}
        report["diffusers"] = {name: median_of(batches[name]) for name in pipelines}
        active = report["hot"]["eight"]["active_tokens"]
        report["steps_flop_limit"] = round(flop_limit(model, size, active), 2)
        print(json.dumps({name: report[name] for name in (*sites, "diffusers")}), flush=True)
        if sweep:
            report |= measure_masks(sites["hot"], edits, size, scale)
    return report


def measure_masks(site: Site, edits: Sequence[Edit], size: int, scale: int) -> Figures:
    """Measure cold templates, and hot ones by mask ratio."""
    cold = {
        "one": site.run(cold_edits(edits[: 2 * scale], 1), 1),
        "eight": site.run(cold_edits(edits, 2), 8),
    }
    by_ratio = {}
    for ratio in RATIOS:
        masked = with_ratio(edits, size, ratio)
        by_ratio[str(ratio)] = {
            "one": site.run(masked[: 2 * scale], 1),
            "eight": site.run(masked, 8),
        }
    figures = {"cold": cold, "by_ratio": by_ratio}
    print(json.dumps(figures), flush=True)
    return figures


def faster(*runs: Figures) -> Figures:
    return max(runs, key=lambda run: float(run["edits_per_s"]))


def summary_of(reports: dict[str, Figures]) -> Figures:
    """Return each model's figures that have bars. `vs_diffusers` compares each side at its better
    way to share the cores, as `--devices-per-worker auto` does: one process, or one process per
    core.
    """
    figures: Figures = {}
    for name, report in reports.items():
        single_process, ranks = (report[site]["eight"] for site in ("hot", "ranks"))
        maskserve_run, diffusers_run = (
            faster(single_process, ranks),
            faster(*report["diffusers"].values()),
        )
        rate = diffusers_run["edits_per_s"]
        figures |= {
            f"vs_diffusers_{name}": round(maskserve_run["edits_per_s"] / rate, 2),
            f"vs_diffusers_{name}_one_process": round(single_process["edits_per_s"] / rate, 2),
            f"vs_diffusers_{name}_cpu": round(diffusers_run["cpu_ms"] / maskserve_run["cpu_ms"], 2),
            f"steps_flop_limit_{name}": report["steps_flop_limit"],
        }
        outside = {
            case: report["hot"][case]["cpu_ms_outside_steps"]
            / report["off"][case]["cpu_ms_outside_steps"]
            for case in ("small_one", "small_eight")
        }
        key = "outside_steps_ratio" + (f"_{name}" if name != "demo" else "")
        figures[key] = round(statistics.mean(outside.values()), 3)
        figures |= {f"{key}_{case}": round(value, 3) for case, value in outside.items()}
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--quick", action="store_true", help="half of the edits, one round")
    parser.add_argument("--only", choices=("demo", "large"), help="of --json, renew this part")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if any(name not in os.environ for name in TUNING):
        # Both sides get the environment of a worker; processes read it only when they start.
        os.execve(sys.executable, sys.orig_argv, {**TUNING, **os.environ})
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    scale, report = 2 if args.quick else 4, dict[str, Any]()
    if args.only and args.json and args.json.exists():
        report = json.loads(args.json.read_text(encoding="utf-8"))
    about = {
        "command": "scripts/bench bench_edit" + " --quick" * args.quick,
        "date": time.strftime("%Y-%m-%d"),
        "hardware": machine(),
    }
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for part in ("demo", "large"):
            if args.only in (None, part):
                (folder / part).mkdir()
                demo = part == "demo"
                model = DEMO_MODEL if demo else large_model(folder / "model")
                rounds = 1 if args.quick else ROUNDS
                size = 128 if demo else 256
                figures = measure_model(model, size, folder / part, scale, rounds, sweep=demo)
                report[part] = {**about, **figures}
    if {"demo", "large"} <= report.keys():
        report["summary"] = summary_of({name: report[name] for name in ("demo", "large")})
        print(json.dumps(report["summary"]), flush=True)
    write_json(report, args.json)
    return 0
