"""A soak, from the start of the worker to the judgement."""

from __future__ import annotations

import json
import math
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w

from maskserve_benchmarks.soak import visits, withdrawals
from maskserve_benchmarks.soak.bad_input import bad_input, bad_operation
from maskserve_benchmarks.soak.judge import (
    WARM_UP_SHARE,
    Bar,
    judge_answers,
    judge_growth,
    judge_rest,
    steady,
)
from maskserve_benchmarks.soak.ledger import Ledger
from maskserve_benchmarks.soak.load import Load
from maskserve_benchmarks.soak.pictures import Album
from maskserve_benchmarks.soak.sampler import Sample, Sampler
from maskserve_benchmarks.soak.visitor import Keepsakes, Visitor
from maskserve_common.config import Config, cores
from maskserve_engine.families.specs import counted_work, load_spec
from maskserve_engine.planning.entry_bytes import FORMATS, entry_bytes
from maskserve_engine.spec.model_spec import anchor_stride
from maskserve_serving.errors import ServeError
from maskserve_serving.files import checked, read_tables, with_values
from maskserve_serving.options import ServeOptions
from maskserve_serving.ports import free_base_port
from maskserve_serving.shm_cleanup import SHARED_MEMORY, region_prefix
from maskserve_serving.source import Fetch, from_hub, with_model
from maskserve_serving.stop_signals import StopSignals
from maskserve_serving.supervisor import Supervisor
from maskserve_serving.worker import WorkerProcess

MIX: dict[Callable[[Visitor], str], float] = {
    visits.hot: 24,
    visits.churn: 14,
    visits.fresh: 6,
    visits.require: 5,
    visits.reproducible: 5,
    visits.dense: 4,
    visits.odd: 6,
    visits.stream: 8,
    visits.largest: 1,
    visits.template: 4,
    visits.look: 4,
    withdrawals.grpc_cancel: 4,
    withdrawals.grpc_timeout: 3,
    withdrawals.http_timeout: 3,
    withdrawals.deadline: 4,
    withdrawals.control_cancel: 4,
    withdrawals.stream_closed: 4,
    bad_input: 6,
    bad_operation: 2,
}
"""Relative frequency of each kind of visit."""
AUDIT_SHARE = 0.05
"""Share of cached edits to audit; the worker makes an edit again only in an idle moment."""
_END_OF_VISITS_S = 60.0
_CROWD_S = 60.0
"""Seconds that the extra visitors stay. Longer, and edits of low priority would expire."""
_IDLE_S = 30.0
_REST_S = 1.0
_LONG_STEPS = 200
"""Steps of edits that will be cancelled, if the worker allows so many."""


@dataclass(frozen=True, slots=True)
class SoakOptions:
    """Options of a soak."""

    model: Path
    minutes: float
    out: Path
    """Folder for configuration, logs, samples, summary and plot."""
    config: Path | None = None
    """Configuration file; its `[cache] budget_bytes` is replaced."""
    visitors: int = 12
    templates: int = 24
    """Number of full-size templates that fit the cache."""
    sample_s: float = 5.0
    seed: int = 0
    say: Callable[[str], None] = print


@dataclass(frozen=True, slots=True)
class Report:
    """The result of a soak."""

    bars: tuple[Bar, ...]
    problems: tuple[str, ...]
    """The first unexpected answers."""
    ends: dict[str, dict[str, int]]
    """Kind of visit → how it ended → how often."""
    samples: tuple[Sample, ...]
    rest: Sample | None

    @property
    def passed(self) -> bool:
        return all(bar.ok for bar in self.bars)


def soak(options: SoakOptions, stop: StopSignals | threading.Event) -> Report:
    """Start a worker, load it for the given time or until `stop` is set, stop it, and judge.

    Raises:
        ServeError: the worker does not start, or `stop` is set before it is ready.
    """
    options.out.mkdir(parents=True, exist_ok=True)
    serve = ServeOptions(
        model=str(options.model),
        base_port=free_base_port(),
        config=write_config(options),
        log_dir=options.out / "logs",
        report=options.say,
    )
    ledger = Ledger()
    supervisor = Supervisor(serve)
    supervisor.start(until=stop.is_set)
    try:
        if stop.is_set():
            raise ServeError("stopped before its worker was ready")
        worker = supervisor.workers[0]
        sampler = Sampler(worker, ledger, options.sample_s, options.out / "samples.jsonl")
        _load_worker(options, worker, ledger, sampler, stop)
        idle_sample = _rest(worker, ledger, sampler)
        sampler.close()
    finally:
        supervisor.stop()
    return _judge(options, ledger, sampler.samples, idle_sample, worker)


def write_config(options: SoakOptions, fetch: Fetch = from_hub) -> Path:
    """Write the worker's configuration: the given one, with audits and with a cache that is too
    small for the pictures.

    If the configuration does not set the denoiser's threads, one core is left to the visitors.
    Threads of a step wait for one another, so on cores in use by others a step takes many times as
    long.

    Args:
        options: options of the soak.
        fetch: fetches models, as for `with_model`.
    """
    tables = with_model(read_tables(options.config), str(options.model), fetch=fetch)
    if "audit_share" not in tables.get("cache", {}):
        tables = with_values(tables, "cache", audit_share=AUDIT_SHARE)
    if "torch_threads" not in tables["model"]:
        tables = with_values(tables, "model", torch_threads=max(1, cores() - 1))
    path = options.out / "config.toml"
    budget = options.templates * template_bytes(checked(tables))
    path.write_text(
        tomli_w.dumps(with_values(tables, "cache", budget_bytes=budget)), encoding="utf-8"
    )
    return path


def template_bytes(config: Config) -> int:
    """Return about how many bytes a template of the model's full size takes."""
    spec = load_spec(config.model.path, config.model.native_resolution)
    side = spec.native_resolution // spec.vae_scale_factor
    stored: str = config.cache.entry_format
    if stored == "model":
        from maskserve_engine.stages.loader import dtype_of  # only needed here

        stored = str(dtype_of(config)).removeprefix("torch.")
    work = counted_work(spec, side, side)
    stride = anchor_stride(config.cache.stride, spec)
    anchors = math.ceil(spec.steps_default(config.model.num_inference_steps) / stride)
    return int(anchors * entry_bytes(work, config.cache.entry_kind, FORMATS[stored]))


def _load_worker(
    options: SoakOptions,
    worker: WorkerProcess,
    ledger: Ledger,
    sampler: Sampler,
    stop: StopSignals | threading.Event,
) -> None:
    """Run visitors until the time is over."""
    config = worker.config
    native = load_spec(config.model.path, config.model.native_resolution).native_resolution
    album = Album(options.seed, native, warm=3 * options.templates)
    steps = min(_LONG_STEPS, config.limits.max_steps)
    crowd_s = min(_CROWD_S, 60 * options.minutes * WARM_UP_SHARE / 2)
    keepsakes = Keepsakes()
    # A heap keeps the size of its busiest moment. Under a constant load such moments would come now
    # and then for hours and look like a leak, so twice as many visitors start.
    visitors = [
        Visitor(
            random.Random(options.seed * 1000 + number),
            album,
            keepsakes,
            worker.grpc_url,
            worker.http_url,
            steps,
        )
        for number in range(2 * options.visitors)
    ]
    load = Load(
        visitors,
        MIX,
        ledger,
        # Resources that grow to the largest need grow at once, in the warm-up.
        first=visits.largest,
        stays_s=lambda number: math.inf if number < options.visitors else crowd_s,
    )
    sampler.start()
    load.start()
    end = time.monotonic() + 60 * options.minutes
    minute = 0
    while (remaining_s := end - time.monotonic()) > 0 and not stop.wait(min(60.0, remaining_s)):
        minute += 1
        if sampler.samples:
            options.say(progress(minute, sampler.samples[-1]))
    sampler.stop()
    options.say("the load ends")
    load.stop(_END_OF_VISITS_S)


def progress(minute: int, sample: Sample) -> str:
    """Return one line on the progress of a run."""
    count, p50 = sample.counters, sample.window.p50_ms
    return (
        f"{minute:4d} min: {count['edits_total']:.0f} edits, {sample.window.per_s:.1f} visits/s, "
        f"P50 {'-' if p50 is None else round(p50)} ms, {sample.memory / 2**20:.1f} MiB + shm "
        f"{sample.shared_memory / 2**20:.1f} MiB, rows {sample.running}+{sample.waiting}, "
        f"{sample.cached} templates, {count['cache_evictions_total.device']:.0f} evictions, "
        f"{sample.window.unexpected} unexpected"
    )


def _rest(worker: WorkerProcess, ledger: Ledger, sampler: Sampler) -> Sample | None:
    """Wait until the worker is idle, at most `_IDLE_S` seconds, and return a sample; None if it
    does not answer.
    """
    end = time.monotonic() + _IDLE_S
    try:
        while True:
            time.sleep(_REST_S)
            sample = sampler.take()
            idle = not (sample.running or sample.waiting or sample.in_flight or sample.priming)
            if idle or time.monotonic() > end:
                return sample
    except Exception as error:
        ledger.complain("rest", repr(error))
        return None


def _judge(
    options: SoakOptions,
    ledger: Ledger,
    samples: list[Sample],
    rest: Sample | None,
    worker: WorkerProcess,
) -> Report:
    ends = ledger.ends()
    visits = sum(sum(counts.values()) for counts in ends.values())
    served = samples[-1].counters["edits_total"] if samples else 0
    bars = [*judge_answers(visits, ledger.unexpected, served), *judge_growth(samples)]
    if rest is not None:
        bars += judge_rest(samples, rest)
    prefix = region_prefix(worker.spec.ports.http)
    leftover_regions = [region.name for region in SHARED_MEMORY.glob(f"{prefix}*")]
    bars.append(
        Bar(
            "shared memory after the end",
            not leftover_regions,
            ", ".join(leftover_regions) or "none",
        )
    )
    report = Report(tuple(bars), tuple(ledger.problems()), ends, tuple(samples), rest)
    late = steady(samples)
    if late:
        title = (
            f"{options.model.name}: {options.visitors} visitors, {served:.0f} edits in "
            f"{samples[-1].time_s / 60:.0f} min"
        )
        from maskserve_benchmarks.soak.plots import plot

        plot(samples, late[0].time_s, title, options.out / "soak.png")
    return report


def drift(report: Report) -> dict[str, float | None]:
    """Return the result of the audits, including those at rest."""
    audited = [*report.samples, *([report.rest] if report.rest else [])]
    if not audited:
        return {}
    drift_values = [sample.drift_max for sample in audited if sample.drift_max is not None]
    return {
        "audits": audited[-1].counters["audits_total"],
        "mean": audited[-1].drift_mean,
        "max": max(drift_values, default=None),
        "templates_put_to_dense": audited[-1].counters["cache_distrusts_total"],
    }


def summary(options: SoakOptions, report: Report) -> dict[str, Any]:
    """Return the report as JSON values, without the samples."""
    last = report.samples[-1] if report.samples else None
    return {
        "model": options.model.name,
        "minutes": round(last.time_s / 60, 2) if last else 0.0,
        "visitors": options.visitors,
        "templates": options.templates,
        "seed": options.seed,
        "passed": report.passed,
        "bars": [
            {
                "name": bar.name,
                "judged": bar.judged,
                "ok": bar.ok,
                "growth": None if bar.growth is None else round(bar.growth, 5),
                "finding": bar.finding,
            }
            for bar in report.bars
        ],
        "visits": report.ends,
        "unexpected": list(report.problems),
        "drift": drift(report),
        "counters": last.counters if last else {},
        "last": json.loads(last.to_json()) if last else None,
        "rest": json.loads(report.rest.to_json()) if report.rest else None,
    }
