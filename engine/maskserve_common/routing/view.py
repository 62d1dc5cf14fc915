"""Views of an edit and of a worker, from which routing policies decide."""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from maskserve_common.contracts.keys import entries_id
from maskserve_common.contracts.pricing import Pricing
from maskserve_common.contracts.reuse_levels import ReuseLevel, with_template
from maskserve_common.contracts.status_record import RowStatus, WorkerStatus
from maskserve_common.contracts.tiers import DEVICE, HOST, TIERS
from maskserve_common.routing.adapters import AdapterView
from maskserve_common.routing.profile import Profile, RowLoad, build_profile

SPARE_PLACES = 2
"""Places of a worker, beyond all others, for edits of keys that have no edit at a worker. Without
them, such a key waits until an edit of a busy key has ended."""


class EncodingPlace(NamedTuple):
    """The outputs of an encoder, which a workflow run keeps for its edits."""

    at: str
    """Name of the host whose workers take them."""
    seconds: float
    """Seconds that it took to make them."""


@dataclass(frozen=True, slots=True)
class Edit:
    """An edit that needs a worker."""

    steps: int
    active_tokens: int
    total_tokens: int
    template_id: str = ""
    priority: int = 0
    model: str = ""
    """Name of the model that the edit needs; empty: any."""
    cache: bool = True
    """Whether it may use cached activations."""
    dense_steps: int = 0
    """First steps that compute all tokens in any case."""
    refresh_steps: int = 0
    """Number of refresh steps if its template is not ready; 0: all steps are dense."""
    always_refreshes: bool = False
    """Whether it has refresh steps even if its template is ready."""
    inner_tokens: int = 0
    """Computed tokens that lie inside the mask: steps that leave out its ring compute only
    these."""
    ring_tokens: int = 0
    """Tokens of the ring round the mask."""
    adapters: tuple[str, ...] = ()
    controls: tuple[tuple[str, float], ...] = ()
    """Names of its ControlNets, each with the share of the steps in which it acts."""
    cached_levels: tuple[ReuseLevel, ...] = ()
    """Levels that it may step down to when it would be late and reads a template (`reuse:
    elastic`)."""
    refresh_levels: tuple[ReuseLevel, ...] = ()
    """Levels that it may step down to with refresh steps of its own."""
    dense_levels: tuple[ReuseLevel, ...] = ()
    """Levels that it may step down to when it runs dense."""
    due: float = math.inf
    """Due time on the policies' clock; workers give rows to the most urgent first. Infinite: none,
    and it comes after all others."""
    encoded: EncodingPlace | None = None
    """Where its picture is encoded already; None: nowhere."""
    first_of_key: bool = False
    """Whether no edit of its key is at a worker: it may take a spare place."""

    def active(self, ring_share: float | None, lookahead: float = 0.0) -> float:
        """Return the mean tokens that a step of a cached row computes.

        Args:
            ring_share: share of steps that compute the ring (`Pricing.rings`); None: all do.
            lookahead: share of steps that also compute a lookahead.
        """
        if ring_share is None:
            return (1.0 + lookahead) * self.active_tokens
        return (1.0 + lookahead) * self.inner_tokens + ring_share * self.ring_tokens


class _PlanPrice(NamedTuple):
    """Seconds of an edit under one execution plan, as `WorkerView.price` counts them."""

    compute: float
    load: float = 0.0
    fetch: float = 0.0
    tokens: float | None = None
    """Mean computed tokens of a reading step; None: the edit runs dense."""


@dataclass(frozen=True, slots=True)
class WorkerView:
    """One worker at the time `as_of`. Immutable: changes return a new view."""

    worker: str
    pricing: Pricing
    max_rows: int
    max_waiting: int
    running: tuple[RowLoad, ...] = ()
    waiting: tuple[RowLoad, ...] = ()
    """Waiting edits, in the order in which they get rows."""
    templates: Mapping[str, Container[str]] | None = None
    """Tier -> `entries_id` of its templates; None: every template is in the host tier."""
    adapters: AdapterView | None = None
    controlnets: AdapterView | None = None
    """ControlNets of the worker; None: loading one takes no known time."""
    model: str = ""
    devices: int = 1
    """Devices, each with a batch of `max_rows`, among which rows are spread."""
    ready: bool = True
    """Whether it takes new edits: alive, loaded and not draining."""
    as_of: float = 0.0
    """Time of the view on the policies' clock, in seconds."""
    profile: Profile = field(init=False, repr=False, compare=False)
    """Profile of the work, built with the view, so that no decision builds it."""
    lowest_priority: float = field(init=False, repr=False, compare=False)
    """Lowest priority of the waiting edits; infinite without any."""
    latest_due: float = field(init=False, repr=False, compare=False)
    """Latest due time of the waiting edits; minus infinity without any."""

    def __post_init__(self) -> None:
        profile = self.profile_of(self.waiting)
        lowest = min((row.priority for row in self.waiting), default=math.inf)
        object.__setattr__(self, "profile", profile)
        object.__setattr__(self, "lowest_priority", lowest)
        latest = max((row.due for row in self.waiting), default=-math.inf)
        object.__setattr__(self, "latest_due", latest)

    @property
    def free_rows(self) -> int:
        """Rows that the first waiting edits get at once."""
        return max(self.devices * self.max_rows - len(self.running), 0)

    @property
    def free_places(self) -> int:
        """Edits that may be sent to it, beside spare places."""
        return (self.max_waiting or self.free_rows) - len(self.waiting)

    def profile_of(self, waiting: tuple[RowLoad, ...]) -> Profile:
        """Return the profile of the worker's work if `waiting` were all edits that wait."""
        stride = self.devices
        return build_profile(self.running[::stride], waiting[::stride], self.max_rows)

    def serves(self, edit: Edit) -> bool:
        """Whether the worker takes edits like `edit`, now or once it has a place."""
        return self.ready and (not edit.model or edit.model == self.model)

    def takes(self, edit: Edit) -> bool:
        """Whether the worker may be given `edit`."""
        spare_places = SPARE_PLACES if edit.first_of_key else 0
        return self.serves(edit) and self.free_places + spare_places > 0

    def tier_of(self, template_id: str) -> str | None:
        """The nearest tier that has the template's entries, or `None`."""
        if self.templates is None:
            return HOST.name
        for tier in TIERS:
            if entries_id(template_id) in self.templates.get(tier, ()):
                return tier
        return None

    def price(self, edit: Edit) -> tuple[float, float, float]:
        """Return the `(compute, load, fetch)` seconds of `edit` on this worker: the first two per
        step, the last once.

        The edit runs dense at once if no entries are usable, or if fetching them takes longer than
        they save.
        """
        plan = self._plan(edit)
        seconds = plan.compute
        if self.pricing.degrees:  # assume an equal part of the devices for each row
            other_rows = len(self.running) + len(self.waiting)
            cached = plan.tokens is not None
            seconds *= self.pricing.share(self.devices // (other_rows + 1), cached=cached)
        return seconds, plan.load, plan.fetch

    def _plan(self, edit: Edit) -> _PlanPrice:
        """Return the price of the cheapest execution plan, which the worker would also choose."""
        tier = self._tier(edit)
        plans = [_PlanPrice(self.pricing.dense(edit.total_tokens))]
        if tier is not None:
            plans += self._template_plans(edit, tier)
        elif edit.refresh_steps:
            plans.append(self._refresh_plan(edit))
        dense, *alternatives = [self._with_adapters(edit, plan) for plan in plans]
        best = min([dense, *alternatives], key=lambda plan: plan.compute)
        if best.fetch and best.fetch + edit.steps * best.compute >= edit.steps * dense.compute:
            return dense
        return best

    def _template_plans(self, edit: Edit, tier: str) -> list[_PlanPrice]:
        """Return the plans that read the template: one leaves out text and ring where it can, the
        other computes them.
        """
        pricing, total = self.pricing, edit.total_tokens
        tokens, whole = self._cached_tokens(edit), edit.active(None)
        rows = [(tokens, *pricing.row(tokens, total, cached=True))]
        if pricing.whole is not None:
            rows.append((whole, *pricing.whole_row(whole, total)))
        first, dense, plans = min(1.0, edit.dense_steps / edit.steps), pricing.dense(total), []
        for active, compute, load in rows:
            if compute < dense:
                mean = compute + first * (dense - compute)
                loads = 0.0 if tier == DEVICE.name else (1.0 - first) * load
                plans.append(_PlanPrice(mean, loads, pricing.fetch_s(tier), active))
        return plans

    def _tier(self, edit: Edit) -> str | None:
        """Return the nearest tier with the entries that the edit reads; None: it reads none."""
        return self.tier_of(edit.template_id) if edit.cache and not edit.always_refreshes else None

    def _cached_tokens(self, edit: Edit) -> float:
        """Return the mean computed tokens of a step that reads a template."""
        rings = self.pricing.rings
        # A ControlNet beside a template computes the same tokens as its row, ring included.
        return edit.active(None) if edit.controls else edit.active(rings.template, rings.lookahead)

    def least_share(self, edit: Edit) -> float:
        """Return the least share of its work to which a late edit may step down on this worker."""
        levels = edit.dense_levels if self._plan(edit).tokens is None else edit.refresh_levels
        if self._tier(edit) is not None:
            times = self.pricing.whole_times(edit.active(None), self._cached_tokens(edit))
            levels = with_template(edit.cached_levels, times)
        return min((level.work for level in levels), default=1.0)

    def _refresh_plan(self, edit: Edit) -> _PlanPrice:
        """Return the plan by refresh steps."""
        active, share = edit.active(self.pricing.rings.refresh), edit.refresh_steps / edit.steps
        compute = self.pricing.refreshing_row(active, edit.total_tokens, share, 1.0 / edit.steps)
        return _PlanPrice(compute, tokens=active)

    def _with_adapters(self, edit: Edit, plan: _PlanPrice) -> _PlanPrice:
        """Return the plan with the costs per step of the edit's ControlNets and LoRAs added."""
        pricing, cached = self.pricing, plan.tokens is not None
        tokens, seconds = (plan.tokens or 0.0, edit.total_tokens), plan.compute
        if edit.controls:
            seconds += pricing.control_seconds(edit.controls, *tokens, cached=cached)
        if edit.adapters and self.adapters is not None:
            nbytes = self.adapters.nbytes(edit.adapters)
            seconds += pricing.lora_seconds(nbytes, *tokens, cached=cached)
        return plan._replace(compute=seconds)

    def adapter_seconds(self, edit: Edit) -> float:
        """Return the seconds until LoRAs and ControlNets of `edit` are usable on this worker."""
        seconds = 0.0
        if edit.adapters and self.adapters is not None:
            seconds = self.adapters.seconds(edit.adapters)
        if edit.controls and self.controlnets is not None:
            seconds = max(seconds, self.controlnets.seconds(_nets(edit)))
        return seconds

    def row(self, edit: Edit) -> RowLoad:
        """Return the edit as a row of this worker."""
        plan, total = self._plan(edit), edit.total_tokens
        tokens = total if plan.tokens is None else min(round(plan.tokens), total)
        return RowLoad(edit.steps, plan.compute, plan.load, tokens, edit.priority, edit.due)

    def with_sent(self, edits: Iterable[Edit]) -> WorkerView:
        """Return a view with `edits` sent to the worker, behind its waiting edits."""
        sent_edits = tuple(edits)
        adapters, nets = self.adapters, self.controlnets
        if adapters is not None:
            adapters = adapters.with_requested(
                name for edit in sent_edits for name in edit.adapters
            )
        if nets is not None:
            nets = nets.with_requested(name for edit in sent_edits for name in _nets(edit))
        waiting = (*self.waiting, *(self.row(edit) for edit in sent_edits))
        return replace(self, waiting=waiting, adapters=adapters, controlnets=nets)

    @classmethod
    def from_status(
        cls,
        status: WorkerStatus,
        pricing: Pricing,
        as_of: float,
        templates: Mapping[str, Container[str]] | None = None,
    ) -> WorkerView:
        """Return the view that a worker's record gives. It leaves out rows that prime templates,
        because they give way to edits.

        Args:
            status: record of the worker.
            pricing: its costs, from the record's `costs` or estimated.
            as_of: time of the record, on the clock of the policies.
            templates: templates in each of its tiers; None: as in the record.
        """
        if templates is None:
            templates = {tier: frozenset(ids) for tier, ids in status.templates.items()}
        no_templates: Container[str] = frozenset()
        on_device = templates.get(DEVICE.name, no_templates)

        def due_of(row: RowStatus) -> float:
            return as_of + (row.due_ns - status.monotonic_ns) / 1e9 if row.due_ns else math.inf

        def rows(statuses: tuple[RowStatus, ...], *, begun: bool) -> tuple[RowLoad, ...]:
            return tuple(
                _row_load(
                    row,
                    pricing,
                    begun=begun,
                    on_device=entries_id(row.template_id) in on_device,
                    due=due_of(row),
                )
                for row in statuses
                if row.kind != "prime"
            )

        return cls(
            worker=status.worker,
            pricing=pricing,
            max_rows=status.max_rows,
            max_waiting=status.max_waiting,
            running=rows(status.running, begun=True),
            waiting=rows(status.waiting, begun=False),
            templates=templates,
            adapters=AdapterView.from_status(status),
            controlnets=AdapterView.of_controlnets(status),
            model=status.model,
            devices=status.devices,
            ready=status.takes_edits,
            as_of=as_of,
        )


def _row_load(
    row: RowStatus, pricing: Pricing, *, begun: bool, on_device: bool, due: float
) -> RowLoad:
    """Return the load of a row in a worker's record.

    Args:
        row: record of the row.
        pricing: costs of the worker.
        begun: whether the row has taken a step.
        on_device: whether its template's entries are on the device.
        due: its due time on the policies' clock.
    """
    tokens, cached = (row.active_tokens, row.total_tokens), row.kind == "cached"
    compute, load = pricing.row(*tokens, cached=cached)
    if row.own:
        first = 0.0 if begun else 1.0 / max(row.steps_left, 1)
        compute, load = pricing.refreshing_row(*tokens, row.dense_share, first), 0.0
    elif cached:
        dense, share = pricing.dense(row.total_tokens), row.dense_share
        compute, load = compute + share * (dense - compute), (1.0 - share) * load
    compute += pricing.control_seconds(row.controls, *tokens, cached=cached)
    compute += pricing.lora_seconds(row.adapter_bytes, *tokens, cached=cached)
    load = 0.0 if on_device else load
    return RowLoad(row.steps_left, compute, load, row.active_tokens, row.priority, due)


def _nets(edit: Edit) -> Iterator[str]:
    return (name for name, _ in edit.controls)
