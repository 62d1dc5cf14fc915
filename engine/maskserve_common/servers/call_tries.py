"""The tries of one call, at one server of a pool after another."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any, Generic

from maskserve_common.errors import EngineFailed
from maskserve_common.servers.failure import Failure, Status, Tries
from maskserve_common.servers.pool import S, ServerPool

log = logging.getLogger("maskserve")
_WAIT_S = 0.1
"""First wait in seconds after no server took a call; it doubles each time."""
_MOST_WAIT_S = 1.0


class CallTries(Generic[S]):
    """Counts the tries of one call, and decides whether another server gets it.

    In a round each server is tried once, the best first. Another round follows while a server may
    come back.

    Args:
        pool: the servers.
        name: what they are called for: a stage or a node.
        patience_s: seconds in which a server, which its supervisor restarts, comes back.
    """

    def __init__(self, pool: ServerPool[S], name: str, patience_s: float) -> None:
        self._pool, self._name, self._patience_s = pool, name, patience_s
        self.count = 1
        """2 if a server was lost, failed the call, or had to be waited for."""
        self.failure: Failure | EngineFailed | None = None
        """The error of the last server that took the call."""
        self.returning = False
        """True if a server of this round may take the call later."""
        self._broken: set[S] = set()
        """Servers that failed the call, or cannot run it, and still answer: others are tried again
        before them."""
        self._tried: set[S] = set()
        """Servers tried in this round."""
        self._tries, self._wait_s, self._end = Tries(), _WAIT_S, 0.0

    async def next_server(self, rank: Callable[[S], Any]) -> S | None:
        """Return the server to try next; None: no server is expected to take the call any more.

        Args:
            rank: key by which the best server is the least.
        """
        while True:
            able = self._pool.able(self._name)
            skipped = set[S]() if self._broken.issuperset(able) else self._broken
            untried = [server for server in able if server not in self._tried | skipped]
            if untried:
                server = min(untried, key=rank)
                self._tried.add(server)
                return server
            if not await self._next_round():
                return None

    async def _next_round(self) -> bool:
        """Wait for the next round; return False if no server is expected to take the call then."""
        now_s = time.monotonic()
        self._end = self._end or now_s + self._patience_s
        self.returning |= self._pool.known and not self._pool.servers
        is_over = now_s >= self._end or self._pool.silent_s() > self._patience_s
        if is_over or not self.returning:
            return False
        self.count, self.returning = 2, False
        self._tried.clear()
        await asyncio.sleep(self._wait_s)
        self._wait_s = min(2 * self._wait_s, _MOST_WAIT_S)
        return True

    def record_failure(self, server: S, failure: Failure) -> None:
        """Note that a server failed the call.

        Raises:
            Failure: no other server would do better.
            EngineFailed: the call may crash its servers.
        """
        self.count = 2
        if failure.untaken:
            self.returning = True
            return
        self.failure = failure
        if not failure.coded:
            log.warning("%s failed a call of %s: %s", server.address, self._name, failure.details)
            self.failure = EngineFailed(f"{self._name}: its {server.kind} failed the call")
            self.returning = True  # a server that replaces it may be able to run the call
        if not (failure.lost and self._tries.goes_on(failure)):
            raise self.failure
        if failure.status is not Status.UNAVAILABLE:
            self._broken.add(server)

    def pass_over(self, server: S, failure: Failure) -> None:
        """Note that a server cannot run the call, for a reason of its own. The call did it no harm,
        so that it may still lose another server.
        """
        self.count, self.failure = 2, failure
        self._broken.add(server)
