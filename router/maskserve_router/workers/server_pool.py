"""A pool of servers, which come and go with the addresses of the configured names."""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Generic, TypeVar

from maskserve_router.dns import Discovery
from maskserve_router.workers.upstream import Upstream

log = logging.getLogger("maskserve.router")


@dataclass(slots=True, eq=False)
class Server:
    """A Triton of a pool, identified by its address.

    If an address is removed and comes back, the pool has a new server for it.
    """

    kind: ClassVar[str]
    """Word for logs."""
    address: str
    upstream: Upstream = field(init=False)

    def __post_init__(self) -> None:
        self.upstream = Upstream(self.address)


S = TypeVar("S", bound=Server)


class ServerPool(ABC, Generic[S]):
    """Holds a server for each address. Use it from the event loop only.

    Args:
        addresses: addresses as configured.
        resolve_s: seconds between two resolutions of names.
    """

    def __init__(self, addresses: Iterable[str], resolve_s: float) -> None:
        self.servers: dict[str, S] = {}
        self._discovery = Discovery(addresses, resolve_s, self._addresses_changed)
        self._retiring: set[asyncio.Task[None]] = set()

    @abstractmethod
    def _add_server(self, address: str) -> S:
        """Return the server of a new address."""

    @abstractmethod
    async def _finish(self, server: S) -> None:
        """Wait until the calls of a removed server have ended."""

    async def close(self) -> None:
        """Close all connections. Calls under way end."""
        await self._discovery.close()
        for task in self._retiring:
            task.cancel()
        await asyncio.gather(*self._retiring, return_exceptions=True)
        for server in self.servers.values():
            await server.upstream.close()

    def _addresses_changed(self, new: Sequence[str], removed: Sequence[str]) -> None:
        for address in new:
            server = self.servers[address] = self._add_server(address)
            log.info("%s %s was added", server.kind, address)
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
            await server.upstream.close()
