"""A queue of template registrations and evictions for workers that missed them.

The queue is in memory, with a limit on the bytes of its images; a restart of the router empties it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

from maskserve_common.errors import EngineFailed
from maskserve_common.servers.failure import Blame, Failure
from maskserve_common.shares import room
from maskserve_router.messages.control_message import image_size
from maskserve_router.workers.pool import Pool
from maskserve_router.workers.worker import Worker

log = logging.getLogger("maskserve.router")
Send: TypeAlias = Callable[[Worker, dict[str, Any]], Awaitable[object]]
_RETRY_S = 5.0
"""Seconds until a failed operation is sent to the worker again."""


@dataclass(slots=True, eq=False)
class _MissedOperation:
    operation: dict[str, Any]
    template_id: str
    size: int
    """Bytes of the image; 0 for an eviction."""
    missed_by: set[str]
    """Addresses of the workers to which it must still be sent."""


def is_refusal(failure: Failure) -> bool:
    """Return True if the worker rejected the operation and would reject it again."""
    return failure.blame in (Blame.REQUEST, Blame.REFUSED) and not failure.untaken


class ReplicationQueue:
    """Queues operations and sends them to workers that are back. Use it from the event loop only.

    Args:
        pool: the workers.
        max_bytes: most bytes of queued images.
        send: runs an operation on a worker; raises Failure or EngineFailed.
    """

    def __init__(self, pool: Pool, max_bytes: int, send: Send) -> None:
        self._pool, self._max_bytes, self._send = pool, max_bytes, send
        self._missed: list[_MissedOperation] = []
        """Queued operations, in the order in which the other workers have run them."""
        self._sending: dict[str, asyncio.Task[None]] = {}
        """Address of a worker -> task that sends it operations."""
        self._not_before: dict[str, float] = {}
        """Address of a worker -> time of the next try after a failure."""

    def keep(
        self, operation: dict[str, Any], template_id: str, missed_by: Iterable[str]
    ) -> list[str]:
        """Queue an operation for the workers that missed it, in place of the queued operations that
        it undoes.

        Args:
            operation: `register` or `evict`.
            template_id: id of the template.
            missed_by: addresses of the workers that missed it.

        Returns:
            The addresses of the workers that will get it; none if there is no room for its image,
                in total or in the key's share.
        """
        scope = operation.get("scope", "")
        for_everybody = operation["op"] == "evict" and not scope
        undone = [
            entry
            for entry in self._missed
            if entry.template_id == template_id
            and (for_everybody or entry.operation.get("scope", "") == scope)
        ]
        self._missed = [entry for entry in self._missed if entry not in undone]
        # A worker that is just getting an undone operation needs this one after it.
        crossing = {a for entry in undone for a in entry.missed_by if a in self._sending}
        addresses = sorted(crossing.union(missed_by))
        size = image_size(operation)
        if not addresses:
            return []
        scope_bytes = sum(
            entry.size for entry in self._missed if entry.operation.get("scope", "") == scope
        )
        if size > room(
            self._max_bytes, sum(entry.size for entry in self._missed), scope_bytes, scope
        ):
            text = (
                "template %s is not kept for %s: [workers] missed_bytes has no room for its image"
            )
            log.warning(text, template_id, ", ".join(addresses))
            return []
        self._missed.append(_MissedOperation(operation, template_id, size, set(addresses)))
        return addresses

    def pending(self, template_id: str) -> list[str]:
        """Return the addresses of the workers that still miss the template's registration."""
        return sorted(
            address
            for entry in self._missed
            if entry.template_id == template_id and entry.operation["op"] == "register"
            for address in entry.missed_by
        )

    def send_missed(self) -> None:
        """Send queued operations to ready workers. Called when a worker may have become ready."""
        now_s = time.monotonic()
        for address in {address for entry in self._missed for address in entry.missed_by}:
            worker = self._pool.workers.get(address)
            if worker is None:
                self._remove(address, self._missed)  # no longer one of the workers
            elif (
                worker.ready
                and address not in self._sending
                and now_s >= self._not_before.get(address, 0.0)
            ):
                self._sending[address] = asyncio.create_task(self._send_missed_to(worker))

    async def close(self) -> None:
        tasks = list(self._sending.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _send_missed_to(self, worker: Worker) -> None:
        address = worker.address
        try:
            for entry in list(self._missed):
                # It may have been undone while another operation was sent.
                if entry not in self._missed or address not in entry.missed_by:
                    continue
                try:
                    await self._send(worker, entry.operation)
                except (Failure, EngineFailed) as error:
                    if not isinstance(error, Failure) or not is_refusal(error):
                        self._not_before[address] = time.monotonic() + _RETRY_S
                        return
                    name = entry.operation["op"]
                    log.warning("worker %s: %s %s: %s", address, name, entry.template_id, error)
                self._remove(address, [entry])
            self._not_before.pop(address, None)
        finally:
            del self._sending[address]

    def _remove(self, address: str, removed: list[_MissedOperation]) -> None:
        for entry in removed:
            entry.missed_by.discard(address)
        self._missed = [entry for entry in self._missed if entry.missed_by]
