"""Measure the time that an edit's admission takes on the engine's thread, which runs no step
meanwhile.

The model is FLUX.1 Fill in its true size at 1024x1024, on torch's device `meta`, which computes
nothing. As with a GPU, the host packs a row's tensors for one transfer, launches operations and
waits for none. Edits that are prepared before admission take turns with edits that are not.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, FluxTransformer2DModel

from maskserve_benchmarks.checkout import DEMO_MODEL
from maskserve_benchmarks.edits.direct import request_of
from maskserve_benchmarks.published_models import FLUX_DEV_SAMPLER, FLUX_FILL_SPEC
from maskserve_common.config_file import config_of
from maskserve_common.contracts.settings import CacheMode, EditSettings
from maskserve_engine.base.job import EditJob
from maskserve_engine.cache.entries import AnchorEntry
from maskserve_engine.cache.tier import Note
from maskserve_engine.families.flux.adapter import FluxAdapter
from maskserve_engine.loop.engine import Engine
from maskserve_engine.requests.state import RequestState
from maskserve_engine.start.assembly import assemble

_TEXT, _STEPS = 512, 28
_SIDE = FLUX_FILL_SPEC.native_resolution
_MASKED = slice(_SIDE // 4, _SIDE // 4 + _SIDE // 3)
"""Rows and columns of the mask: a ninth of the picture."""
_KINDS: dict[str, CacheMode] = {"dense": "off", "cached": "require"}
"""Kind of row → setting `cache` of its edit."""


def measure_admission(rounds: int) -> dict[str, dict[str, float]]:
    """Return median milliseconds of dense and cached edits, prepared and not. `prepare_ms` is spent
    in the thread that hands the edit in. `accept_ms` (choosing the execution plan) and `admit_ms`
    (making the row) are spent in the engine's thread.
    """
    engine = meta_engine()
    prime(engine, large_job("auto", 0))
    cases = [(kind, prepared) for kind in _KINDS for prepared in (True, False)]
    timings: dict[tuple[str, bool], list[dict[str, float]]] = {case: [] for case in cases}
    for number in range(rounds + 1):
        for kind, prepared in cases:
            job = large_job(_KINDS[kind], number)
            timings[kind, prepared].append(_admit(engine, job, kind, prepared=prepared))
    return {
        f"{kind}, {'' if prepared else 'not '}prepared": {
            name: round(statistics.median(timing[name] for timing in case_timings[1:]), 3)
            for name in case_timings[0]
        }
        for (kind, prepared), case_timings in timings.items()
    }


def meta_engine() -> Engine:
    """Make an engine that is not started: the calling thread does the engine's work."""
    with torch.device("meta"):
        model: Any = FluxTransformer2DModel.from_config(FLUX_FILL_SPEC.denoiser)
    model = model.to(torch.bfloat16).eval().requires_grad_(False)
    sampler = FlowMatchEulerDiscreteScheduler.from_config(FLUX_DEV_SAMPLER)
    adapter = FluxAdapter(FLUX_FILL_SPEC, model, sampler)
    config = config_of({"model": {"path": str(DEMO_MODEL), "dtype": "bfloat16"}})
    return assemble(config, adapter, lambda: adapter.blank_prompt(_TEXT))


def large_job(cache: CacheMode, seed: int) -> EditJob:
    rng = np.random.default_rng(seed)
    spec = FLUX_FILL_SPEC
    settings = EditSettings(
        num_inference_steps=_STEPS, guidance_scale=30.0, mask_ring=1, cache=cache
    )
    side = _SIDE // spec.vae_scale_factor
    pixels, mask = np.zeros((_SIDE, _SIDE, 3), np.uint8), np.zeros((_SIDE, _SIDE), np.uint8)
    mask[_MASKED, _MASKED] = 255

    def noise(*shape: int) -> Any:
        return rng.standard_normal(shape, np.float32)

    return EditJob(
        request=request_of(pixels, "", settings, seed, f"{cache}-{seed}"),
        edit_mask=mask,
        moments=noise(2 * spec.latent_channels, side, side),
        masked_moments=noise(2 * spec.latent_channels, side, side),
        conditioning={
            "prompt_embeds": noise(_TEXT, spec.denoiser["joint_attention_dim"]),
            "pooled": noise(spec.denoiser["pooled_projection_dim"]),
        },
    )


def prime(engine: Engine, job: EditJob) -> None:
    """Mark the job's template as primed; its entries are never read."""
    cache, template_id = engine.cache, job.request.template_id
    key, anchors = cache.key_of(job), cache.anchors(job)
    cache.begin(key)
    for anchor in anchors:
        note = Note(template_id, len(anchors), 0.0)
        assert cache.store.put(key, AnchorEntry(anchor, ()), note)
    cache.end(key, template_id, complete=True)


def _admit(engine: Engine, job: EditJob, kind: str, *, prepared: bool) -> dict[str, float]:
    """Return the milliseconds of one edit that arrives while no other runs."""
    manager = engine.manager

    def timed(call: Callable[[], Any]) -> tuple[float, Any]:
        begin = time.thread_time()
        value = call()
        return 1e3 * (time.thread_time() - begin), value

    prepare = engine.prepared if prepared else lambda unprepared: unprepared
    adapter = engine.adapter
    prepare_ms, ready = timed(lambda: RequestState.of(prepare(job), lambda event: None, adapter))
    with torch.inference_mode():
        accept_ms, _ = timed(lambda: manager.accept(ready))
        admit_ms, runs = timed(manager.schedule)
    (edit,) = manager.running(*runs)
    assert edit.status().kind == kind
    manager.cancel(edit.request_id)
    return {"prepare_ms": prepare_ms, "accept_ms": accept_ms, "admit_ms": admit_ms}
