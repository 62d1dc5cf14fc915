"""Which edits run with anchors of their own, with which, and what these take.

A template's entries are made once, for all its edits: an edit that finds them computes no step
densely. Most pictures are sent once, and most edits have adapters that entries would have to know.
Such an edit makes what it needs in a few dense steps of its own (`batch.own_anchors`).
"""

from __future__ import annotations

from collections.abc import Sequence

from maskserve_core.config import Config
from maskserve_core.contracts.settings import acting
from maskserve_core.models.facts import own_rule, own_stride
from maskserve_core.planning import own_anchors as planning
from maskserve_core.planning.entry_bytes import FORMATS
from maskserve_engine.base.job import EditJob
from maskserve_engine.batch.own_anchors import OwnPlan
from maskserve_engine.families.adapter import Adapter


def own_plan(config: Config, adapter: Adapter, job: EditJob) -> OwnPlan | None:
    """How an edit has anchors of its own; None: it cannot, or would gain nothing.

    Args:
        config: of the worker.
        adapter: the model.
        job: the edit.
    """
    steps, joint = adapter.steps(job), adapter.work(*job.moments.shape[1:]).joint
    if not job.request.settings.may_anchor:
        return None
    if not joint and acting(job.controls, steps):
        return None  # nets of a UNet keep nothing at a step of which the base computes all tokens
    return _plan(config, adapter, steps, text=joint)


def text_plan(config: Config, adapter: Adapter, job: EditJob) -> OwnPlan | None:
    """At which steps an edit computes its text beside a template's entries; None: at all."""
    joint, settings = adapter.work(*job.moments.shape[1:]).joint, job.request.settings
    # Whether there is room for the text depends on the load, so a reproducible edit computes it.
    if not joint or settings.first_block_threshold or settings.reproducible:
        return None
    plan = _plan(config, adapter, adapter.steps(job), text=True)
    return plan if plan is not None and plan.text else None


def _plan(config: Config, adapter: Adapter, steps: int, *, text: bool) -> OwnPlan | None:
    rule = own_rule(config, adapter.facts)
    anchors = planning.own_steps(steps, own_stride(config, adapter.facts))
    return OwnPlan(anchors, rule.format, rule.text and text) if anchors else None


def own_bytes(plan: OwnPlan, adapter: Adapter, job: EditJob, dtype: str) -> int:
    """Bytes that an edit's anchors leave, at most.

    Args:
        plan: of its anchors.
        adapter: the model.
        job: the edit.
        dtype: of the model.
    """
    work, counted = adapter.work(*job.moments.shape[1:]), adapter.counted(job)
    texts = [each for each in (job.conditioning, job.negative) if each is not None]
    each = [
        tuple(
            n - active / len(texts) + len(text["prompt_embeds"]) * plan.text
            for n, active in zip(work.tokens, counted.active, strict=True)
        )
        for text in texts
    ]
    return _bytes(plan, adapter, job, each, dtype) + adapter.anchored_bytes(job)


def text_bytes(plan: OwnPlan, adapter: Adapter, job: EditJob, dtype: str) -> int:
    """The same of an edit that reads a template and keeps its text alone."""
    texts = [each for each in (job.conditioning, job.negative) if each is not None]
    return _bytes(plan, adapter, job, [(float(len(e["prompt_embeds"])),) for e in texts], dtype)


def _bytes(
    plan: OwnPlan, adapter: Adapter, job: EditJob, kept: Sequence[tuple[float, ...]], dtype: str
) -> int:
    fmt = FORMATS[dtype if plan.format == "model" else plan.format]
    slopes = plan.extrapolates and len(plan.anchors) > 1
    return planning.own_bytes(adapter.work(*job.moments.shape[1:]), kept, fmt, slopes=slopes)
