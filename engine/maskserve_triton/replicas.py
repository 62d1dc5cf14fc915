"""A model that several Tritons serve.

A request goes to the replica that answers and has the fewest requests under way; among equals, to
the one that has waited longest for one. If a replica dies or falls silent, its requests go to
another at once: the model is a function of its inputs, so every replica gives the same bytes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import grpc
from tritonclient.grpc import service_pb2 as pb

from maskserve_common.contracts.status_record import State
from maskserve_common.errors import EngineFailed, Overloaded
from maskserve_common.files.stages import NO_ANSWER
from maskserve_common.servers.call_tries import CallTries
from maskserve_common.servers.failure import Failure
from maskserve_common.servers.pool import Server, ServerPool
from maskserve_triton.stage_requests import OTHER_STAGES

_POLL_S = 0.5
_POLL_TIMEOUT_S = 2.0
_RESOLVE_S = 5.0
_NO_MODEL = (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.UNIMPLEMENTED)
"""Status codes of a server that has no such model."""


@dataclass(slots=True, eq=False)
class StageReplica(Server):
    """A Triton that serves the model."""

    kind = "stage replica"
    up: bool = field(init=False, default=True)
    """False once a call or polls have failed, until a poll is answered."""
    turn: int = 0
    """Number of its last request."""


class Replicas(ServerPool[StageReplica]):
    """Use it from one event loop only.

    Args:
        addresses: `host:port` or `dns:name:port` of the replicas.
        name: name of the model.
        patience_s: seconds of silence after which a replica is lost.
        publish: receives the state of each replica, by address, whenever one changes.
    """

    _lost_misses = 2  # a busy one misses one at most

    def __init__(
        self,
        addresses: Sequence[str],
        name: str,
        patience_s: float,
        publish: Callable[[Mapping[str, State]], None],
    ) -> None:
        super().__init__(addresses, _RESOLVE_S)
        self._name, self._patience_s, self._publish = name, patience_s, publish
        self._published: Mapping[str, State] | None = None
        self._turn = 0

    async def call(self, request: bytes, limit_s: float) -> bytes:
        """Return the response of a replica.

        Args:
            request: an encoded `ModelInferRequest`.
            limit_s: most seconds at one replica.

        Raises:
            Failure: the model's error.
            Overloaded: no replica answers any more.
            EngineFailed: all serve another model, or the request may end them.
        """
        tries = CallTries(self, self._name, self._patience_s)
        while (replica := await tries.next_server(_rank)) is not None:
            self._turn += 1
            replica.turn = self._turn
            try:
                return await replica.infer(request, limit_s)
            except Failure as failure:
                if why := self._misfit(failure):
                    self.leave_out(replica, self._name, why)
                    self._publish_states()
                    continue
                replica.up &= failure.coded
                tries.record_failure(replica, failure)
        for problem in self.problems().values():
            raise EngineFailed(f"the stage service {problem}")
        if tries.returning or tries.failure is None:
            raise Overloaded(NO_ANSWER)
        raise tries.failure

    def problems(self) -> dict[str, str]:
        """Return why replicas get no requests, by address; empty: some may get requests."""
        servers = self.servers.items()
        problems = {address: text for address, r in servers for text in r.problems.values()}
        return problems if len(problems) == len(servers) else {}

    def _misfit(self, failure: Failure) -> str:
        """Return why a replica that fails in this way does not serve the model; empty: it does."""
        if failure.coded:
            return OTHER_STAGES if OTHER_STAGES in failure.details else ""
        return f"has no {self._name} ({failure.details})" if failure.status in _NO_MODEL else ""

    def _states(self) -> dict[str, State]:
        return {address: self._state(replica) for address, replica in self.servers.items()}

    def _state(self, replica: StageReplica) -> State:
        if replica.problems:
            return "failed"
        silent_s = time.monotonic() - replica.answered_at
        return "ready" if silent_s <= self._patience_s else "loading"

    def _publish_states(self) -> None:
        if (states := self._states()) != self._published:
            self._published = states
            self._publish(states)

    # The pool.

    def _add_server(self, address: str) -> StageReplica:
        return StageReplica(address)

    async def _finish(self, replica: StageReplica) -> None:
        replica.end_calls()

    def _addresses_changed(self, new: Sequence[str], removed: Sequence[str]) -> None:
        super()._addresses_changed(new, removed)
        self._publish_states()

    def _interval_s(self, replica: StageReplica) -> float:
        return _POLL_S

    def _most_misses(self) -> int:
        return self._lost_misses

    async def poll(self, replica: StageReplica) -> None:
        await super().poll(replica)
        self._publish_states()

    async def _ask(self, replica: StageReplica) -> str:
        request = pb.ModelReadyRequest(name=self._name).SerializeToString()
        answer = await replica.upstream.call("ModelReady", request, _POLL_TIMEOUT_S)
        if not pb.ModelReadyResponse.FromString(answer).ready:
            replica.misses += 1
            return f"its {self._name} is not ready"
        replica.record_poll()
        return ""


def _rank(replica: StageReplica) -> tuple[bool, int, int]:
    """Rank replicas by their requests under way, those that do not answer last."""
    return not replica.up, len(replica.calls), replica.turn
