"""One step of the batch: load what its rows read, run the model, let finished rows leave."""

from __future__ import annotations

import logging
import time

from maskserve_core.config import Config
from maskserve_core.errors import EngineFailed
from maskserve_core.worker.logs import about
from maskserve_core.worker.observations import Observations
from maskserve_engine.families.adapter import Adapter
from maskserve_engine.job import Preview, Progress
from maskserve_engine.output_thread import OutputThread
from maskserve_engine.requests.manager import RequestManager
from maskserve_engine.requests.state import PrimingState, RequestState

_log = logging.getLogger(__name__)
_FAILED_STEPS = 3
"""Steps in a row in which every row failed, after which the engine gives itself up."""

Running = list[RequestState | PrimingState]


class StepRunner:
    """Takes steps; used by the engine thread only.

    What goes wrong with one row ends that row, and costs nobody else.
    """

    def __init__(
        self,
        config: Config,
        adapter: Adapter,
        manager: RequestManager,
        output: OutputThread,
        counters: dict[str, float],
        observations: Observations,
    ) -> None:
        self.adapter, self.manager, self.output = adapter, manager, output
        self.counters, self.observations = counters, observations
        kind = "kv" if config.cache.entry_kind == "kv" else "project"
        self._kinds = (kind,) * adapter.blocks
        """Per block, for rows that use entries."""
        self._dense = ("dense",) * adapter.blocks
        self._failed_steps = 0

    def step(self, running: Running) -> None:
        """Take one step of these rows.

        Raises:
            RuntimeError: nothing but failures for several steps.
        """
        self._load(running)
        self._run(running)
        for edit in list(running):
            try:
                self._update(edit, len(running))
            except Exception as error:
                _log.exception("the end of a step failed", extra=about(edit.request_id))
                self._drop(edit, error)

    def _load(self, running: Running) -> None:
        """Bring in the entries that the step's rows read."""
        reading = [edit for edit in running if edit.row.uses_entries]
        if not reading:
            return
        step_stall = 0.0
        for edit in reading:
            begin = time.perf_counter()
            try:
                edit.row.load()
            except Exception as error:
                _log.exception("entries could not be loaded", extra=about(edit.request_id))
                running.remove(edit)
                self._drop(edit, error)
                continue
            stall = time.perf_counter() - begin
            edit.load_stall += stall
            step_stall += stall
        self.counters["step_load_stall_seconds_total"] += step_stall
        self.observations.add("step_load_stall_seconds", step_stall)

    def _run(self, running: Running) -> None:
        """One model call for all rows; when it fails, one call each, so that one bad row or a
        batch too large for the memory costs nobody else.
        """
        if not running:
            return
        self.counters["step_tokens_total"] += sum(edit.step_tokens for edit in running)
        begin = time.perf_counter()
        try:
            self.adapter.step([edit.row for edit in running], self._kinds)
            self._failed_steps = 0
        except Exception:
            _log.exception("a step of %d rows failed; trying its rows one by one", len(running))
            self._run_alone(running)
        self.counters["steps_total"] += 1
        taken = time.perf_counter() - begin
        self.counters["step_seconds_total"] += taken
        self.observations.add("step_seconds", taken)

    def _run_alone(self, running: Running) -> None:
        for edit in list(running):
            try:
                self.adapter.step([edit.row], self._kinds)
            except Exception as error:
                _log.exception("the step of an edit failed", extra=about(edit.request_id))
                running.remove(edit)
                self._drop(edit, error)
        self._failed_steps = 0 if running else self._failed_steps + 1
        if self._failed_steps >= _FAILED_STEPS:
            raise RuntimeError(f"{_FAILED_STEPS} steps in a row failed for every row")

    def _drop(self, edit: RequestState | PrimingState, error: Exception) -> None:
        """End what cannot go on."""
        if isinstance(edit, PrimingState):
            self.manager.end_priming(edit, complete=False, unfit=True)
        else:
            reason = EngineFailed(f"a denoising step failed ({type(error).__name__})")
            self.manager.end(edit.request_id, reason)

    def _update(self, edit: RequestState | PrimingState, rows: int) -> None:
        """Count, tell the client how far it is, and let a finished row leave."""
        if isinstance(edit, PrimingState):
            self.counters["priming_rows_total"] += 1
            self.manager.keep_anchor(edit)
            return
        cached = edit.count_step(rows, self._kinds, self._dense)
        self.counters["cached_rows_total" if cached else "dense_rows_total"] += 1
        computed = edit.active_tokens if cached else edit.total_tokens
        self.counters["active_tokens_total"] += edit.passes * computed
        if edit.row.step == edit.steps:
            if edit.audit is None:
                self.counters["edits_total"] += 1
                self.observations.add("mask_ratio", edit.mask_ratio)
                self.observations.add("queue_seconds", edit.admitted - edit.submitted)
            self.manager.finish(edit)
        else:
            self._tell_progress(edit)

    def _tell_progress(self, edit: RequestState) -> None:
        settings, step = edit.job.request.settings, edit.row.step
        if settings.preview_every and step % settings.preview_every == 0:
            latents = edit.row.estimate()
            self.output.send(edit.sink, Preview(step, edit.steps, latents))
        elif settings.progress:
            self.output.send(edit.sink, Progress(step, edit.steps))
