"""Which edits run with refresh steps of their own, at which steps, and what these cost.

A template's entries are made once for all its edits, which then compute no step densely. Most
pictures are sent once, and most edits have adapters that entries would have to include. Such an
edit fills a step cache in a few dense steps of its own (`batch.step_cache`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from maskserve_common.config import Config
from maskserve_common.contracts.reuse_levels import own_count
from maskserve_engine.base.job import EditJob
from maskserve_engine.batch.step_cache import OwnPlan
from maskserve_engine.families.adapter import Adapter
from maskserve_engine.planning import refresh_steps as planning
from maskserve_engine.planning.entry_bytes import FORMATS
from maskserve_engine.scheduling.policies import policy_of
from maskserve_engine.spec.model_spec import own_rule, own_stride
from maskserve_engine.stages.loader import device_of


def own_plan(config: Config, adapter: Adapter, job: EditJob) -> OwnPlan | None:
    """Return the schedule of an edit's refresh steps; None: it can have none, or would gain
    nothing.
    """
    return _plan(config, adapter, job) if job.request.settings.may_anchor else None


def plans_beside(
    config: Config, adapter: Adapter, job: EditJob, dense_steps: int
) -> tuple[OwnPlan | None, ...]:
    """Return the step caches that an edit may keep beside a template's entries, the largest first:
    its text and margin, which steps between refresh steps leave out, and the residual correction
    from its dense first steps; or the correction alone. None: no step cache.

    Args:
        config: configuration of the worker.
        adapter: the model.
        job: the edit.
        dense_steps: number of first steps that compute all tokens.
    """
    settings = job.request.settings
    # Whether there is room for it depends on the load, so a reproducible edit does without.
    if settings.first_block_threshold or settings.reproducible:
        return (None,)
    if adapter.facts.shown is not None:
        return (None,)  # the template has most of its text
    if policy_of(config.engine).shares_steps:
        return (None,)  # ranks that share a step would have to agree on who has what
    rule = own_rule(config, adapter.facts, device_of(config).type)
    plan = _plan(config, adapter, job)
    lifts = dense_steps > 0 and adapter.facts.lifts_entries
    lifting = OwnPlan(frozenset(), rule.format, text=False, lifts=True) if lifts else None
    if plan is None or not plan.text:
        return (lifting,)
    if job.controls:  # what the nets have found goes on behind such steps, and the text with it
        plan = OwnPlan.of(rule, adapter.steps(job))
    return replace(plan, lifts=lifts), lifting


def _plan(config: Config, adapter: Adapter, job: EditJob) -> OwnPlan | None:
    facts = adapter.facts
    rule = own_rule(config, facts, device_of(config).type)
    count = own_count(adapter.steps(job), own_stride(config, facts))
    if not count:
        return None
    plan = OwnPlan(
        frozenset(),
        rule.format,
        rule.text,
        rule.ring,
        facts.own_evenly_over,
        bends=facts.own_bends,
        foresees=True,
    )
    return with_anchors(plan, count, adapter, job)


def with_anchors(plan: OwnPlan, count: int, adapter: Adapter, job: EditJob) -> OwnPlan:
    """Return the schedule with this number of refresh steps."""
    sigmas = [sigma for sigma, _ in adapter.sigmas(job)]
    facts = adapter.facts
    anchors = planning.own_steps(count, sigmas, facts.own_evenly_over, growth=facts.own_growth)
    return replace(plan, anchors=anchors)


def own_bytes(plan: OwnPlan, adapter: Adapter, job: EditJob, dtype: str) -> int:
    """Return the most bytes of an edit's step cache.

    Args:
        plan: schedule of its refresh steps.
        adapter: the model.
        job: the edit.
        dtype: data type of the model.
    """
    work, counted = adapter.work(*job.moments.shape[1:]), adapter.counted(job, plan)
    texts = [per_text for per_text in (job.conditioning, job.negative) if per_text is not None]
    picture_tokens = adapter.facts.shown_tokens(*job.moments.shape[1:])  # among the work's tokens
    per_text = [
        tuple(
            n - active / len(texts) + (len(text["prompt_embeds"]) - picture_tokens) * plan.text
            for n, active in zip(work.tokens, counted.active, strict=True)
        )
        for text in texts
    ]
    return _bytes(plan, adapter, job, per_text, dtype) + adapter.anchored_bytes(job)


def bytes_beside(plan: OwnPlan, adapter: Adapter, job: EditJob, dtype: str) -> int:
    """Return the most bytes of the step cache of an edit that reads a template."""
    texts = [text for text in (job.conditioning, job.negative) if text is not None]
    tokens = adapter.tokens(job)
    ring = plan.ring * tokens.ring
    words = [(float(len(text["prompt_embeds"]) + ring),) for text in texts]
    nbytes = _bytes(plan, adapter, job, words, dtype) if plan.text else 0
    if plan.lifts:
        all_tokens, *_ = adapter.work(*job.moments.shape[1:]).tokens
        cached_counts = [(float(all_tokens - tokens.active),)] * len(texts)
        nbytes += _bytes(replace(plan, power=0.0), adapter, job, cached_counts, dtype)
    return nbytes


def _bytes(
    plan: OwnPlan, adapter: Adapter, job: EditJob, kept: Sequence[tuple[float, ...]], dtype: str
) -> int:
    fmt = FORMATS[dtype if plan.format == "model" else plan.format]
    changes = min(len(plan.anchors) - 1, 1 + plan.bends) if plan.power else 0
    return planning.own_bytes(adapter.work(*job.moments.shape[1:]), kept, fmt, changes)
