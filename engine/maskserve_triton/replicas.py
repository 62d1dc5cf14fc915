"""A model that several Tritons serve.

A request goes to the replica that answers and has the fewest requests under way; among equals, to
the one that has waited longest for one. If a replica dies or falls silent, its requests go to
another at once: the model is a function of its inputs, so every replica gives the same bytes.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import grpc
from tritonclient.grpc import service_pb2 as pb

from maskserve_common.contracts.status_record import State
from maskserve_common.errors import EngineFailed, MaskserveError
from maskserve_common.servers.failure import Failure, Tries
from maskserve_common.servers.pool import Server, ServerPool
from maskserve_triton.tensor_io import relayed

log = logging.getLogger("maskserve")

_RETRY_S = 0.1
_POLL_S = 0.5
_POLL_TIMEOUT_S = 2.0
_MISSES = 2
"""Polls in a row after which a replica's requests go to another; a busy one misses one at most."""
_RESOLVE_S = 5.0
_LOG_S = 10.0
_NO_MODEL = (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.UNIMPLEMENTED)
"""Status codes of a server that has no such model."""


class NotServed(Exception):
    """No replica serves the model.

    Args:
        problems: problem of each replica, by address.
    """

    def __init__(self, problems: Mapping[str, str]) -> None:
        super().__init__("; ".join(f"{address} {text}" for address, text in problems.items()))
        self.problems = problems


@dataclass(slots=True, eq=False)
class StageReplica(Server):
    """A Triton that serves the model."""

    kind = "stage replica"
    up: bool = field(init=False, default=True)
    """False once a call or polls have failed, until a poll is answered."""
    turn: int = 0
    """Number of its last request."""
    problem: str = ""
    """Why it gets no requests; empty: it serves the model."""
    answered_at: float = field(default_factory=time.monotonic)
    """Time of the last answered poll."""


class Replicas(ServerPool[StageReplica]):
    """Use it from one event loop only.

    Args:
        addresses: `host:port` or `dns:name:port` of the replicas.
        name: name of the model.
        patience_s: seconds of silence after which a replica is lost.
        problem_of: returns why a replica that answers with this error is no replica of the model;
            empty: it is one.
        publish: receives the state of each replica, by address, whenever one changes.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        name: str,
        patience_s: float,
        problem_of: Callable[[MaskserveError], str],
        publish: Callable[[Mapping[str, State]], None],
    ) -> None:
        super().__init__(addresses, _RESOLVE_S)
        self._configured, self._name, self._patience_s = addresses, name, patience_s
        self._problem_of, self._publish = problem_of, publish
        self._published: Mapping[str, State] | None = None
        self._turn = 0

    async def call(self, request: bytes, limit_s: float, *, patiently: bool = False) -> bytes:
        """Return the response of a replica.

        Args:
            request: an encoded `ModelInferRequest`.
            limit_s: most seconds at one replica.
            patiently: whether to go on without limit while no replica answers.

        Raises:
            MaskserveError: the model's error, or EngineFailed: the request may end its servers.
            Failure: no replica answers any more.
            NotServed: all replicas serve another model.
        """
        tried, tries = set[StageReplica](), Tries()
        failure = Failure(grpc.StatusCode.UNAVAILABLE, "the name has no addresses")
        begin, warned_at_s = 0.0, -_LOG_S
        while True:
            replica = self._next(tried)
            if replica is None:  # each has been tried
                now_s = time.monotonic()
                begin = begin or now_s
                self._check_served()
                is_lost = "ready" not in self._states().values()
                if not patiently and (is_lost or now_s - begin > self._patience_s):
                    raise failure
                if patiently and now_s - warned_at_s > _LOG_S:
                    warned_at_s = now_s
                    where = ", ".join(self._configured)
                    log.warning("waiting for the %s at %s: %s", self._name, where, failure)
                tried.clear()
                await asyncio.sleep(_RETRY_S)
                continue
            tried.add(replica)
            try:
                return await replica.infer(request, limit_s)
            except Failure as error:
                if error.coded:
                    model_error = relayed(error.details, "")
                    if not (problem := self._problem_of(model_error)):
                        raise model_error from None
                    self._refuse(replica, problem)
                    continue
                failure, replica.up = error, False
                if error.status in _NO_MODEL:
                    self._refuse(replica, f"has no {self._name} ({error.details})")
                elif not (tries.goes_on(error) or patiently):
                    log.warning("%s failed a request: %s", replica.address, error.details)
                    raise EngineFailed(f"the service of the {self._name} failed") from None

    def _next(self, tried: set[StageReplica]) -> StageReplica | None:
        """Return the replica that gets a request next; None: each has been tried."""
        untried = [r for r in self.servers.values() if r not in tried and not r.problem]
        if not untried:
            return None
        replica = min(untried, key=lambda r: (not r.up, len(r.calls), r.turn))
        self._turn += 1
        replica.turn = self._turn
        return replica

    def _check_served(self) -> None:
        """Raises NotServed: all replicas serve another model."""
        problems = {r.address: r.problem for r in self.servers.values() if r.problem}
        if problems and len(problems) == len(self.servers):
            raise NotServed(problems)

    def _refuse(self, replica: StageReplica, problem: str) -> None:
        """Send a replica no more requests until it has been away."""
        log.error("%s %s; it gets no requests", replica.address, problem)
        replica.problem = problem
        self._publish_states()

    def _states(self) -> dict[str, State]:
        return {address: self._state(replica) for address, replica in self.servers.items()}

    def _state(self, replica: StageReplica) -> State:
        if replica.problem:
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
        return _MISSES

    async def poll(self, replica: StageReplica) -> None:
        await super().poll(replica)
        others_answer = any(r.up and not r.problem for r in self.servers.values())
        if replica.misses >= _MISSES and others_answer:
            replica.end_calls()
        self._publish_states()

    async def _ask(self, replica: StageReplica) -> str:
        request = pb.ModelReadyRequest(name=self._name).SerializeToString()
        answer = await replica.upstream.call("ModelReady", request, _POLL_TIMEOUT_S)
        if not pb.ModelReadyResponse.FromString(answer).ready:
            replica.misses += 1
            return f"its {self._name} is not ready"
        if replica.misses:  # one that starts again may serve the model
            replica.problem = ""
        replica.up, replica.misses, replica.answered_at = True, 0, time.monotonic()
        return ""
