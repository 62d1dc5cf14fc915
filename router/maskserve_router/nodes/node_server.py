"""One node server as the router sees it: its record, and the work sent to it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from maskserve_common.servers.pool import Server
from maskserve_common.servers.upstream import failures
from maskserve_router.nodes.node_messages import record_of, record_request

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
    record: dict[str, Any] | None = None
    """Its last record (`NodeModels.record`)."""

    async def ask(self, settings: Mapping[str, Any]) -> None:
        """Take in its record.

        Args:
            settings: settings of the request, such as `PLACED`.

        Raises:
            Failure: it does not answer.
            ValueError: it answers with something else.
        """
        with failures():
            answer = await self.upstream.infer(record_request(settings), _STATUS_S)
        self.take_record(record_of(answer))

    def revision(self, model: str) -> str:
        """Return the revision of a model by the last record; empty: it is not known."""
        models = self.record["models"] if self.record else ()
        return next((str(x.get("revision", "")) for x in models if x["name"] == model), "")

    def take_record(self, record: dict[str, Any]) -> None:
        """Take in a record."""
        self.record_poll()
        self.record = record
        self.host = record.get("values", {}).get("host", "")

    @contextmanager
    def busy(self, seconds: float) -> Iterator[None]:
        """Count a call's predicted seconds as its load for the block."""
        self.load_s += seconds
        try:
            yield
        finally:
            self.load_s -= seconds


def runs(model: str, record: Mapping[str, Any] | None) -> bool:
    """Return whether a server's record lists a model; None: it does not answer."""
    return record is not None and any(entry["name"] == model for entry in record["models"])
