"""The plan by which an edit runs, and its counted work: the model's and its ControlNets'."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from maskserve_common.contracts.keys import Anchor
from maskserve_common.contracts.request import ResolvedControl
from maskserve_common.contracts.settings import acting, scale_at
from maskserve_engine.base.job import EditJob
from maskserve_engine.batch.step_cache import RefreshSchedule
from maskserve_engine.families.adapter import Adapter, work_of
from maskserve_engine.families.specs import control_work
from maskserve_engine.planning.flops import ModelWork, Totals
from maskserve_engine.planning.regions import RegionRule
from maskserve_engine.requests.control_nets import ControlNetSource
from maskserve_engine.spec.model_spec import ModelSpec

ExecutionMode = Literal["dense", "cached", "wait"]
"""How an edit runs: it computes all tokens, reads cached tokens, or waits for its template."""


@dataclass(frozen=True, slots=True)
class ExecutionPlan:
    mode: ExecutionMode
    outcome: str
    """Value of `cache` in META: `hit`, `own`, `miss` or `off`."""
    key: str = ""
    """Key of the template's entries; empty where the cache is not used."""
    anchors: tuple[Anchor | None, ...] = ()
    """Anchor that each step of a cached edit reads."""
    tier: str = ""
    """Tier of the template of a cached edit."""
    prime: bool = False
    """Whether to prime the template now."""
    is_loading: bool = False
    """Whether the template was being primed or fetched when the plan was chosen; an edit that waits
    is notified of the end.
    """
    dense_for: str = ""
    """Why the edit runs dense: its kind if it has no mask, `mask_ratio` or `mask_side` of its mask,
    `references` beside its source, which entries have not seen, `work` if refresh steps or entries
    would save none, `memory` if its step cache did not fit; empty without such a reason.
    """
    dense_steps: int = 0
    """Number of steps of a cached edit that compute all tokens: its first ones, or its refresh
    steps.
    """
    schedule: RefreshSchedule | None = None
    """Schedule of the refresh steps of an edit without a template; None: it has none."""
    schedule_with_template: RefreshSchedule | None = None
    """Schedule of its step cache beside a template's entries; None: it has none."""
    region: RegionRule | None = None
    """How an edit without a mask finds its region; None: it computes all tokens."""

    @property
    def unread_share(self) -> float:
        """Share of the steps of an edit with a template that read no entry: its first ones, and
        those without an anchor near enough.
        """
        return self.anchors.count(None) / len(self.anchors) if self.anchors else 0.0


DENSE = ExecutionPlan("dense", "off")
"""The plan without the cache."""


@dataclass(frozen=True, slots=True)
class ControlWork:
    """Counted work of an edit's ControlNets in its steps."""

    controls: tuple[ResolvedControl, ...]
    flops: tuple[tuple[float, float], ...]
    """FLOPs of each net in a step that computes all tokens, and in one with cached tokens."""
    steps: int
    schedule: RefreshSchedule
    """Refresh steps of the nets, which are the row's if it reads no template."""
    works: tuple[ModelWork, ...]
    """Work of each net in one pass."""
    with_template: bool = True

    @classmethod
    def of(
        cls,
        job: EditJob,
        spec: ModelSpec,
        totals: Totals,
        steps: int,
        nets: ControlNetSource,
        schedule: RefreshSchedule,
    ) -> ControlWork:
        """Count the ControlNets of an edit.

        Args:
            job: the edit.
            spec: spec of the model.
            totals: totals of one step of the edit.
            steps: number of its steps.
            nets: source of the ControlNets' configurations.
            schedule: schedule of the nets beside a template (`Adapter.net_schedule`).

        Raises:
            MaskserveError: one of them is not served (any more).
        """
        controls, size = acting(job.request.controls, steps), job.moments.shape[1:]
        works = tuple([control_work(spec, nets.config(control), *size) for control in controls])
        flops = tuple([(_dense(work, totals), _active(work, totals)) for work in works])
        return cls(controls, flops, steps, schedule, works)

    def with_schedule(self, schedule: RefreshSchedule, between: Totals) -> ControlWork:
        """Return the work of an edit with refresh steps that reads no template.

        Args:
            schedule: schedule of the refresh steps.
            between: totals of a step between them.
        """
        active = [_active(work, between) for work in self.works]
        flops = [
            (dense, cached_flops)
            for (dense, _), cached_flops in zip(self.flops, active, strict=True)
        ]
        return replace(self, flops=tuple(flops), schedule=schedule, with_template=False)

    def at(self, step: int, *, cached: bool, looked_ahead: bool = False) -> float:
        """Return the FLOPs of the nets in one step of a row.

        Args:
            step: number of the step, from 0.
            cached: whether the base model reads cached tokens in this step.
            looked_ahead: whether the row computes a lookahead in this step.
        """
        looks_ahead = looked_ahead or (
            self.with_template and cached and step in self.schedule.lookahead_steps
        )
        next_refresh = self.schedule.next_refresh(step) if looks_ahead else None
        total = 0.0
        for control, (dense, active) in zip(self.controls, self.flops, strict=True):
            if next_refresh is not None and scale_at(control, next_refresh, self.steps):
                total += dense
            if not scale_at(control, step, self.steps):
                continue
            is_first = not any(scale_at(control, n, self.steps) for n in range(step))
            total += active if cached and not is_first else dense
        return total

    def mean(self, *, cached: bool) -> float:
        lookahead_steps = self.schedule.lookahead_steps if cached and not self.with_template else ()
        step_flops = (
            self.at(n, cached=cached, looked_ahead=n in lookahead_steps) for n in range(self.steps)
        )
        return sum(step_flops) / self.steps


def _dense(work: ModelWork, totals: Totals) -> float:
    return work.batch_flops(None, (), _convolving_all(work, totals))


def _active(work: ModelWork, totals: Totals) -> float:
    kinds = ("kv",) * len(work.blocks)
    return work.batch_flops(_convolving_all(work, totals), kinds, None)


def _convolving_all(work: ModelWork, totals: Totals) -> Totals:
    """Return the sums with all positions convolved: a net convolves the whole picture even if its
    base has a tile.
    """
    convolved = tuple([float(totals.rows * tokens) for tokens in work.tokens])
    return replace(totals, convolved=convolved)


class LookaheadPasses(NamedTuple):
    """Passes that compute a lookahead."""

    totals: Totals
    reads: bool
    """Whether they read the row's template; otherwise they compute all tokens."""
    tokens: float
    """Tokens that each of these passes computes."""


@dataclass(frozen=True, slots=True)
class EditWork:
    """Counted work of an edit."""

    total_tokens: int
    active_tokens: int
    """Computed tokens of one pass."""
    steps: int
    totals: Totals
    """Totals of one step."""
    model: ModelWork
    """Work of the model at the edit's size."""
    batch_key: Hashable = None
    """Key of the batch: rows of equal keys may share a step."""
    passes: int = 1
    """Model evaluations in one step."""
    dense_flops: float = 0.0
    """FLOPs of one step alone that computes all tokens, with its share of `still_flops`."""
    cached_flops: float = 0.0
    """FLOPs of one step alone that loads every block's keys and values, with its share of
    `still_flops`.
    """
    controls: ControlWork | None = None
    """Work of its ControlNets; None: none acts, or they are not counted."""
    between: Totals | None = None
    """Totals of a step between refresh steps; None: it has no refresh steps."""
    still_flops: float = 0.0
    """FLOPs of its references' keys and values, made once if its template has none."""
    refresh: Totals | None = None
    """Totals of a refresh step of a row that reads a template; None: there is none."""
    inner_tokens: int = 0
    ring_tokens: int = 0
    """Ring tokens of one pass (`TokenCounts.ring`)."""
    cached_tokens: float | None = None
    """Mean tokens of all passes in a step that reads cached tokens; None:
    `active_tokens` of each.
    """
    plain: EditWork | None = None
    """The same edit without a step cache; None: it is this one."""

    @classmethod
    def of(cls, job: EditJob, adapter: Adapter) -> EditWork:
        tokens, model = adapter.tokens(job), work_of(adapter, job)
        return cls(
            total_tokens=tokens.total,
            active_tokens=tokens.active,
            steps=adapter.steps(job),
            totals=adapter.totals(job),
            model=model,
            batch_key=adapter.batch_key(job),
            passes=1 if job.negative is None else 2,
            still_flops=model.still_flops,
            inner_tokens=tokens.inner,
            ring_tokens=tokens.ring,
        ).with_loras(())

    def with_loras(self, loras: Sequence[ModelWork]) -> EditWork:
        """Return the work of the edit with LoRAs that add this work each."""
        return self._with_totals(self.totals.with_loras(loras))

    def recounted(self, job: EditJob, adapter: Adapter) -> EditWork:
        """Return the work of the same edit, without ControlNets, at another reuse level."""
        work = EditWork.of(job, adapter)
        return work._with_totals(replace(work.totals, added=self.totals.added))

    def _with_totals(self, totals: Totals) -> EditWork:
        model = self.model
        return replace(
            self,
            totals=totals,
            dense_flops=model.batch_flops(None, (), totals) + self.still_flops / self.steps,
            cached_flops=model.batch_flops(totals, ("kv",) * len(model.blocks), None),
        )

    def with_schedule(
        self,
        schedule: RefreshSchedule,
        between: Totals,
        refresh: Totals | None,
        done: int = 0,
    ) -> EditWork:
        """Return the work of the edit with refresh steps: a cached step is the mean of all steps
        that are left.

        Args:
            schedule: schedule of its refresh steps.
            between: totals of a step between them, without LoRAs.
            refresh: totals of a refresh step, without LoRAs, in a row that reads a template.
            done: steps taken, less than all.
        """
        plain, model = self.without_schedule(), self.model
        kinds, (share, alone) = ("kv",) * len(model.blocks), schedule.shares(self.steps, done)
        between = replace(between, added=self.totals.added)
        cached_share = 1.0 - alone
        refresh_flops, tokens = self.dense_flops, between.active[0]
        if refresh is not None:
            refresh = replace(refresh, added=self.totals.added)
            refresh_flops = model.batch_flops(refresh, kinds, None)
            tokens = share * refresh.active[0] + cached_share * tokens
        mean_flops = share * refresh_flops + cached_share * model.batch_flops(between, kinds, None)
        controls = plain.controls
        if controls is not None and refresh is None:
            controls = controls.with_schedule(schedule, replace(between, added=None))
        return replace(
            plain,
            plain=plain,
            between=between,
            refresh=refresh,
            cached_flops=mean_flops,
            cached_tokens=tokens,
            controls=controls,
        )

    def step_flops(self, mode: ExecutionMode, reads_nothing: float = 0.0) -> float:
        """Return the mean FLOPs of one step alone, with its ControlNets.

        Args:
            mode: how the edit runs.
            reads_nothing: share of steps without an entry, for an edit that reads a template.
        """
        cached = mode == "cached"
        added = 0.0 if self.controls is None else self.controls.mean(cached=cached)
        read = self.cached_flops if cached else self.dense_flops
        return added + (1.0 - reads_nothing) * read + reads_nothing * self.dense_flops

    def without_schedule(self) -> EditWork:
        """Return the work of the same edit without a step cache."""
        return self if self.plain is None else self.plain

    @property
    def lookahead(self) -> LookaheadPasses:
        """The lookahead pass beside a step's own tokens."""
        if self.refresh is None:
            return LookaheadPasses(self.totals, False, self.total_tokens)
        return LookaheadPasses(self.refresh, True, self.refresh.active[0] / self.passes)

    def reading(self, *, text: bool) -> Totals:
        """Return the totals of a step that reads cached tokens and computes its text, or leaves it
        out.
        """
        return (self.refresh if text else self.between) or self.totals

    @property
    def mask_ratio(self) -> float:
        """Share of tokens that a cached step computes, ring included."""
        return self.active_tokens / self.total_tokens

    def tokens(self, mode: ExecutionMode, dense_share: float = 0.0, alone: float = 0.0) -> int:
        """Return the mean tokens of one step in all passes: no more than a dense step has, since a
        row with lookahead may save more text and context tokens than it computes twice.

        Args:
            mode: how the edit runs.
            dense_share: share of a cached edit's steps that compute all tokens.
            alone: share of its steps that compute all tokens and nothing else.
        """
        all_tokens = self.passes * self.total_tokens
        if mode != "cached":
            return all_tokens
        cached_tokens = self.cached_tokens
        if cached_tokens is None:
            cached_tokens = self.passes * self.active_tokens
        return min(round((1.0 - alone) * cached_tokens + dense_share * all_tokens), all_tokens)
