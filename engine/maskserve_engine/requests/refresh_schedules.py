"""Which edits run with refresh steps, at which steps, and the bytes of their step caches.

A template's entries are made once for all its edits, which then compute no step densely. Most
pictures are sent once, and most edits have adapters that entries would have to include. Such an
edit fills a step cache at its refresh steps (`batch.step_cache`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from maskserve_common.config import Config
from maskserve_common.contracts.reuse_levels import refresh_count
from maskserve_engine.base.job import EditJob
from maskserve_engine.batch.step_cache import RefreshSchedule
from maskserve_engine.families.adapter import Adapter, work_of
from maskserve_engine.planning import refresh_steps as planning
from maskserve_engine.planning.entry_bytes import FORMATS
from maskserve_engine.planning.refresh_control import RefreshControl
from maskserve_engine.scheduling.policies import policy_of
from maskserve_engine.spec.model_spec import (
    promised_fidelity,
    refresh_rule,
    refresh_stride,
    refreshes_by_error,
)
from maskserve_engine.stages.loader import device_of


def make_refresh_schedule(config: Config, adapter: Adapter, job: EditJob) -> RefreshSchedule | None:
    """Return the schedule of an edit's refresh steps; None: it can have none, or would gain
    nothing.
    """
    settings = job.request.settings
    fidelity = promised_fidelity(config, adapter.spec, settings.promise)
    plan = _plan(config, adapter, job) if settings.may_anchor else None
    if plan is None or not (fidelity or settings.promise):
        return plan
    if job.controls or not fidelity:
        return None  # nothing would measure what they keep
    sigmas = [sigma for sigma, _ in adapter.sigmas(job)]
    control = RefreshControl.of(fidelity, sigmas, plan.power)
    return replace(
        plan,
        anchors=control.begin().refresh_steps | {0},
        second_order=False,
        control=control,
    )


def schedules_with_template(
    config: Config, adapter: Adapter, job: EditJob, dense_steps: int
) -> tuple[RefreshSchedule | None, ...]:
    """Return the step caches that an edit may keep beside a template's entries, the largest first:
    its text and ring, which steps between refresh steps leave out, and the residual correction from
    its dense first steps; or the correction alone. None: no step cache.

    Args:
        config: configuration of the worker.
        adapter: the model.
        job: the edit.
        dense_steps: number of first steps that compute all tokens.
    """
    settings = job.request.settings
    # Room for it depends on the load, so a reproducible edit has none.
    if settings.first_block_threshold or settings.reproducible:
        return (None,)
    if adapter.spec.encoder_picture is not None:
        return (None,)  # the template has most of its text
    if policy_of(config.engine).shares_steps:
        return (None,)  # ranks that share a step would have to agree on their step caches
    rule = refresh_rule(config, adapter.spec, device_of(config).type)
    plan = None if refreshes_by_error(config, adapter.spec) else _plan(config, adapter, job)
    lifts = dense_steps > 0 and adapter.spec.corrects_residuals
    lifting = (
        RefreshSchedule(frozenset(), rule.format, text=False, corrects_residuals=True)
        if lifts
        else None
    )
    if plan is None or not plan.text:
        return (lifting,)
    if job.controls:  # the text refreshes with the nets
        sigmas = [sigma for sigma, _ in adapter.sigmas(job)]
        plan = RefreshSchedule.with_controls(adapter.spec, rule, sigmas)
    return replace(plan, corrects_residuals=lifts), lifting


def _plan(config: Config, adapter: Adapter, job: EditJob) -> RefreshSchedule | None:
    facts = adapter.spec
    rule = refresh_rule(config, facts, device_of(config).type)
    promise = job.request.settings.promise
    count = refresh_count(adapter.steps(job), refresh_stride(config, facts, promise))
    if not count:
        return None
    sigmas = [sigma for sigma, _ in adapter.sigmas(job)]
    return RefreshSchedule.of(facts, rule, count, sigmas)


def make_region_schedule(
    config: Config, adapter: Adapter, job: EditJob, begin: int
) -> RefreshSchedule:
    """Return the schedule of an edit that computes its region alone from step `begin` on, its first
    refresh step.
    """
    facts, region = adapter.spec, adapter.spec.region
    assert region is not None, "edits of this family find regions"
    rule = refresh_rule(config, facts, device_of(config).type)
    sigmas = [sigma for sigma, _ in adapter.sigmas(job)][begin:]
    plan = RefreshSchedule.of(facts, rule._replace(ring=False), region.count(len(sigmas)), sigmas)
    return plan.begun_at(begin, len(sigmas), region.last)


def with_anchors(
    plan: RefreshSchedule, count: int, adapter: Adapter, job: EditJob
) -> RefreshSchedule:
    """Return the schedule with this number of refresh steps."""
    sigmas = [sigma for sigma, _ in adapter.sigmas(job)]
    facts = adapter.spec
    anchors = planning.refresh_steps(count, sigmas, facts.refresh.evenly_over, facts.refresh.growth)
    return replace(plan, anchors=anchors)


def step_cache_bytes(plan: RefreshSchedule, adapter: Adapter, job: EditJob, dtype: str) -> int:
    """Return the most bytes of an edit's step cache.

    Args:
        plan: schedule of its refresh steps.
        adapter: the model.
        job: the edit.
        dtype: data type of the model.
    """
    work, counted = work_of(adapter, job), adapter.counted(job, plan)
    texts = [per_text for per_text in (job.conditioning, job.negative) if per_text is not None]
    picture_tokens = adapter.spec.encoder_picture_tokens(
        *job.moments.shape[1:]
    )  # among the work's tokens
    per_text = [
        tuple(
            n - active / len(texts) + (len(text["prompt_embeds"]) - picture_tokens) * plan.text
            for n, active in zip(work.tokens, counted.active, strict=True)
        )
        for text in texts
    ]
    return _bytes(plan, adapter, job, per_text, dtype) + adapter.anchored_bytes(job)


def step_cache_bytes_with_template(
    plan: RefreshSchedule, adapter: Adapter, job: EditJob, dtype: str
) -> int:
    """Return the most bytes of the step cache of an edit that reads a template."""
    texts = [text for text in (job.conditioning, job.negative) if text is not None]
    tokens = adapter.tokens(job)
    ring = plan.ring * tokens.ring
    words = [(float(len(text["prompt_embeds"]) + ring),) for text in texts]
    nbytes = _bytes(plan, adapter, job, words, dtype) if plan.text else 0
    if plan.corrects_residuals:
        all_tokens, *_ = work_of(adapter, job).tokens
        cached_counts = [(float(all_tokens - tokens.active),)] * len(texts)
        nbytes += _bytes(replace(plan, anchors=frozenset({0})), adapter, job, cached_counts, dtype)
    return nbytes


def _bytes(
    plan: RefreshSchedule,
    adapter: Adapter,
    job: EditJob,
    widths: Sequence[tuple[float, ...]],
    dtype: str,
) -> int:
    fmt = FORMATS[dtype if plan.format == "model" else plan.format]
    changes = min(len(plan.anchors) - 1, 1 + plan.second_order)
    return planning.step_cache_bytes(work_of(adapter, job), widths, fmt, changes)
