"""A pool of servers, which come and go with the addresses of the configured names."""

from __future__ import annotations

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Generic, TypeVar

import grpc
import grpc.aio

from maskserve_common.servers.discovery import Discovery
from maskserve_common.servers.failure import Blame, Failure
from maskserve_common.servers.upstream import Upstream, failures

log = logging.getLogger("maskserve")


@dataclass(slots=True, eq=False)
class Server:
    """A Triton of a pool, identified by its address.

    If an address is removed and comes back, the pool has a new server for it.
    """

    kind: ClassVar[str]
    """Word for logs."""
    address: str
    upstream: Upstream = field(init=False)
    up: bool = field(init=False, default=False)
    """True while it answers polls."""
    misses: int = field(init=False, default=0)
    """Polls in a row that it has not answered."""
    answered_at: float = field(init=False, default_factory=time.monotonic)
    """Time of the last answered poll."""
    problems: dict[str, str] = field(init=False, default_factory=dict)
    """Why it gets no calls of these names, until it has been away."""
    calls: set[grpc.aio.UnaryUnaryCall[bytes, bytes]] = field(init=False, default_factory=set)
    """Calls of `infer` under way."""

    def __post_init__(self) -> None:
        self.upstream = Upstream(self.address)

    @property
    def polled(self) -> bool:
        """True once it has answered a poll or missed one."""
        return self.up or self.misses > 0

    def record_poll(self) -> None:
        """Note that it is well by its answer to a poll."""
        if self.misses:  # another one may have taken its place
            self.problems.clear()
        self.up, self.misses, self.answered_at = True, 0, time.monotonic()

    async def infer(self, request: bytes, limit_s: float) -> bytes:
        """Return the answer to a request; raises Failure: there is none, or `end_calls` came."""
        call = self.upstream.infer(request, limit_s)
        self.calls.add(call)
        try:
            with failures():
                answer: bytes = await call
            return answer
        except Failure as failure:
            if failure.blame is Blame.CLIENT and not failure.coded:  # `limit_s` is no client's
                raise replace(failure, status=grpc.StatusCode.UNKNOWN) from None
            raise
        except asyncio.CancelledError:
            if call in self.calls:  # the caller was cancelled, not the call
                raise
            raise Failure(grpc.StatusCode.UNAVAILABLE, "it answers no more") from None
        finally:
            self.calls.discard(call)

    def end_calls(self) -> None:
        """End the calls of `infer` that are under way."""
        calls, self.calls = self.calls, set()
        for call in calls:
            call.cancel()


S = TypeVar("S", bound=Server)


class ServerPool(ABC, Generic[S]):
    """Holds a server for each address, and polls it; ends the calls of `Server.infer` at one that
    misses several polls while another answers. Use it from the event loop only.

    Args:
        addresses: addresses as configured.
        resolve_s: seconds between two resolutions of names.
    """

    _lost_misses: ClassVar = 3
    """Misses in a row after which a server's calls go to another."""

    def __init__(self, addresses: Iterable[str], resolve_s: float) -> None:
        self.servers: dict[str, S] = {}
        self._discovery = Discovery(addresses, resolve_s, self._addresses_changed)
        self._polls: dict[S, asyncio.Task[None]] = {}
        """Server -> polling task. A removed server stays until its calls end, even if its address
        is already a new server's."""
        self._polled = asyncio.Event()
        """Wakes those that wait for a poll; never set for longer."""
        self._retiring: set[asyncio.Task[None]] = set()

    @property
    def known(self) -> bool:
        """True if the configuration names servers."""
        return self._discovery.has_names

    def silent_s(self) -> float:
        """Return the seconds for which no server has answered; 0 without servers."""
        now_s = time.monotonic()
        return min((now_s - server.answered_at for server in self.servers.values()), default=0.0)

    def able(self, name: str) -> list[S]:
        """Return the servers that get calls of a name."""
        return [server for server in self.servers.values() if name not in server.problems]

    def leave_out(self, server: S, name: str, why: str) -> None:
        """Send a server no calls of a name until it has been away."""
        if name not in server.problems:
            log.warning("%s %s is left out: %s", server.kind, server.address, why)
        server.problems[name] = why

    @abstractmethod
    def _add_server(self, address: str) -> S:
        """Return the server of a new address."""

    @abstractmethod
    async def _ask(self, server: S) -> str:
        """Ask a server for its record and take it in; return why the server is not well.

        It calls `record_poll` if the server is well.

        Raises:
            Failure: the server does not answer.
            ValueError: it answers with something else.
        """

    @abstractmethod
    def _interval_s(self, server: S) -> float:
        """Return the seconds between two polls of a server."""

    def _most_misses(self) -> int:
        """Return the misses in a row after which a server is down."""
        return 1

    @abstractmethod
    async def _finish(self, server: S) -> None:
        """Wait until the calls of a removed server have ended."""

    async def all_polled(self) -> None:
        """Wait until the names are resolved and each server has been polled."""
        await self._discovery.ready()
        while not all(server.polled for server in self.servers.values()):
            await self._polled.wait()

    async def close(self) -> None:
        """Close all connections. Calls under way end."""
        await self._discovery.close()
        tasks = [*self._polls.values(), *self._retiring]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for server in self.servers.values():
            await server.upstream.close()

    async def poll(self, server: S) -> None:
        """Ask a server for its record now."""
        was_away = server.polled and not server.up
        try:
            why = await self._ask(server)
        except (Failure, ValueError, IndexError) as error:
            server.misses += 1
            why = error.details if isinstance(error, Failure) else str(error)
        finally:
            self._polled.set()
            self._polled.clear()
        if server.misses >= self._most_misses() and server.up:
            self._lose(server, why or "no answer")
        elif was_away and server.up:
            log.info("%s %s answers", server.kind, server.address)
        others_answer = any(x.up and not x.problems for x in self.servers.values())
        if server.misses >= self._lost_misses and others_answer:
            server.end_calls()

    def _lose(self, server: S, why: str) -> None:
        """Mark a server as down."""
        log.warning("%s %s is down: %s", server.kind, server.address, why)
        server.up = False

    async def _keep_polling(self, server: S) -> None:
        while True:
            begin = time.monotonic()
            try:
                await self.poll(server)
            except Exception:
                server.misses += 1
                log.exception("asking %s %s for its record", server.kind, server.address)
            now_s = time.monotonic()
            await asyncio.sleep(max(begin + self._interval_s(server) - now_s, 0.001))

    def _addresses_changed(self, new: Sequence[str], removed: Sequence[str]) -> None:
        for address in new:
            server = self.servers[address] = self._add_server(address)
            log.info("%s %s was added", server.kind, address)
            self._polls[server] = asyncio.create_task(self._keep_polling(server))
        for address in removed:
            server = self.servers.pop(address)
            log.info("%s %s was removed", server.kind, address)
            task = asyncio.create_task(self._retire(server))
            self._retiring.add(task)
            task.add_done_callback(self._retiring.discard)

    async def _retire(self, server: S) -> None:
        """Let a removed server finish its calls, then close its connections."""
        try:
            await self._finish(server)
        finally:
            self._polls.pop(server).cancel()
            await server.upstream.close()
