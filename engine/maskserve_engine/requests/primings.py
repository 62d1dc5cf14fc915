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
from maskserve_engine.requests.state import Priming
from maskserve_engine.requests.templates import TemplateCache
from maskserve_engine.scheduling.step_scheduler import SchedulingPolicy, Ticket

_log = logging.getLogger(__name__)


class Primings:
    """Queues templates to be primed, makes their rows, and stores what their steps record.

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
        self.active: dict[str, Priming] = {}
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
        key = self.cache.key_of(job)
        row = _row_of(key)
        self._adapters.hold_for_entries(row, job)
        if self.cache.priming_prompt(job) is None:  # not known yet
            self._adapters.let_go(row)
            return
        anchors, tokens = self.cache.anchors(job), self._adapter.tokens(job).total
        ticket = Ticket(
            request_id=row,
            steps=len(anchors),
            total_tokens=tokens,
            active_tokens=tokens,
            arrival=time.monotonic(),
            priority=job.request.settings.priority,
            background=not urgent,
            due=due,
            batch_key=key,  # alone: entries must not depend on other rows
        )
        self.cache.begin(key)
        try:
            self._scheduler.submit(ticket)
        except Overloaded:
            self.cache.end(key, job.request.template_id, complete=False)
            self._adapters.let_go(row)
            return
        totals = self._adapter.totals(job).with_loras(self._adapters.works_of_entries(job))
        self.active[row] = Priming(job, key, anchors, ticket, totals)

    def anchors_left(self, key: str) -> int | None:
        """Return the number of a template's anchors not computed yet; None: it is primed in idle
        time, or not at all.
        """
        priming = self.active.get(_row_of(key))
        if priming is None or (priming.ticket.background and self._scheduler.waiting):
            return None
        return priming.ticket.steps - priming.done

    def admit(self, row_id: str) -> None:
        """Make the priming's row, or end the priming on an error."""
        priming = self.active[row_id]
        if priming.running:
            return  # it has its row already
        job = priming.job
        prompt = self.cache.priming_prompt(job)
        assert prompt is not None, "priming began without its prompt"
        try:
            self._executor.make(
                row_id,
                PrimingRowSpec(
                    job=job,
                    anchors=priming.anchors,
                    prompt=prompt,
                    noise_seed=job.request.template_noise_seed,
                    kinds=self.cache.kinds,
                    format=self.cache.config.entry_format,
                    key=priming.key,
                ),
            )
            if job.adapters:
                self._adapters.attach(row_id, job.request.used_loras)
            priming.running = True
        except Exception:
            _log.exception("the row of a priming could not be made", extra=about(row_id))
            self.end(priming, complete=False, unfit=True)

    def keep_entry(self, priming: Priming, step: RowStep) -> None:
        """Store the entry that the row's last step recorded."""
        priming.done = step.done
        if not self._executor.keep_entry(step.row, priming.key, priming.note()):
            self.end(priming, complete=False, unfit=True)
        elif step.done == priming.ticket.steps:
            self.end(priming, complete=True)

    def end(self, priming: Priming, *, complete: bool, unfit: bool = False) -> None:
        """End a priming: the template is in the store, or will not be (see `TemplateCache.end`).

        A priming ends once: an error in this method ends its row again, and by then the template
        may be in a new priming under the same id.
        """
        row = priming.request_id
        if self.active.get(row) is not priming:
            return
        del self.active[row]
        self._scheduler.cancel(row)
        self._executor.release(row)
        self._adapters.let_go(row)
        try:
            self.cache.end(priming.key, priming.template_id, complete=complete, unfit=unfit)
        finally:  # edits that wait for the template are notified in any case
            self._ended(priming.key)

    def end_all(self) -> None:
        for priming in list(self.active.values()):
            self.end(priming, complete=False)


def _row_of(key: str) -> str:
    """Return the id of the row that primes a template."""
    return f"prime:{key}"
