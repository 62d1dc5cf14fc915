"""Edits without a mask that find the regions that they change (`region: auto`, docs/adr/0091).

Such an edit begins as a dense row. After some steps its region is its mask: it goes on as an edit
with refresh steps, whose cached tokens keep the row's own prediction. At each lookahead more tokens
may join; the row then refreshes at once.

Used by the engine thread only.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from maskserve_engine.families.adapter import Adapter
from maskserve_engine.planning.regions import Bools
from maskserve_engine.requests.edit_adapters import EditAdapters
from maskserve_engine.requests.execution_plan import EditWork
from maskserve_engine.requests.executor import Executor, RegionSpec, RowStep
from maskserve_engine.requests.refresh_schedules import RefreshSchedules, step_cache_bytes
from maskserve_engine.requests.state import ReadSchedule, RequestState


class EditRegions:
    """Narrows running edits to their regions.

    Args:
        schedules: decides refresh steps.
        dense_above_ratio: `[cache] dense_above_ratio`.
        adapter: the model.
        executor: holds the rows.
        adapters: the edits' LoRAs, which add to their work.
    """

    def __init__(
        self,
        schedules: RefreshSchedules,
        dense_above_ratio: float,
        adapter: Adapter,
        executor: Executor,
        adapters: EditAdapters,
    ) -> None:
        self._schedules, self._dense_above_ratio = schedules, dense_above_ratio
        self._adapter, self._executor, self._adapters = adapter, executor, adapters

    @staticmethod
    def measures(edit: RequestState) -> bool:
        """Whether the change of an edit's prediction is measured after its next step."""
        rule, step = edit.plan.region, edit.tally.done
        if rule is None or step + 1 == edit.work.steps:
            return False  # it has found no region, or has no step for one
        if edit.region is None:
            return step + 1 == rule.after
        return edit.reads is not None and edit.reads.looks_ahead(step)

    def follow(self, edit: RequestState, step: RowStep) -> None:
        """Narrow an edit to its region, or let more tokens join, by the change that the step has
        measured.
        """
        rule = edit.plan.region
        assert rule is not None, "only such an edit's change is measured"
        assert step.change is not None, "the step has measured it"
        before = edit.region
        region = rule.region(step.change.reshape(self._grid(edit)), before)
        if before is None and (not region.any() or region.mean() >= self._dense_above_ratio):
            edit.plan = replace(edit.plan, region=None)
        elif before is None or (region & ~before).any():
            edit.joined_tokens += 0 if before is None else int((region & ~before).sum())
            self._narrow(edit, region)

    def _grid(self, edit: RequestState) -> tuple[int, int]:
        pixels = self._adapter.spec.token_pixels
        height, width = edit.job.edit_mask.shape
        return height // pixels, width // pixels

    def _narrow(self, edit: RequestState, region: Bools) -> None:
        adapter, pixels = self._adapter, self._adapter.spec.token_pixels
        mask = np.kron(region, np.full((pixels, pixels), 255, np.uint8))
        job = adapter.with_settings(replace(edit.job, edit_mask=mask.astype(np.uint8)), mask_ring=0)
        schedule = self._schedules.of_region(job, edit.tally.done)
        nbytes = step_cache_bytes(schedule, adapter, job)
        spec = RegionSpec(np.flatnonzero(region), schedule, nbytes)
        if not self._executor.narrow(edit.request_id, spec):
            edit.plan = replace(edit.plan, region=None, dense_for="memory")
            return
        edit.job, edit.region = job, region
        edit.work, edit.step_cache_bytes = EditWork.of(job, adapter), nbytes
        if edit.loras.digests:
            self._adapters.use_loras(edit)
        edit.reads = ReadSchedule.of_schedule(edit.request_id, schedule, adapter.sigmas(job))
        plan = replace(
            edit.plan,
            mode="cached",
            outcome="own",
            dense_for="",
            schedule=schedule,
            dense_steps=len(edit.tally.dense) + len(schedule.refresh_steps),
        )
        edit.set_plan(plan, adapter)
