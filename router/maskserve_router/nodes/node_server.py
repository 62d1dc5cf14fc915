"""One node server as the router sees it: its record, and the work sent to it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc

from maskserve_router.messages.failures import Failure
from maskserve_router.nodes.node_messages import record_of, record_request
from maskserve_router.workers.server_pool import Server
from maskserve_router.workers.upstream import failures

CALL_S = 120.0
"""Most seconds of a call."""
_STATUS_S = 5.0


@dataclass(slots=True, eq=False)
class NodeServer(Server):
    """A Triton that runs the workflow nodes other than edits."""

    kind = "node server"
    load_s: float = 0.0
    """Seconds of work sent and not yet answered."""
    host: str | None = None
    """Name of its host, whose values folder it shares; empty: it shares none; None: unknown, as no
    record came since its last failure."""
    silent: bool = False
    """True from a record that did not come in time until the next one that comes."""
    misfits: set[str] = field(default_factory=set)
    """Errors about nodes that it has in another version, each logged once."""

    async def record(self, settings: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return its record (`NodeModels.record`); None: it does not answer.

        Args:
            settings: settings of the request, such as `PLACED`.
        """
        begin = time.monotonic()
        try:
            with failures():
                answer = await self.upstream.infer(record_request(settings), _STATUS_S)
            record = record_of(answer)
        except (Failure, ValueError) as error:
            late = isinstance(error, Failure) and error.status is grpc.StatusCode.DEADLINE_EXCEEDED
            # A connection that is never made may end by a limit of gRPC's own.
            if late or time.monotonic() - begin >= _STATUS_S:
                self.silent = True
            return None
        self.silent = False
        self.host = record.get("values", {}).get("host", "")
        return record

    async def call(self, request: bytes) -> bytes:
        """Return the answer to a call. Raises Failure: the call failed."""
        with failures():
            answer: bytes = await self.upstream.infer(request, CALL_S)
        return answer

    @contextmanager
    def busy(self, seconds: float) -> Iterator[None]:
        """Count a call's predicted seconds as its load for the block."""
        self.load_s += seconds
        try:
            yield
        finally:
            self.load_s -= seconds
