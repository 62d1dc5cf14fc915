"""The workers: name resolution, polling and loss."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence

import grpc

from maskserve_common.errors import EngineFailed
from maskserve_common.servers.failure import Failure
from maskserve_common.servers.pool import ServerPool
from maskserve_router.config import RouterConfig
from maskserve_router.messages.control_message import control_request
from maskserve_router.workers.roster import Roster
from maskserve_router.workers.template_index import TemplateIndex
from maskserve_router.workers.worker import Worker, read_status

log = logging.getLogger("maskserve.router")
_STATUS = control_request({"op": "status"})
_READING_SHARE = 0.02
"""Share of a core for the records of one worker; long records are polled less often."""


class Pool(ServerPool[Worker]):
    """All workers of the configuration.

    Args:
        config: configuration of the router.
        changed: called when a worker starts to take edits or is gone.
    """

    def __init__(self, config: RouterConfig, changed: Callable[[], None]) -> None:
        super().__init__(config.workers.addresses, config.workers.dns_interval_s)
        self.config, self.workers = config, self.servers
        self._index = TemplateIndex()
        self.roster = Roster(self._index)
        self._changed = changed

    async def reload(self, config: RouterConfig) -> None:
        """Apply the workers of a new configuration; removed workers finish their edits."""
        self.config = config
        await self._discovery.reload(config.workers.addresses, config.workers.dns_interval_s)

    def models(self) -> Counter[str]:
        """Return the models that workers report, each with its number of workers."""
        return self.roster.models(time.monotonic())

    def ready(self) -> list[Worker]:
        return [worker for worker in self.workers.values() if worker.ready]

    def running_s(self) -> list[float]:
        """Return, for each ready worker, the seconds until all its rows have ended."""
        now_s = time.monotonic()
        return [worker.running_s(now_s) for worker in self.ready()]

    def up(self) -> list[Worker]:
        """Return the workers that answer, including those that take no edits."""
        return [worker for worker in self.workers.values() if worker.up]

    def may_eject(self) -> bool:
        """Return whether one more worker may be ejected."""
        ejected = sum(worker.breaker.ejected for worker in self.workers.values())
        return ejected + 1 <= self.config.faults.max_ejected_share * len(self.workers)

    # Membership.

    def join(self, address: str) -> Worker:
        """Add a worker at an address, without polling it."""
        worker = self.workers[address] = Worker(address, self.config, self._index)
        self.roster.join(worker)
        return worker

    _add_server = join

    def _addresses_changed(self, new: Sequence[str], removed: Sequence[str]) -> None:
        for address in removed:
            self.roster.leave(self.workers[address])
        super()._addresses_changed(sorted(new), sorted(removed))
        self._changed()

    async def _finish(self, worker: Worker) -> None:
        worker.draining = True
        end = time.monotonic() + self.config.faults.drain_grace_s
        try:
            while worker.sent and time.monotonic() < end:
                await asyncio.sleep(0.05)
        finally:
            message = f"[{EngineFailed.code}] the worker was removed from the configuration"
            worker.mark_down(Failure(grpc.StatusCode.UNAVAILABLE, message))
            self._index.leave(worker.number)

    # Polling.

    def _interval_s(self, worker: Worker) -> float:
        """Return the seconds between polls of a worker; the shortest after a missed answer."""
        config = self.config.workers
        if worker.misses:
            return config.poll_interval_s
        shared = len(self.workers) / config.polls_per_s
        return max(config.poll_interval_s, shared, worker.reading_s / _READING_SHARE)

    def _most_misses(self) -> int:
        return self.config.workers.misses

    async def _ask(self, worker: Worker) -> str:
        raw = await self._status_of(worker)
        begin = time.perf_counter()
        status = read_status(raw)
        was_ready = worker.ready
        worker.take_status(status, time.monotonic())
        worker.reading_s = time.perf_counter() - begin
        if worker.ready and not was_ready:
            log.info("worker %s serves %s", worker.address, status.model)
        if worker.ready or was_ready:
            self._changed()
        return "its engine does not step"

    async def _status_of(self, worker: Worker) -> bytes:
        """Return a worker's record, with changes of its templates if the worker supports them."""
        timeout, version = self.config.workers.poll_timeout_s, worker.templates_version
        if version is not None:
            try:
                request = control_request({"op": "status", "templates": version})
                return await worker.upstream.control(request, timeout)
            except Failure as failure:
                if "OP.templates" not in failure.details:
                    raise
                worker.reports_all()
        return await worker.upstream.control(_STATUS, timeout)

    def _lose(self, worker: Worker, why: str) -> None:
        """Mark the worker as down and end the calls to it."""
        super()._lose(worker, why)
        message = f"[{EngineFailed.code}] the worker no longer answers"
        worker.mark_down(Failure(grpc.StatusCode.UNAVAILABLE, message))
        self._changed()
