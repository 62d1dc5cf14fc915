"""Templates being primed: from the queue, through the batch, into the store.

Used by the engine thread only.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from maskserve_common.errors import Overloaded
from maskserve_common.logs import about
from maskserve_engine.base.job import EditJob
from maskserve_engine.families.adapter import Adapter
from maskserve_engine.requests.edit_adapters import EditAdapters
from maskserve_engine.requests.executor import Executor, PrimingRowSpec, RowStep
from maskserve_engine.requests.state import PrimingState
from maskserve_engine.requests.templates import TemplateCache
from maskserve_engine.scheduling.step_scheduler import SchedulingPolicy, Ticket

_log = logging.getLogger(__name__)


class Primings:
    """Tickets and rows of templates that are being primed.

    Args:
        cache: cache of the templates.
        adapters: LoRAs that are part of entries' keys.
        ended: receives a template's key when its priming has ended.
    """

    def __init__(
        self,
        adapter: Adapter,
        cache: TemplateCache,
        scheduler: SchedulingPolicy,
        executor: Executor,
        adapters: EditAdapters,
        ended: Callable[[str], None],
    ) -> None:
        self._adapter, self.cache, self._executor = adapter, cache, executor
        self._adapters = adapters
        self._scheduler, self._ended = scheduler, ended
        self.states: dict[str, PrimingState] = {}
        """Primings by ticket id."""

    def begin(self, job: EditJob, *, urgent: bool, due: float | None = None) -> None:
        """Queue the priming of a job's template.

        Args:
            job: an edit of it, or its registration.
            urgent: whether an edit waits for it; it is then queued like live edits, not after them.
            due: when that edit's last step is to end.

        Raises:
            MaskserveError: a LoRA that is part of its entries' key cannot be loaded.
        """
        row = f"prime:{self.cache.key_of(job)}"
        self._adapters.hold_for_entries(row, job)
        priming = self.cache.begin(job)
        if priming is None:
            self._adapters.let_go(row)
            return
        tokens = self._adapter.tokens(job).total
        ticket = Ticket(
            request_id=row,
            steps=len(priming.anchors),
            total_tokens=tokens,
            active_tokens=tokens,
            arrival=time.monotonic(),
            priority=job.request.settings.priority,
            background=not urgent,
            due=due,
            batch_key=priming.key,  # alone: entries must not depend on other rows
        )
        try:
            self._scheduler.submit(ticket)
        except Overloaded:
            self.cache.end(priming, complete=False)
            self._adapters.let_go(row)
            return
        counted = self._adapter.counted(job).with_loras(self._adapters.works_of_entries(job))
        state = PrimingState(priming, ticket, tokens, counted)
        self.states[ticket.request_id] = state

    def left(self, key: str) -> int | None:
        """Return the number of a template's anchors not computed yet; None: it is primed in idle
        time, or not at all.
        """
        state = self.states.get(f"prime:{key}")
        if state is None or (state.ticket.background and self._scheduler.waiting):
            return None
        return state.ticket.steps - state.done

    def admit(self, row_id: str) -> None:
        """Make the priming's row, or end the priming on an error."""
        state = self.states[row_id]
        if state.running:
            return  # it has its row already
        prompt = self.cache.priming_prompt(state.priming.job)
        assert prompt is not None, "priming began without its prompt"
        try:
            self._executor.make(
                row_id,
                PrimingRowSpec(
                    state.priming.job,
                    state.priming.anchors,
                    prompt,
                    state.priming.noise_seed,
                    self.cache.kinds,
                    self.cache.config.entry_format,
                    state.priming.key,
                ),
            )
            job = state.priming.job
            if job.adapters:
                self._adapters.attach(row_id, job.request.used_loras)
            state.running = True
        except Exception:
            _log.exception("the row of a priming could not be made", extra=about(row_id))
            self.end(state, complete=False, unfit=True)

    def keep_anchor(self, state: PrimingState, step: RowStep) -> None:
        """Store the entry that the row's last step recorded."""
        state.done = step.done
        priming = state.priming
        if not self._executor.keep_entry(step.row, priming.key, priming.note(step.done)):
            self.end(state, complete=False, unfit=True)
        elif step.done == state.ticket.steps:
            self.end(state, complete=True)

    def end(self, state: PrimingState, *, complete: bool, unfit: bool = False) -> None:
        """End a priming: the template is in the store, or will not be (see `TemplateCache.end`).

        A priming ends once: an error in this method ends its row again, and by then the template
        may be in a new priming under the same id.
        """
        if self.states.get(state.request_id) is not state:
            return
        del self.states[state.request_id]
        self._scheduler.cancel(state.request_id)
        self._executor.release(state.request_id)
        self._adapters.let_go(state.request_id)
        try:
            self.cache.end(state.priming, complete=complete, unfit=unfit)
        finally:  # edits that wait for the template are notified in any case
            self._ended(state.priming.key)

    def end_all(self) -> None:
        for state in list(self.states.values()):
            self.end(state, complete=False)
