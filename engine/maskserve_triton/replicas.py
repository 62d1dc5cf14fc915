"""A model that several Tritons serve.

A request goes to the ready replica with the fewest requests under way; among equals, to the one
that has waited longest for one. If a replica dies or falls silent, its requests go to another at
once: the model is a function of its inputs, so every replica gives the same bytes.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import grpc

from maskserve_common.addresses import DNS, resolved
from maskserve_common.contracts.status_record import State
from maskserve_common.errors import MaskserveError, Overloaded
from maskserve_triton.remote_model import NoAnswer, RemoteModel

log = logging.getLogger("maskserve")

_RETRY_S = 0.1
_PING_EVERY_S = 0.5
_PING_TIMEOUT_S = 2.0
_DEAF_S = 3.0
"""Seconds without an answered ping after which a replica's requests go to another; a busy one
misses a ping at most."""
_RESOLVE_EVERY_S = 5.0
_LOG_EVERY_S = 10.0


class NotServed(Exception):
    """No replica serves the model.

    Args:
        problems: problem of each replica, by address.
    """

    def __init__(self, problems: Mapping[str, str]) -> None:
        super().__init__("; ".join(f"{address} {text}" for address, text in problems.items()))
        self.problems = problems


class _Replica:
    def __init__(self, address: str, name: str) -> None:
        self.address, self.model = address, RemoteModel(address, name)
        self.calls = 0
        """Requests under way."""
        self.turn = 0
        """Number of its last request."""
        self.problem = ""
        """Why it gets no requests; empty: it serves the model."""
        self.is_ready, self.is_lost = True, False
        self.closing = threading.Event()

    @property
    def state(self) -> State:
        return "failed" if self.problem else "loading" if self.is_lost else "ready"

    def close(self) -> None:
        self.closing.set()
        self.model.close()


class Replicas:
    """May be used from any thread.

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
        self._configured, self._name, self._patience_s = addresses, name, patience_s
        self._problem_of, self._publish = problem_of, publish
        self._replicas: list[_Replica] = []
        self._turn = 0
        self._is_watching = False
        self._threads: list[threading.Thread] = []
        self._closing = threading.Event()
        self._lock = threading.RLock()
        self._resolve()
        if any(address.startswith(DNS) for address in addresses):
            self._start(self._follow)

    def watch(self) -> None:
        """Start to ping the replicas."""
        with self._lock:
            self._is_watching = True
            for replica in self._replicas:
                self._start(self._watch, replica)

    def close(self) -> None:
        """Close the connections; calls under way end with an error."""
        self._closing.set()
        with self._lock:
            for replica in self._replicas:
                replica.close()
            threads = list(self._threads)
        for thread in threads:
            thread.join()

    def call(self, request: Any, limit_s: float, *, patiently: bool = False) -> Any:
        """Return the response of a replica. Blocks.

        Args:
            request: a `ModelInferRequest`.
            limit_s: most seconds at one replica.
            patiently: whether to go on without limit while no replica answers.

        Raises:
            MaskserveError: the model's error.
            NoAnswer: no replica answers any more.
            NotServed: all replicas serve another model.
        """
        tried: set[_Replica] = set()
        failure = NoAnswer(grpc.StatusCode.UNAVAILABLE, "the name has no addresses")
        begin, warned_at_s = 0.0, -_LOG_EVERY_S
        while not self._closing.is_set():
            replica = self._take(tried)
            if replica is None:  # each has been tried
                now_s = time.monotonic()
                begin = begin or now_s
                self._check_served()
                if not patiently and (self._are_lost() or now_s - begin > self._patience_s):
                    raise failure
                if patiently and now_s - warned_at_s > _LOG_EVERY_S:
                    warned_at_s = now_s
                    where = ", ".join(self._configured)
                    log.warning("waiting for the %s at %s: %s", self._name, where, failure)
                tried.clear()
                self._closing.wait(_RETRY_S)
                continue
            try:
                answer = replica.model.call(request, limit_s)
                replica.is_ready = True
                return answer
            except NoAnswer as error:
                if error.code is grpc.StatusCode.DEADLINE_EXCEEDED and not patiently:
                    raise
                failure, replica.is_ready = error, False
                if error.has_no_model:
                    self._refuse(replica, f"has no {self._name} ({error.details})")
            except MaskserveError as error:
                if not (problem := self._problem_of(error)):
                    raise
                self._refuse(replica, problem)
            finally:
                with self._lock:
                    replica.calls -= 1
        raise Overloaded("the worker is stopping")

    def _take(self, tried: set[_Replica]) -> _Replica | None:
        """Return a replica for a request, now under way there; None: each has been tried."""
        with self._lock:
            untried = [r for r in self._replicas if r not in tried and not r.problem]
            if not untried:
                return None
            replica = min(untried, key=lambda r: (not r.is_ready, r.calls, r.turn))
            self._turn += 1
            replica.turn = self._turn
            replica.calls += 1
        tried.add(replica)
        return replica

    def _check_served(self) -> None:
        """Raises NotServed: all replicas serve another model."""
        with self._lock:
            problems = {r.address: r.problem for r in self._replicas if r.problem}
            if problems and len(problems) == len(self._replicas):
                raise NotServed(problems)

    def _are_lost(self) -> bool:
        with self._lock:
            return all(replica.state != "ready" for replica in self._replicas)

    def _refuse(self, replica: _Replica, problem: str) -> None:
        """Send a replica no more requests until it has been away."""
        log.error("%s %s; it gets no requests", replica.address, problem)
        with self._lock:
            replica.problem = problem
        self._publish_states()

    def _publish_states(self) -> None:
        with self._lock:
            self._publish({replica.address: replica.state for replica in self._replicas})

    # The threads that watch.

    def _start(self, target: Callable[..., None], *arguments: Any) -> None:
        name = f"{self._name}-replicas"
        thread = threading.Thread(target=target, args=arguments, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _watch(self, replica: _Replica) -> None:
        """Ping a replica until it is closed, so that its outage is noticed without calls, too."""
        last_ready_s, was_ready = time.monotonic(), True
        while not replica.closing.wait(_PING_EVERY_S):
            is_ready = replica.model.is_ready(_PING_TIMEOUT_S)
            if replica.closing.is_set():
                return
            now_s, state = time.monotonic(), replica.state
            if is_ready != was_ready:
                was_ready = is_ready
                text = "is back" if is_ready else "does not answer"
                log.warning("the %s at %s %s", self._name, replica.address, text)
                # One that starts again may serve the model.
                replica.problem = "" if is_ready else replica.problem
            last_ready_s = now_s if is_ready else last_ready_s
            replica.is_ready = is_ready
            if now_s - last_ready_s > _DEAF_S and replica.calls and self._is_any_ready():
                replica.model.reconnect()
            replica.is_lost = now_s - last_ready_s > self._patience_s
            if replica.state != state:
                self._publish_states()

    def _is_any_ready(self) -> bool:
        with self._lock:
            return any(replica.is_ready and not replica.problem for replica in self._replicas)

    def _follow(self) -> None:
        """Resolve the names again and again."""
        while not self._closing.wait(_RESOLVE_EVERY_S):
            self._resolve()

    def _resolve(self) -> None:
        """Connect to new addresses, and leave those that are no more."""
        with self._lock:
            known = {replica.address: replica for replica in self._replicas}
        addresses = resolved(self._configured, known)
        if addresses == tuple(known) and self._replicas:
            return
        with self._lock:
            if self._closing.is_set():
                return
            self._replicas = [known.get(a) or _Replica(a, self._name) for a in addresses]
            if self._is_watching:
                for replica in self._replicas:
                    if replica.address not in known:
                        self._start(self._watch, replica)
            for address, replica in known.items():
                if address not in addresses:
                    replica.close()
        self._publish_states()
