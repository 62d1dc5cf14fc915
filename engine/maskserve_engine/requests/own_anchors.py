"""Which edits run with anchors of their own, with which, and what these take.

A template's entries are made once, for all its edits: an edit that finds them computes no step
densely. Most pictures are sent once, and most edits have adapters that entries would have to know.
Such an edit makes what it needs in a few dense steps of its own (`batch.own_anchors`).
"""

from __future__ import annotations

from maskserve_core.config import Config
from maskserve_core.contracts.settings import acting
from maskserve_core.models.facts import ModelFacts, own_stride
from maskserve_core.planning.entry_bytes import FORMATS, block_bytes
from maskserve_core.planning.flops import ModelWork
from maskserve_core.planning.own_anchors import own_steps
from maskserve_engine.base.job import EditJob
from maskserve_engine.batch.own_anchors import OwnPlan


def own_plan(config: Config, facts: ModelFacts, job: EditJob, steps: int) -> OwnPlan | None:
    """How an edit has anchors of its own; None: it cannot, or would gain nothing.

    Args:
        config: of the worker.
        facts: of the model.
        job: the edit.
        steps: that it takes.
    """
    if not job.request.settings.may_anchor or acting(job.controls, steps):
        return None
    dense = own_steps(steps, own_stride(config, facts))
    if not dense:
        return None
    return OwnPlan(dense, config.cache.own_format, config.cache.own_text == "frozen")


def own_bytes(plan: OwnPlan, work: ModelWork, job: EditJob, idle: int, dtype: str) -> int:
    """Bytes that an edit's anchors leave, at most.

    Args:
        plan: of its anchors.
        work: of the model at the edit's size.
        job: the edit.
        idle: image tokens that steps between anchors do not compute.
        dtype: of the model.
    """
    fmt = FORMATS[dtype if plan.format == "model" else plan.format]
    texts = [each for each in (job.conditioning, job.negative) if each is not None]
    text = [len(each["prompt_embeds"]) if plan.text else 0 for each in texts]
    each = [(float(idle + work.context + count),) for count in text]
    kept = float(block_bytes(work, each, fmt)[:, 1].sum())
    return int(kept * (2 if plan.extrapolates and len(plan.dense) > 1 else 1))
