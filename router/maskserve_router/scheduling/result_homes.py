"""Remembers which workers have a kept result, so that edits of it go there."""

from __future__ import annotations

from maskserve_common.contracts.settings import EditSettings
from maskserve_common.errors import TemplateNotFound
from maskserve_common.lru_cache import LruCache
from maskserve_common.routing import Edit
from maskserve_common.servers.failure import Failure
from maskserve_router.workers.pool import Pool
from maskserve_router.workers.worker import Worker, WorkerEpoch


class ResultHomes:
    """The workers of kept results.

    Args:
        pool: the workers.
        most: most results that are remembered.
    """

    def __init__(self, pool: Pool, most: int) -> None:
        self._pool = pool
        self._homes: LruCache[str, str] = LruCache(most)
        """Id of a kept result -> `Worker.results_at` of the workers that have it."""

    def forget(self, template_id: str) -> None:
        """Forget which workers have a result: it is now registered everywhere, or deleted."""
        self._homes.drop(template_id)

    def workers_without(self, edit: Edit, settings: EditSettings | None) -> frozenset[WorkerEpoch]:
        """Return the workers without a kept result that the edit names, if a ready worker has it;
        otherwise none.
        """
        names = (edit.template_id, *(settings.reference_ids if settings else ()))
        home = next((home for name in names if (home := self._homes.get(name))), None)
        if home is None:
            return frozenset()
        ready = self._pool.ready()
        if all(worker.results_at != home for worker in ready):
            return frozenset()
        return frozenset(worker.epoch for worker in ready if worker.results_at != home)

    def learn(
        self, settings: EditSettings, worker: Worker, result_id: str | None, failure: Failure | None
    ) -> None:
        """Remember the workers that have a kept result: this worker made it, or a retry found it
        there.

        Args:
            settings: settings of the edit that the worker answered.
            worker: the worker.
            result_id: id of the result that it has kept; None: none.
            failure: why the edit was sent again; None: it was not.
        """
        names = list(filter(None, (settings.template_id, *settings.reference_ids)))
        if failure is not None and failure.code == TemplateNotFound.code and len(names) == 1:
            self._homes.put(names[0], worker.results_at)
        if result_id:
            self._homes.put(result_id, worker.results_at)
