"""Which edits run with anchors of their own, with which, and what these take.

A template's entries are made once, for all its edits: an edit that finds them computes no step
densely. Most pictures are sent once, and most edits have adapters that entries would have to know.
Such an edit makes what it needs in a few dense steps of its own (`batch.own_anchors`).
"""

from __future__ import annotations

from maskserve_core.config import Config
from maskserve_core.contracts.settings import acting
from maskserve_core.models.facts import own_stride
from maskserve_core.planning.entry_bytes import FORMATS, block_bytes, end_bytes
from maskserve_core.planning.own_anchors import own_steps
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
    steps = adapter.steps(job)
    if not job.request.settings.may_anchor or acting(job.controls, steps):
        return None
    dense = own_steps(steps, own_stride(config, adapter.facts))
    if not dense:
        return None
    text = config.cache.own_text == "frozen" and adapter.work(*job.moments.shape[1:]).joint
    return OwnPlan(dense, config.cache.own_format, text)


def own_bytes(plan: OwnPlan, adapter: Adapter, job: EditJob, dtype: str) -> int:
    """Bytes that an edit's anchors leave, at most.

    Args:
        plan: of its anchors.
        adapter: the model.
        job: the edit.
        dtype: of the model.
    """
    work, counted = adapter.work(*job.moments.shape[1:]), adapter.counted(job)
    fmt = FORMATS[dtype if plan.format == "model" else plan.format]
    texts = [each for each in (job.conditioning, job.negative) if each is not None]
    each = [
        tuple(
            n - active / len(texts) + len(text["prompt_embeds"]) * plan.text
            for n, active in zip(work.tokens, counted.active, strict=True)
        )
        for text in texts
    ]
    loads = block_bytes(work, each, fmt)
    kept = float(loads[:, 1].sum() + end_bytes(work, loads).sum())
    times = 2 if plan.extrapolates and len(plan.dense) > 1 else 1
    return int(kept * times) + adapter.anchored_bytes(job)
