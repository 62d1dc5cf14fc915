"""The tries of a call at node servers, one server after another."""

from __future__ import annotations

import asyncio
import logging
import time

from maskserve_common.errors import EngineFailed, split_code
from maskserve_common.servers.failure import Blame, Failure, Status, Tries
from maskserve_router.nodes.node_server import NodeServer
from maskserve_workflows.node_types import NodeType
from maskserve_workflows.wire import NOT_HOSTED, OTHER_VERSION

log = logging.getLogger("maskserve.router")
_PATIENCE_S = 120.0
"""Seconds to wait for a lost server, which its supervisor restarts."""
_POLL_S = 0.2
"""First wait in seconds after no server took a call; it doubles each time."""
_MOST_POLL_S = 2.0
_UNKNOWN = ("unknown model", NOT_HOSTED)
"""Errors of a server that does not run a node, from Triton or from the server's model."""


class CallTries:
    """Counts the tries of one call, and decides whether another server gets it.

    In a round each server is tried once. Another round follows if a server may come back.

    Args:
        kind: node type of the call.
    """

    def __init__(self, kind: NodeType) -> None:
        self._kind = kind
        self.count = 1
        """2 if a server was lost, failed the call, or had to be waited for."""
        self.returning = False
        """True if a server of this round may take the call later."""
        self.broken: set[NodeServer] = set()
        """Servers that failed the call and still answer: they are not tried again."""
        self._end, self._wait_s = time.monotonic() + _PATIENCE_S, _POLL_S
        self._tries = Tries()
        self._failure: Failure | EngineFailed | None = None
        self._misfit = ""
        """Error of a server that has the node in another version."""

    def failed(self, server: NodeServer, failure: Failure) -> None:
        """Note that a server failed the call.

        Raises:
            Failure: no other server would do better.
            EngineFailed: the call may crash its servers.
        """
        if any(words in failure.details for words in _UNKNOWN):
            return
        if OTHER_VERSION in failure.details:
            self._misfit = failure.details
            if failure.details not in server.misfits:
                server.misfits.add(failure.details)
                log.warning("node server %s is left out: %s", server.address, failure.details)
            return
        self.count = 2
        if failure.untaken:
            self.returning = True
        elif failure.coded:
            if failure.blame is not Blame.WORKER:
                raise failure
            self._failure = failure  # a load failed or there is no room on that server
        else:
            self._lost(server, failure)

    def _lost(self, server: NodeServer, failure: Failure) -> None:
        """Note that a server ended a call without a code; raises as `failed`."""
        name = self._kind.name
        log.warning("%s failed a call of %s: %s", server.address, name, failure.details)
        self._failure = EngineFailed(f"{name}: its node server failed the call")
        if not self._tries.goes_on(failure):
            raise self._failure
        if failure.status is Status.UNAVAILABLE:
            self.returning = True  # a server that replaces it may be able to run the call
        else:
            self.broken.add(server)

    async def next_round(self) -> None:
        """Wait for the next round.

        Raises:
            Failure: the last server's.
            EngineFailed: no server runs the node, or none came back in time.
        """
        if not self.returning or time.monotonic() > self._end:
            if self._failure is not None:
                raise self._failure
            if self._misfit:
                raise EngineFailed(split_code(self._misfit)[1])
            capability = "can be reached" if self.returning else f"runs {self._kind.model}"
            raise EngineFailed(f"{self._kind.name}: no node server {capability}")
        self.count, self.returning = 2, False
        await asyncio.sleep(self._wait_s)
        self._wait_s = min(2 * self._wait_s, _MOST_POLL_S)
