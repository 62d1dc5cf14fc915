"""A first step of each kind before the worker is ready. It loads and chooses kernels, allocates
memory and imports modules, so that the first edits need not wait for these.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import product

import numpy as np

from maskserve_common.config import Config
from maskserve_common.contracts.request import EditRequest
from maskserve_common.contracts.settings import EditSettings
from maskserve_engine.base.job import EditJob
from maskserve_engine.batch.step_cache import RefreshSchedule, StepCacheReader
from maskserve_engine.cache.entries import AnchorEntry
from maskserve_engine.cache.entry_file import EntrySource
from maskserve_engine.cache.sizing import Kinds
from maskserve_engine.cache.store import Store
from maskserve_engine.families.adapter import Adapter
from maskserve_engine.fitting.memory import default_passes
from maskserve_engine.layers.kernels import has_kernels
from maskserve_engine.layers.shrink_expand import compile_kernels
from maskserve_engine.loop.step_planner import PlannedRow, StepPlanner, parts_of
from maskserve_engine.planning.flops import ModelWork
from maskserve_engine.spec.model_spec import refresh_rule, refresh_stride
from maskserve_engine.stages.loader import device_of, warm_up_side

_REFRESHES = (0, 3, 5, 7)
"""Refresh steps of a warm-up. Before the last one, steps read two and three terms of their step
caches, with a lookahead and without; the last one reads one.
"""
_LEAST_STEPS = _REFRESHES[-1] + 1
"""Steps of a warm-up's edits, at least: a client may ask for more than its model's default."""
_USUAL = (1 / 32, 1 / 2)
"""Least and largest mask ratio of the lengths of a warm-up. Larger edits take much longer than a
plan of 40 ms, or a recording.
"""


def warm_up(
    config: Config, adapter: Adapter, cache: tuple[Store, Kinds] | None, planner: StepPlanner
) -> None:
    """Take a dense step and, if templates are cached, a priming step and a cached one.

    A GPU chooses and compiles kernels by shape, so there it takes dense and cached steps with 1, 2,
    4, … and `max_rows` rows, and the first steps of edits with refresh steps. The longest steps go
    first, so that recorded ones share their memory. If a lone row's first step of a length takes
    longer, rows of all usual lengths follow, and last the kernels of LoRAs. No results are kept.
    """
    counts = row_counts(config)[::-1]
    jobs = [_blank_job(config, adapter, number) for number in range(counts[0])]
    for count in counts:
        adapter.step([adapter.dense_row(job) for job in jobs[:count]], None)
    _, height, width = jobs[0].moments.shape
    work = adapter.work(height, width)
    if cache is not None:
        store, kinds = cache
        entry = _prime(config, adapter, jobs[0], kinds)
        for count in counts:
            _cached_step(adapter, jobs[:count], entry, store, planner, work)
    refreshes = device_of(config).type == "cuda" and refresh_stride(config, adapter.spec)
    if refreshes:
        for count in counts:
            _refresh_steps(config, adapter, jobs[:count], planner, work)
    words = adapter.spec.text_tokens(config.model.max_sequence_length)
    lengths = adapter.lone_lengths(jobs[0], words, _USUAL)
    for image, text in product(lengths.image, lengths.words):
        job = _job_of_lengths(config, adapter, image, text)
        if cache is not None:
            _cached_step(adapter, [job], entry, store, planner, work)
        # Steps that compute the text compute all tokens, and those between compute no text.
        if refreshes and (image == lengths.image[0] or text == lengths.words[-1]):
            _refresh_steps(config, adapter, [job], planner, work, refreshes=_REFRESHES[:1])
        elif not refreshes and image == lengths.image[0]:
            adapter.step([adapter.dense_row(job)], None)
    if config.adapters.store and has_kernels(adapter.device):
        compile_kernels(adapter.device, adapter.dtype)
    adapter.release()


def rows_per_s(
    config: Config,
    adapter: Adapter,
    cache: tuple[Store, Kinds] | None,
    planner: StepPlanner,
    count: int,
    seconds: float,
) -> float:
    """Take steps with `count` rows for `seconds` seconds and return the rows per second. Rows are
    cached, or dense if templates are not cached. The other arguments are those of `warm_up`.
    """
    jobs = [_blank_job(config, adapter, number) for number in range(count)]
    if cache is None:
        rows = [adapter.dense_row(job) for job in jobs]
        step: Callable[[], None] = partial(adapter.step, rows, None)
    else:
        store, kinds = cache
        _, height, width = jobs[0].moments.shape
        entry, work = _prime(config, adapter, jobs[0], kinds), adapter.work(height, width)
        step = partial(_cached_step, adapter, jobs, entry, store, planner, work)
    begin, steps = time.perf_counter(), 0
    while (elapsed_s := time.perf_counter() - begin) < seconds:
        step()
        steps += 1
    adapter.release()
    return count * steps / elapsed_s


def row_counts(config: Config) -> list[int]:
    if device_of(config).type != "cuda":
        return [1]
    most = config.engine.max_rows
    return sorted({most, *(1 << power for power in range(most.bit_length()))})


def _prime(config: Config, adapter: Adapter, job: EditJob, kinds: Kinds) -> AnchorEntry:
    anchors = adapter.anchors(
        adapter.tokens(job).total, adapter.spec.steps_default(config.model.num_inference_steps), 1
    )
    row = adapter.priming_row(
        job, anchors[:1], job.conditioning, 0, kinds, config.cache.entry_format
    )
    adapter.step([row], None)
    return row.take_entry()


def _cached_step(
    adapter: Adapter,
    jobs: Sequence[EditJob],
    entry: AnchorEntry,
    store: Store,
    planner: StepPlanner,
    work: ModelWork,
) -> None:
    rows = [adapter.cached_row(job, 0) for job in jobs]
    source = EntrySource(entry, store.memory.name, store.memory.name)
    handles = []
    try:
        for row in rows:
            assert row.selection is not None
            handle = store.request("warm-up", entry.anchor, row.selection, source, force=True)
            assert handle is not None, "a forced request is not refused"
            handles.append(handle)
        readings = [
            PlannedRow(adapter.totals(job), (handle.load,), stays=1)
            for job, handle in zip(jobs, handles, strict=True)
        ]
        plan = planner.plan(work, readings, None, fixed=True).plan
        for handle in handles:
            handle.want(parts_of(plan, work.maps), step=0)
        adapter.step(rows, plan, handles)
    finally:
        for handle in handles:
            handle.release()
        store.loader.take_moves()  # clears the times of the first moves, which are slow


def _refresh_steps(
    config: Config,
    adapter: Adapter,
    jobs: Sequence[EditJob],
    planner: StepPlanner,
    work: ModelWork,
    *,
    refreshes: Sequence[int] = _REFRESHES,
) -> None:
    """Take steps of edits with refresh steps, to the last of these, and two at least."""
    rule = refresh_rule(config, adapter.spec, device_of(config).type)
    sigmas = [sigma for sigma, _ in adapter.sigmas(jobs[0])]
    schedule = RefreshSchedule.of(adapter.spec, rule, 1, sigmas)
    schedule = replace(
        schedule, refresh_steps=frozenset(step for step in refreshes if step < len(sigmas))
    )
    rows = [adapter.refreshing_row(job, schedule) for job in jobs]
    readers = [StepCacheReader(row, adapter.entry_blocks) for row in rows]
    for step in range(min(len(sigmas), max(2, 1 + max(refreshes)))):
        if step in schedule.dense:
            adapter.step(rows, None)
            continue
        entries = [reader.entry_at(step) for reader in readers]
        readings = [
            PlannedRow(
                adapter.totals(job, schedule), () if entry is None else (entry.load,), stays=1
            )
            for job, entry in zip(jobs, entries, strict=True)
        ]
        plan = planner.plan(work, readings, None, fixed=True).plan
        adapter.step(rows, plan, entries)
    for reader in readers:
        reader.release()


def _job_of_lengths(config: Config, adapter: Adapter, image: int, words: int) -> EditJob:
    """Return an edit of a square or nearly, with so many computed tokens and words."""
    side = math.isqrt(adapter.tokens(_blank_job(config, adapter, 0)).total)
    rows = min(side, math.isqrt(image))
    return _blank_job(config, adapter, 0, (rows / side, image // rows / side), words)


def _blank_job(
    config: Config,
    adapter: Adapter,
    number: int,
    box: tuple[float, float] | None = None,
    words: int | None = None,
) -> EditJob:
    """Return an edit of a corner of an empty picture.

    Args:
        config: configuration of the worker.
        adapter: adapter of the model.
        number: part of its id.
        box: shares of the picture's height and width that are computed; None: a quarter each is
            edited, with a ring round it.
        words: tokens of its prompt, without those of the source; None: as many as it may have.
    """
    spec, model = adapter.spec, config.model
    side, ring = warm_up_side(config, spec), model.mask_ring
    if box is None:
        box = 0.25, 0.25
    else:
        ring = 0
    mask = np.zeros((side, side), np.uint8)
    mask[: round(side * box[0]), : round(side * box[1])] = 255
    latents = side // spec.vae_scale_factor
    moments = np.zeros((2 * spec.latent_channels, latents, latents), np.float32)
    if words is None:
        words = spec.text_tokens(model.max_sequence_length)
    prompt = adapter.blank_prompt(spec.encoder_picture_tokens(latents, latents) + words)
    steps = spec.steps_default(model.num_inference_steps)
    settings = EditSettings(
        num_inference_steps=max(_LEAST_STEPS, steps),
        guidance_scale=spec.guidance_default(model.guidance_scale),
        mask_ring=ring,
    )
    request = EditRequest(
        request_id=f"warm-up-{number}",
        prompt="",
        settings=settings,
        seed=0,
        template_id="0" * 32,
        source_size=(side, side),
        model_size=(side, side),
        accepted_ns=0,
        pixels_id="0" * 32,
    )
    masked = moments if spec.semantics.masked_picture else np.zeros((0, 0, 0), np.float32)
    negative = prompt if default_passes(config, spec) == 2 else None
    return EditJob(request, mask, moments, masked, prompt, negative)
