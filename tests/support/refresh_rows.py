"""Rows with refresh steps, run without an engine, for the adapter of any family."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from maskserve_benchmarks.steps.replay import Replay, WithoutLookahead, plan_of_kinds
from maskserve_common.config import Config
from maskserve_common.imaging.masks import active_tokens
from maskserve_engine.base.job import EditJob
from maskserve_engine.batch.step_cache import RefreshSchedule, StepCache, StepCacheReader
from maskserve_engine.cache.entries import encode
from maskserve_engine.families.adapter import Adapter, EditRow
from maskserve_engine.families.mmdit.preparation import model_inputs
from maskserve_engine.families.mmdit.spans import ExtrapolatedLatents
from maskserve_engine.layers.scatter_kv import KvSource
from maskserve_engine.requests.refresh_schedules import RefreshSchedules, step_cache_bytes
from maskserve_engine.spec.model_spec import ModelSpec
from tests.fakes.jobs import tolerance


def plan(
    *anchors: int,
    text: bool = True,
    ring: bool = False,
    format: str = "model",
    second_order: bool = False,
    power: float = 1.0,
    lookahead: bool = True,
) -> RefreshSchedule:
    cls = RefreshSchedule if lookahead else WithoutLookahead
    return cls(frozenset(anchors), format, text, ring, power, second_order=second_order)


def row_of(adapter: Adapter, job: EditJob, schedule: RefreshSchedule | None) -> Any:
    return adapter.dense_row(job) if schedule is None else adapter.refreshing_row(job, schedule)


def run(adapter: Adapter, rows: Sequence[Any], plans: Sequence[RefreshSchedule | None]) -> None:
    """Take all steps of the rows together. Rows without a schedule are dense."""
    readers = [schedule and StepCacheReader(row, adapter.entry_blocks)
               for row, schedule in zip(rows, plans, strict=True)]  # fmt: skip
    kinds = plan_of_kinds(("kv",) * adapter.blocks)
    while any(row.step < row.steps for row in rows):
        live = [(row, schedule, reader)
                for row, schedule, reader in zip(rows, plans, readers, strict=True)
                if row.step < row.steps]  # fmt: skip
        reads: Any = [None if schedule is None or row.step in schedule.dense
                      else reader.entry_at(row.step) for row, schedule, reader in live]  # fmt: skip
        adapter.step([row for row, _, _ in live], kinds if any(reads) else None, reads)


class FirstEdits(Replay):
    """Steps rows with refresh steps beside rows that read entries."""

    def __init__(self, adapter: Adapter) -> None:
        super().__init__(adapter)
        self._first: dict[int, tuple[Any, RefreshSchedule, StepCacheReader]] = {}

    def first_edit(self, job: EditJob, schedule: RefreshSchedule) -> Any:
        row = self.adapter.refreshing_row(job, schedule)
        reader = StepCacheReader(row, self.adapter.entry_blocks)
        self._first[id(row)] = row, schedule, reader
        return row

    def next_read(self, row: EditRow) -> Any:
        if id(row) not in self._first:
            return super().next_read(row)
        _, schedule, reader = self._first[id(row)]
        return None if row.step in schedule.dense else reader.entry_at(row.step)


def result(adapter: Adapter, job: EditJob, schedule: RefreshSchedule | None) -> Any:
    """[C, h, w] latents of a row that runs alone."""
    row = row_of(adapter, job, schedule)
    run(adapter, [row], [schedule])
    return row.result().array()


def schedule_by_errors(
    config: Config, adapter: Adapter, job: EditJob, meta: Mapping[str, Any]
) -> RefreshSchedule:
    """The schedule that an edit's row follows at last, by the errors that its META reports."""
    schedule = RefreshSchedules(config, adapter).of(job)
    assert schedule is not None
    assert schedule.control is not None
    before = 0
    for step, error in meta["refresh_errors"].items():
        schedule = schedule.controlled(int(step), schedule.control.after(before, int(step), error))
        before = int(step)
    return schedule


def computed(
    spec: ModelSpec, job: EditJob, latents: NDArray[np.float32], *, leaves_ring: bool = False
) -> NDArray[np.float32]:
    """[C, n] latents of the tokens that a step between refresh steps computes, with the mask's ring
    or without.
    """
    side = spec.token_pixels // spec.vae_scale_factor
    grid = [length // side for length in latents.shape[1:]]
    tokens = np.zeros(grid[0] * grid[1], bool)
    ring = 0 if leaves_ring else job.request.settings.mask_ring or 0
    tokens[active_tokens(job.edit_mask, spec.token_pixels, ring)] = True
    return latents[:, tokens.reshape(grid).repeat(side, 0).repeat(side, 1)]


def assert_as_alone(
    rows: Sequence[Any], plans: Sequence[RefreshSchedule | None], alone: Callable[[int, Any], Any]
) -> None:
    """Check that rows that ran together equal rows that run alone.

    In a format that rounds, a difference in the last digit can move a value on an edge to either
    side. Few values do that, so such a row differs by less than the format's own error. A row that
    reads another row's values differs by at least eight times that.

    Args:
        rows: after their last step.
        plans: the refresh schedules of the rows.
        alone: [C, h, w] latents of the row of a number, run alone with a schedule.
    """
    for number, (row, schedule) in enumerate(zip(rows, plans, strict=True)):
        expected = alone(number, schedule)
        room = tolerance(expected)
        if schedule is not None and schedule.format != "model":
            exact = alone(number, replace(schedule, format="model"))
            room += float(np.abs(expected - exact).max())
        assert np.abs(row.result().array() - expected).max() <= room, schedule


class Straight(StepCache):
    """A step cache that keeps the exact values of every refresh step, and draws each line when it
    is read. The line goes through the refresh steps before and after the step, or through the last
    two.
    """

    def __init__(self, plan: RefreshSchedule) -> None:
        super().__init__(plan)
        self._by_sigma: dict[int, dict[float, list[Tensor]]] = {}
        """By block, then by the refresh step's sigma: [tokens, width] of keys and of values."""

    def keys_values(self, block: int, keys: Tensor, values: Tensor) -> None:
        super().keys_values(block, keys, values)
        by_sigma = self._by_sigma.setdefault(block, {})
        by_sigma[self._at] = [
            x.index_select(0, self._cached_ids(block, x))
            for x in (keys.flatten(1), values.flatten(1))
        ]

    def weight(self, sigma: float) -> float:
        last, before = self._ends(self._line.sigmas, sigma)
        return 0.0 if last == before else (last - self._along(sigma)) / (before - last)

    def source(self, block: int, sigma: float, part: str = "kv") -> KvSource:
        by_place = {self._along(at): pair for at, pair in self._by_sigma[block].items()}
        last, before = self._ends(self._by_sigma[block], sigma)
        share = 0.0 if last == before else (self._along(sigma) - last) / (before - last)
        ends = zip(by_place[last], by_place[before], strict=True)
        line = [torch.lerp(one, other, share) for one, other in ends]
        return KvSource(tuple([encode(tensor, "model") for tensor in line]), None, ())

    def _along(self, sigma: float) -> float:
        return float(sigma**self.schedule.power)

    def _ends(self, anchors: Iterable[float], sigma: float) -> tuple[float, float]:
        """Places of the later refresh step and of the one before it."""
        places, now = sorted(map(self._along, anchors)), self._along(sigma)
        behind = [place for place in places if place > now]  # noise falls
        if len(places) > len(behind) > 0:
            return places[-len(behind) - 1], behind[0]
        return places[0], places[min(1, len(places) - 1)]


class StepwiseLatents(ExtrapolatedLatents):
    """Cached tokens that move at each step by the velocity on the line through the last two refresh
    steps, from the sigmas alone.
    """

    __slots__ = ("_row", "_velocities")

    def __init__(self, row: Any) -> None:
        latents = row.image.unmasked.latents
        super().__init__(*[getattr(latents, field.name) for field in fields(latents)])
        self._row = row
        self._velocities: list[tuple[float, Tensor]] = []
        """(sigma, velocity) of all refresh steps so far."""

    @property
    def latents_now(self) -> Tensor:
        return self.latents

    def at(self, sigma: Tensor, change: float = 0.0) -> Tensor:
        if self.blend is not None or not change:
            return super().at(sigma)
        ahead = float(sigma) - self._row.walk_sigma()
        latents = self.latents + ahead * self._velocities[-1][1]
        return model_inputs(latents, self.condition, self.context)

    def record_refresh(self, move: Tensor, change: float) -> None:
        sigmas = self._row.schedule.sigmas[self._row.step :]
        self._velocities.append((self._row.walk_sigma(), move / float(sigmas[1] - sigmas[0])))

    def record_lookahead(self, velocity: Tensor) -> None:
        step = self._row.step_cache.schedule.next_refresh(self._row.step)
        self._velocities.append((float(self._row.schedule.sigmas[step]), velocity))

    def move(self, change: float, weight: float) -> None:
        power, row = self._row.step_cache.schedule.power, self._row
        (before, earlier), (last, later) = (self._velocities * 2)[-2:]
        places = [sigma**power for sigma in (before, last, row.walk_sigma())]
        share = (places[2] - places[0]) / (places[1] - places[0]) if before != last else 1.0
        after = float(row.schedule.sigmas[row.step + 1])
        self.latents = self.latents + (after - row.walk_sigma()) * torch.lerp(earlier, later, share)


def check_dense_refresh_steps(adapter: Adapter, job: EditJob, *, text: bool = True) -> None:
    """Check that a row whose every step is a refresh step equals the dense row where it computes,
    and that a row with fewer is near it. What rows keep is no more than what is booked for them.

    Args:
        adapter: of any family.
        job: of six steps.
        text: whether steps between refresh steps leave the text out.
    """
    dense = computed(adapter.spec, job, result(adapter, job, None))
    every = result(adapter, job, plan(*range(adapter.steps(job)), text=text, lookahead=False))
    assert np.abs(computed(adapter.spec, job, every) - dense).max() <= tolerance(dense)
    for schedule in _few(text=text):
        row = row_of(adapter, job, schedule)
        run(adapter, [row], [schedule])
        off = np.abs(computed(adapter.spec, job, row.result().array()) - dense)
        assert 0 < off.max() < np.abs(dense).max()
        assert off.mean() < 0.2 * np.abs(dense).mean()
        nbytes = sum(step_cache.nbytes for step_cache in row.step_caches)
        booked = step_cache_bytes(schedule, adapter, job)
        assert 0 < nbytes == booked - adapter.refreshing_row_bytes(job)


def check_lines(adapter: Adapter, job: EditJob, *, text: bool = True) -> None:
    """Check that a row with few refresh steps equals a row that draws its own lines, of keys and
    values and of the cached tokens' velocity.

    Args:
        adapter: of a flow-matching family.
        job: of six steps.
        text: whether steps between refresh steps leave the text out.
    """
    for schedule in _few(text=text):
        row = row_of(adapter, job, schedule)
        for prompt in row.passes:
            prompt.cache = Straight(schedule)
        row.image.unmasked.latents = StepwiseLatents(row)
        run(adapter, [row], [schedule])
        lines = computed(adapter.spec, job, row.result().array())
        latents = computed(adapter.spec, job, result(adapter, job, schedule))
        assert np.abs(latents - lines).max() <= tolerance(lines)


def _few(*, text: bool) -> tuple[RefreshSchedule, ...]:
    """Schedules of three of six steps: with dense refresh steps, and with lookahead."""
    return (
        plan(0, 1, 3, text=text, power=1.5, lookahead=False),
        plan(0, 3, 5, text=text, power=1.5),
    )
