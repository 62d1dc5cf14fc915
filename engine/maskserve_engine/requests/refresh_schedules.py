"""Which edits run with refresh steps, at which steps, and the bytes of their step caches.

A template's entries are made once for all its edits, which then compute no step densely. Most
pictures are sent once, and most edits have adapters that entries would have to include. Such an
edit fills a step cache at its refresh steps (`batch.step_cache`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from maskserve_common.config import Config
from maskserve_common.contracts.reuse_levels import ReuseLevel, refresh_count
from maskserve_engine.base.job import EditJob
from maskserve_engine.batch.step_cache import RefreshSchedule
from maskserve_engine.families.adapter import Adapter, work_of
from maskserve_engine.planning import refresh_steps as planning
from maskserve_engine.planning.entry_bytes import FORMATS
from maskserve_engine.planning.refresh_control import RefreshControl, Remainder
from maskserve_engine.requests.execution_plan import ExecutionPlan
from maskserve_engine.requests.executor import RowStep
from maskserve_engine.requests.state import RequestState
from maskserve_engine.scheduling.policies import policy_of
from maskserve_engine.spec.model_spec import (
    known_stride,
    promised_fidelity,
    refresh_rule,
    refresh_strides,
)
from maskserve_engine.stages.loader import device_of


class RefreshSchedules:
    """Decides the refresh steps of a worker's edits: before they run, and by their errors.

    Args:
        config: configuration of the worker.
        adapter: the model.
    """

    def __init__(self, config: Config, adapter: Adapter) -> None:
        self._config, self._adapter, self._spec = config, adapter, adapter.spec
        self._rule = refresh_rule(config, adapter.spec, device_of(config).type)
        self._shares_steps = policy_of(config.engine).shares_steps

    def of(self, job: EditJob) -> RefreshSchedule | None:
        """Return the schedule of an edit's refresh steps; None: it can have none, or would gain
        nothing.
        """
        settings = job.request.settings
        fidelity = promised_fidelity(self._config, self._spec, settings.promise)
        schedule = self._strided(job) if settings.may_refresh else None
        if schedule is None or not fidelity:
            return schedule
        semantics = self._spec.semantics
        control = RefreshControl.of(fidelity, self._sigmas(job), schedule.power, semantics)
        return replace(
            schedule,
            refresh_steps=control.begin().refresh_steps | {0},
            second_order=semantics.noisy_around,
            control=control,
        )

    def beside_template(self, job: EditJob, dense_steps: int) -> tuple[RefreshSchedule | None, ...]:
        """Return the step caches that an edit may keep beside a template's entries, the largest
        first: its text and ring, which steps between refresh steps leave out, and the residual
        correction from its dense first steps; or the correction alone. None: no step cache.

        Args:
            job: the edit.
            dense_steps: number of first steps that compute all tokens.
        """
        settings, spec = job.request.settings, self._spec
        # Room for it depends on the load, so a reproducible edit has none.
        if settings.reproducible:
            return (None,)
        if spec.encoder_picture is not None:
            return (None,)  # the template has most of its text
        if self._shares_steps:
            return (None,)  # ranks that share a step would have to agree on their step caches
        count = refresh_count(self._adapter.steps(job), known_stride(self._config, spec))
        schedule = self._with(job, count)
        corrects = dense_steps > 0 and spec.corrects_residuals
        correction = (
            RefreshSchedule(frozenset(), self._rule.format, text=False, corrects_residuals=True)
            if corrects
            else None
        )
        if schedule is None or not schedule.text:
            return (correction,)
        if job.controls:  # the text refreshes with the nets
            schedule = RefreshSchedule.with_controls(spec, self._rule, self._sigmas(job))
        return replace(schedule, corrects_residuals=corrects), correction

    def of_region(self, job: EditJob, begin: int) -> RefreshSchedule:
        """Return the schedule of an edit that computes its region alone from step `begin` on, its
        first refresh step.
        """
        region, sigmas = self._spec.region, self._sigmas(job)[begin:]
        assert region is not None, "edits of this family find regions"
        rule = self._rule._replace(ring=False)
        schedule = RefreshSchedule.of(self._spec, rule, region.count(len(sigmas)), sigmas)
        return schedule.begun_at(begin, len(sigmas), region.last)

    def at_level(self, edit: RequestState, level: ReuseLevel) -> RefreshSchedule | None:
        """Return an edit's schedule at a reuse level; None: the level has no refresh steps."""
        if not level.refresh_steps:
            return None
        schedule, sigmas = edit.plan.schedule, self._sigmas(edit.job)
        assert schedule is not None, "only an edit with refresh steps has such levels"
        places = RefreshSchedule.of(
            self._spec, self._rule, level.refresh_steps, sigmas
        ).refresh_steps
        return replace(schedule, refresh_steps=places)

    def follow(self, edit: RequestState, step: RowStep) -> RefreshSchedule | None:
        """Record a step of a row with refresh steps. Return the schedule of the steps after it, and
        set plan and work by it, if its error places the next refresh step or if its step cache
        begins anew; None: neither.
        """
        current, reads, number = edit.plan.schedule, edit.reads, step.done - 1
        if current is None or current.control is None or reads is None:
            return None
        before, error = reads.refreshed_at, step.refresh_error
        is_anew = not step.read and number not in current.dense
        if error is not None or not step.read:
            reads.refreshed_at = number
        if step.done == edit.work.steps or (error is None and not is_anew):
            return None
        remainder = (
            current.control.begin(number)
            if error is None
            else current.control.after(before, number, error)
        )
        schedule, chosen = _controlled(edit.plan, current, number, remainder)
        dense_flops = edit.work.without_schedule().step_flops("dense")
        if edit.step_flops(chosen, self._adapter, step.done) > dense_flops:
            dense_after = current.control.dense_after(number)
            schedule, chosen = _controlled(edit.plan, current, number, dense_after)
        edit.set_plan(chosen, self._adapter)
        reads.follow(schedule)
        return schedule

    def _strided(self, job: EditJob) -> RefreshSchedule | None:
        """Return the schedule by the worker's stride; None: the edit has no refresh steps."""
        strides = refresh_strides(self._config, self._spec)
        return self._with(job, strides.count_of(job.request.settings, self._adapter.steps(job)))

    def _with(self, job: EditJob, count: int) -> RefreshSchedule | None:
        """Return a schedule with this many refresh steps; None: without any."""
        if not count:
            return None
        return RefreshSchedule.of(self._spec, self._rule, count, self._sigmas(job))

    def _sigmas(self, job: EditJob) -> list[float]:
        return [sigma for sigma, _ in self._adapter.sigmas(job)]


def _controlled(
    plan: ExecutionPlan, schedule: RefreshSchedule, step: int, remainder: Remainder
) -> tuple[RefreshSchedule, ExecutionPlan]:
    """Return schedule and execution plan with this remainder after refresh step `step`."""
    schedule = schedule.controlled(step, remainder)
    dense_for = "error" if remainder.failed else ""
    count = len(schedule.refresh_steps)
    return schedule, replace(plan, schedule=schedule, dense_steps=count, dense_for=dense_for)


def step_cache_bytes(schedule: RefreshSchedule, adapter: Adapter, job: EditJob) -> int:
    """Return the most bytes of an edit's step cache."""
    work, totals = work_of(adapter, job), adapter.totals(job, schedule)
    texts = [per_text for per_text in (job.conditioning, job.negative) if per_text is not None]
    picture_tokens = adapter.spec.encoder_picture_tokens(
        *job.moments.shape[1:]
    )  # among the work's tokens
    per_text = [
        tuple(
            n - active / len(texts) + (len(text["prompt_embeds"]) - picture_tokens) * schedule.text
            for n, active in zip(work.tokens, totals.active, strict=True)
        )
        for text in texts
    ]
    return _bytes(schedule, adapter, job, per_text) + adapter.refreshing_row_bytes(job)


def step_cache_bytes_with_template(
    schedule: RefreshSchedule, adapter: Adapter, job: EditJob
) -> int:
    """Return the most bytes of the step cache of an edit that reads a template."""
    texts = [text for text in (job.conditioning, job.negative) if text is not None]
    tokens = adapter.tokens(job)
    ring = schedule.ring * tokens.ring
    words = [(float(len(text["prompt_embeds"]) + ring),) for text in texts]
    nbytes = _bytes(schedule, adapter, job, words) if schedule.text else 0
    if schedule.corrects_residuals:
        all_tokens, *_ = work_of(adapter, job).tokens
        cached_counts = [(float(all_tokens - tokens.active),)] * len(texts)
        nbytes += _bytes(
            replace(schedule, refresh_steps=frozenset({0})), adapter, job, cached_counts
        )
    return nbytes


def _bytes(
    schedule: RefreshSchedule,
    adapter: Adapter,
    job: EditJob,
    widths: Sequence[tuple[float, ...]],
) -> int:
    dtype = str(adapter.dtype).removeprefix("torch.")
    fmt = FORMATS[dtype if schedule.format == "model" else schedule.format]
    changes = min(len(schedule.refresh_steps) - 1, 1 + schedule.second_order)
    if schedule.control is not None:  # its refresh steps may become more
        changes = 1 + schedule.second_order
    return planning.step_cache_bytes(work_of(adapter, job), widths, fmt, changes)
