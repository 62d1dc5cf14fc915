"""The workers in the form that decisions use, updated only where a worker has changed."""

from __future__ import annotations

from collections import Counter

from maskserve_common.routing import WorkerTable
from maskserve_router.workers.template_index import TemplateIndex
from maskserve_router.workers.worker import Worker


class Roster:
    """Keeps the table of workers up to date. Use it from the event loop only.

    Args:
        index: which workers have which templates.
    """

    def __init__(self, index: TemplateIndex) -> None:
        self._table = WorkerTable(index.holders)
        self._workers: dict[int, Worker] = {}
        self._changed: set[Worker] = set()
        self._ejected: set[Worker] = set()
        """Ejected workers. They are updated every time: they may take edits again without a
        change."""
        self._served: dict[int, tuple[str, bool]] = {}
        self._models: Counter[str] = Counter()
        self._due = 0

    def join(self, worker: Worker) -> None:
        self._workers[worker.number] = worker
        worker.changed = self._changed.add
        self._changed.add(worker)

    def leave(self, worker: Worker) -> None:
        """Remove a worker; its number may be given to another one."""
        worker.changed = None
        self._changed.discard(worker)
        self._ejected.discard(worker)
        self._serves(worker.number, "", by_size=False)
        del self._workers[worker.number]
        self._table.drop(worker.number)

    def worker(self, number: int) -> Worker:
        return self._workers[number]

    def table(self, now: float) -> WorkerTable:
        """Return the table with all workers' rows up to date."""
        for worker in self._changed | self._ejected:
            number, times = worker.number, worker.times
            view = worker.view(now)
            self._table.put(number, view, times.slowdown, times.remainder_s, accepts=worker.ready)
            served = worker.served
            self._serves(number, worker.model, by_size=bool(served and served.due_ms))
            if worker.breaker.ejected:
                self._ejected.add(worker)
            else:
                self._ejected.discard(worker)
        self._changed.clear()
        return self._table

    def models(self, now: float) -> Counter[str]:
        """Return the models that workers report, each with its number of workers."""
        self.table(now)
        return self._models

    def some_due_by_size(self, now: float) -> bool:
        """Return True if a worker sets due times by size for edits without their own."""
        self.table(now)
        return self._due > 0

    def _serves(self, number: int, model: str, *, by_size: bool) -> None:
        previous_model, was_by_size = self._served.get(number, ("", False))
        self._served[number] = model, by_size
        self._due += by_size - was_by_size
        if previous_model != model:
            if previous_model:
                self._models[previous_model] -= 1
                self._models += Counter()  # removes models that nobody serves
            if model:
                self._models[model] += 1
