"""Views of many workers as a table of columns: a choice among a thousand workers is a few
operations on arrays.

Each worker has a row, which is written anew when the worker's view changes. `_scores` computes the
result of `predicted_seconds` for all rows, with the same operations in the same order, so that both
give the same number. Where LoRAs, ControlNets, several devices per edit or less urgent waiting
edits matter, the arrays give only a lower bound. `predicted_seconds` is then called for the workers
that could still be first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from maskserve_common.contracts.keys import entries_id
from maskserve_common.contracts.tiers import DEVICE, HOST, TIERS
from maskserve_common.routing.predict import predicted_seconds
from maskserve_common.routing.profile import Profile
from maskserve_common.routing.view import SPARE_PLACES, Edit, WorkerView

Floats: TypeAlias = npt.NDArray[np.float64]
Flags: TypeAlias = npt.NDArray[np.bool_]
Rows: TypeAlias = npt.NDArray[np.intp]
Holders: TypeAlias = Callable[[str, str, int], Flags]
"""`(tier, entries_id, count)` -> flags of the first `count` rows that have the entries in the
tier."""

_TIERS = tuple(TIERS)
_HOST, _DEVICE = _TIERS.index(HOST.name), _TIERS.index(DEVICE.name)
_COLUMNS = (
    "step",
    "dense_row",
    "tokens",
    "cached_row",
    "active_token",
    "spare_token",
    "ring_template",
    "ring_refresh",
    "lookahead",
    "between_row",
    "between_token",
    "whole_row",
    "whole_token",
    "as_of",
    "waits",
    "degree",
    "slowdown",
    "remainder_s",
    *(f"fetch_{tier}" for tier in _TIERS),
)
_COLUMN = {name: number for number, name in enumerate(_COLUMNS)}
_FETCH = _COLUMN[f"fetch_{_TIERS[0]}"]
_READY, _HAS_PLACE, _PLAIN, _ALL_TEMPLATES, _ACCEPTS, _HAS_SPARE_PLACE = range(6)
"""Columns of `_flags`. Plain: no further devices, and no more knots than the table has."""
_FIRST_ROWS = 64
_KNOTS = 40
"""Most knots of a profile; a worker with more is predicted by itself."""
_ALL, _URGENT = 0, 1
"""Profiles of a worker: all its work, and the work that precedes the most urgent edit."""
_FEW = 12
"""Most workers for which single predictions take less time than arrays."""
_BOUND_SLACK = 1.0 - 1e-9
"""Factor of a bound, since it is summed in another order than a prediction."""
_MOST_PREDICTED = 64
"""Most single predictions in `least_s`, where arrays give only bounds."""


class WorkerTable:
    """The views of workers, by the workers' numbers.

    Args:
        holders: which workers have the entries of a template.
    """

    def __init__(self, holders: Holders) -> None:
        self._holders = holders
        self._views: list[WorkerView | None] = []
        self._models: dict[str, int] = {}
        self._size(_FIRST_ROWS)

    def _size(self, rows: int) -> None:
        """Allocate `rows` rows; existing rows stay."""

        def larger(name: str, shape: tuple[int, ...], kind: type) -> None:
            new: npt.NDArray[Any] = np.zeros((rows, *shape), kind)
            old = getattr(self, name, None)
            if old is not None:
                new[: len(old)] = old
            setattr(self, name, new)

        larger("_costs", (len(_COLUMNS),), np.float64)
        larger("_flags", (6,), np.bool_)
        larger("_model", (), np.intp)
        larger("_urgency", (2,), np.float64)
        larger("_free_at", (2,), np.int64)
        larger("_knots", (2, _KNOTS), np.int64)
        larger("_work", (4, 2, _KNOTS), np.float64)

    _costs: Floats
    _flags: Flags
    _model: Rows
    _urgency: Floats
    """Lowest priority and latest due time of the waiting edits."""
    _free_at: npt.NDArray[np.int64]
    _knots: npt.NDArray[np.int64]
    _work: Floats
    """Busy seconds, their slope, loading seconds, their slope, by profile and knot."""

    def put(
        self,
        number: int,
        view: WorkerView,
        slowdown: float = 1.0,
        remainder_s: float = 0.0,
        *,
        accepts: bool | None = None,
    ) -> None:
        """Write a worker's row anew.

        Args:
            number: number of the worker.
            view: present view of the worker.
            slowdown: seconds until an edit is answered over its denoising seconds.
            remainder_s: further seconds per token.
            accepts: whether it reports that it takes edits, even if none are sent to it now; None:
                as in its view.
        """
        while number >= len(self._costs):
            self._size(2 * len(self._costs))
        self._views.extend([None] * (number + 1 - len(self._views)))
        self._views[number] = view
        pricing, rings = view.pricing, view.pricing.rings
        between, whole = pricing.between, pricing.whole
        profile = view.profile
        self._costs[number] = (
            pricing.step,
            pricing.dense_row,
            pricing.tokens,
            pricing.cached_row,
            pricing.active_token,
            pricing.spare_token,
            math.nan if rings.template is None else rings.template,
            math.nan if rings.refresh is None else rings.refresh,
            rings.lookahead,
            math.nan if between is None else between.cached_row,
            math.nan if between is None else between.active_token,
            math.nan if whole is None else whole.cached_row,
            math.nan if whole is None else whole.active_token,
            view.as_of,
            profile.free_at * pricing.step + profile.until(profile.free_at)[0],
            min([1.0, *(min(degree.dense, degree.cached) for degree in pricing.degrees)]),
            slowdown,
            remainder_s,
            *(pricing.fetch_s(tier) for tier in _TIERS),
        )
        fits = len(profile.knots) <= _KNOTS
        flags = self._flags[number]
        flags[_READY] = view.ready
        flags[_HAS_PLACE] = view.ready and view.free_places > 0
        flags[_PLAIN] = fits and not pricing.degrees
        flags[_ALL_TEMPLATES] = view.templates is None
        flags[_ACCEPTS] = view.ready if accepts is None else accepts
        flags[_HAS_SPARE_PLACE] = view.ready and view.free_places + SPARE_PLACES > 0
        self._model[number] = self._models.setdefault(view.model, len(self._models))
        self._urgency[number] = view.lowest_priority, view.latest_due
        free = view.free_rows
        urgent = view.profile_of(view.waiting[:free]) if len(view.waiting) > free else profile
        self._put_profile(number, _ALL, profile)
        self._put_profile(number, _URGENT, urgent)

    def _put_profile(self, number: int, which: int, profile: Profile) -> None:
        count = len(profile.knots)
        if count > _KNOTS:  # as if it had nothing to do: a lower bound
            profile, count = Profile(0, (0,), (0.0,), (0.0,), (0.0,), (0.0,)), 1
        self._free_at[number, which] = profile.free_at
        self._knots[number, which, :count] = profile.knots
        self._knots[number, which, count:] = np.iinfo(np.int64).max
        self._work[number, :, which, :count] = profile[2:]

    def drop(self, number: int) -> None:
        """Remove a worker."""
        self._views[number] = None
        self._flags[number] = False

    def view(self, number: int) -> WorkerView:
        view = self._views[number]
        assert view is not None
        return view

    def serving(self, edit: Edit) -> Rows:
        """Return the workers that serve the edit, now or once they have a place."""
        return self._of_model(edit, self._flags[:, _READY])

    def accepting(self, edit: Edit) -> Rows:
        """Return the workers that report that they serve the edit, even if nothing is sent to them
        for a time.
        """
        return self._of_model(edit, self._flags[:, _ACCEPTS])

    def taking(self, edit: Edit) -> Rows:
        """Return the workers that have a place for the edit."""
        column = _HAS_SPARE_PLACE if edit.first_of_key else _HAS_PLACE
        return self._of_model(edit, self._flags[:, column])

    def _of_model(self, edit: Edit, flags: Flags) -> Rows:
        if edit.model:
            flags = flags & (self._model == self._models.get(edit.model, -1))
        return np.flatnonzero(flags)

    def choose(self, edit: Edit, now: float, excluded: Collection[int] = ()) -> int | None:
        """Return the number of the worker that would finish first, as `MaskAware` chooses; among
        equal ones, the worker with the lowest id.

        Args:
            edit: the edit to place.
            now: seconds, by the clock of `predicted_seconds`.
            excluded: numbers of workers that do not get the edit.

        Returns:
            None: no worker has a place.
        """
        rows = self.taking(edit)
        if excluded:
            rows = rows[~np.isin(rows, list(excluded))]
        best: tuple[float, str, int] | None = None

        def predict(number: int) -> None:
            nonlocal best
            view = self.view(number)
            candidate = (predicted_seconds(edit, view, now), view.worker, number)
            best = candidate if best is None else min(best, candidate)

        if len(rows) <= _FEW:
            for number in rows.tolist():
                predict(number)
            return best[2] if best else None
        scores, exact = self._scores(edit, now, rows)
        if exact.any():
            least = float(scores[exact].min())
            tied = rows[exact & (scores == least)].tolist()
            best = min((least, self.view(number).worker, number) for number in tied)
        for floor, number in _ascending(scores[~exact], rows[~exact]):
            if best is not None and floor * _BOUND_SLACK > best[0]:
                break
            predict(number)
        return best[2] if best else None

    def least_s(
        self,
        edit: Edit,
        now: float,
        rows: Rows,
        predict: Callable[[int], float],
        *,
        alone: bool = False,
        primed: bool = False,
    ) -> float | None:
        """Return the least seconds to an edit's answer among the given workers.

        Args:
            edit: the edit; it may step down to one of its reuse levels.
            now: seconds, by the clock of `predicted_seconds`.
            rows: numbers of workers.
            predict: predicts the seconds at one worker; called for the most promising ones whose
                scores are only bounds.
            alone: whether to assume idle workers.
            primed: whether to assume that the workers have the template.

        Returns:
            None: there are no such workers.
        """
        if len(rows) <= _FEW:
            return min(map(predict, rows.tolist()), default=None)
        scores, exact = self._scores(edit, now, rows, alone=alone, primed=primed)
        costs = self._costs[rows]
        scores = (
            costs[:, _COLUMN["slowdown"]] * scores
            + costs[:, _COLUMN["remainder_s"]] * edit.total_tokens
        )
        if edit.cached_levels or edit.refresh_levels or edit.dense_levels:
            exact = np.zeros_like(exact)
        best = float(scores[exact].min()) if exact.any() else math.inf
        for count, (floor, number) in enumerate(_ascending(scores[~exact], rows[~exact])):
            if floor * _BOUND_SLACK > best or count == _MOST_PREDICTED:
                break
            best = min(best, predict(number))
        return best

    def earliest(self, rows: Rows, count: int) -> list[int]:
        """Return at most `count` of these workers, in the order in which a new row would get a
        place.
        """
        waits = self._costs[rows, _COLUMN["waits"]]
        order = np.argsort(waits, kind="stable")[:count]
        numbers: list[int] = rows[order].tolist()
        return numbers

    def _scores(
        self, edit: Edit, now: float, rows: Rows, *, alone: bool = False, primed: bool = False
    ) -> tuple[Floats, Flags]:
        """Return the seconds until each worker would have done the edit, and flags of the exact
        ones; the others are lower bounds.
        """
        costs, steps = self._costs[rows], edit.steps
        step = costs[:, _COLUMN["step"]]
        compute, load, fetch = self._prices(edit, rows, costs, primed=primed)
        exact = self._flags[rows, _PLAIN]
        if edit.adapters or edit.controls:
            exact = np.zeros_like(exact)
        compute = compute * costs[:, _COLUMN["degree"]]
        edit_s = steps * (step + compute)
        if alone:
            return np.maximum(edit_s, steps * load) + np.where(exact, fetch, 0.0), exact
        reordered = (edit.priority > self._urgency[rows, 0]) | (edit.due < self._urgency[rows, 1])
        exact = exact & ~reordered
        profile_index = reordered.astype(np.intp)
        free_at = self._free_at[rows, profile_index]
        horizon = free_at + steps
        knots = self._knots[rows, profile_index]
        at = (knots <= horizon[:, None]).sum(1) - 1
        beyond = horizon - knots[np.arange(len(rows)), at]
        busy, busy_slope, loading, loading_slope = self._work[rows, :, profile_index, at].T
        busy, loading = busy + busy_slope * beyond, loading + loading_slope * beyond
        total = np.maximum(edit_s + free_at * step + busy, steps * load + loading)
        elapsed_s = now - costs[:, _COLUMN["as_of"]]
        total = np.where(elapsed_s > 0.0, np.maximum(total - elapsed_s, edit_s), total)
        fetch_wait_s = np.maximum(fetch - costs[:, _COLUMN["waits"]], 0.0)
        return total + np.where(exact & (fetch > 0.0), fetch_wait_s, 0.0), exact

    def _prices(
        self, edit: Edit, rows: Rows, costs: Floats, *, primed: bool
    ) -> tuple[Floats, Floats, Floats]:
        """Return the columns of `WorkerView.price`, without LoRAs, ControlNets and further
        devices.
        """
        total, active_tokens, steps = edit.total_tokens, edit.active(None), edit.steps
        tokens = costs[:, _COLUMN["tokens"]]
        size = np.where(tokens > 0.0, total / np.where(tokens > 0.0, tokens, 1.0), 1.0)
        dense = costs[:, _COLUMN["dense_row"]] * size

        def tokens_of(ring: Floats, lookahead: Floats | float) -> Floats:
            with_ring = (1.0 + lookahead) * edit.inner_tokens + ring * edit.ring_tokens
            return np.where(np.isnan(ring), (1.0 + lookahead) * edit.active_tokens, with_ring)

        def row(base: str, token: str, active: Floats | float) -> tuple[Floats, Floats]:
            """Compute and load seconds of a cached row, as `Pricing.row` gives them; NaN where a
            price is missing.
            """
            compute = costs[:, _COLUMN[base]] + costs[:, _COLUMN[token]] * active
            load = costs[:, _COLUMN["spare_token"]] * np.maximum(total - active, 0.0)
            is_costly = (compute >= dense) | (load >= dense)
            return np.where(is_costly, dense, compute), np.where(is_costly, 0.0, load)

        ring = tokens_of(costs[:, _COLUMN["ring_template"]], costs[:, _COLUMN["lookahead"]])
        read = active_tokens if edit.controls else ring
        cached, load = row("cached_row", "active_token", read)
        whole, whole_load = row("whole_row", "whole_token", active_tokens)
        # Without its template, the edit has refresh steps or runs dense.
        compute = dense
        if edit.refresh_steps:
            active = tokens_of(costs[:, _COLUMN["ring_refresh"]], 0.0)
            added = (
                costs[:, _COLUMN["between_row"]] * size
                + costs[:, _COLUMN["between_token"]] * active
            )
            between = np.where(
                np.isnan(added),
                row("cached_row", "active_token", active)[0],
                np.minimum(dense, added),
            )
            share, first = edit.refresh_steps / steps, 1.0 / steps
            compute = np.minimum(dense, share * dense + (1.0 - first) * between)
        nothing = np.zeros(len(rows))
        tiers = self._tiers(edit, rows, primed=primed)
        if (tiers < 0).all():
            return compute, nothing, nothing
        # With its template, steps leave out text and ring, unless computing them costs less.
        less = whole < cached
        cached, load = np.where(less, whole, cached), np.where(less, whole_load, load)
        first = min(1.0, edit.dense_steps / steps)
        mean = cached + first * (dense - cached)
        reads = mean < dense
        fetch_s = self._costs[rows, _FETCH + np.maximum(tiers, 0)]
        reads &= ~((fetch_s > 0.0) & (fetch_s + steps * mean >= steps * dense))
        cached = np.where(reads, mean, dense)
        load = np.where(reads & (tiers != _DEVICE), (1.0 - first) * load, 0.0)
        fetch = np.where(reads, fetch_s, 0.0)
        has_entries = tiers >= 0
        return (
            np.where(has_entries, cached, compute),
            np.where(has_entries, load, 0.0),
            np.where(has_entries, fetch, 0.0),
        )

    def _tiers(self, edit: Edit, rows: Rows, *, primed: bool) -> Rows:
        """Return for each worker the position in `TIERS` of the nearest tier that has the template;
        -1: none.
        """
        nearest_tiers = np.full(len(rows), -1, np.intp)
        if not edit.cache or edit.always_refreshes:
            return nearest_tiers
        if primed:
            nearest_tiers[:] = _HOST
            return nearest_tiers
        template, count = entries_id(edit.template_id), len(self._views)
        for place, tier in reversed([*enumerate(_TIERS)]):
            nearest_tiers[self._holders(tier, template, count)[rows]] = place
        nearest_tiers[self._flags[rows, _ALL_TEMPLATES]] = _HOST
        return nearest_tiers


def _ascending(scores: Floats, rows: Rows) -> Iterator[tuple[float, int]]:
    """`(score, number)`, the lowest score first."""
    order = np.argsort(scores, kind="stable")
    return zip(scores[order].tolist(), rows[order].tolist(), strict=True)
