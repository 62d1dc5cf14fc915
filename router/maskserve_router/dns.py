"""Resolution of configured names to addresses."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable, Sequence

log = logging.getLogger("maskserve.router")
DNS = "dns:"


class Discovery:
    """Follows the addresses of configured servers. Use it from the event loop only.

    Args:
        configured: addresses as configured.
        interval_s: seconds between two resolutions.
        changed: called after each resolution, with the addresses that are new and removed.
    """

    def __init__(
        self,
        configured: Iterable[str],
        interval_s: float,
        changed: Callable[[Sequence[str], Sequence[str]], None],
    ) -> None:
        self._configured, self._interval_s, self._changed = tuple(configured), interval_s, changed
        self._known: tuple[str, ...] = ()
        self._first = asyncio.Event()
        self._following: asyncio.Task[None] | None = None

    async def ready(self) -> None:
        """Start to follow the names, once, and wait for their first resolution."""
        if self._following is None:
            self._following = asyncio.create_task(self._follow())
        await self._first.wait()

    async def reload(self, configured: Iterable[str], interval_s: float) -> None:
        """Follow other names from now on."""
        self._configured, self._interval_s = tuple(configured), interval_s
        await self._resolve()

    async def close(self) -> None:
        if self._following is not None:
            self._following.cancel()
            await asyncio.gather(self._following, return_exceptions=True)

    async def _follow(self) -> None:
        while True:
            try:
                await self._resolve()
            except Exception:
                log.exception("resolving the names of servers")
            self._first.set()
            await asyncio.sleep(self._interval_s)

    async def _resolve(self) -> None:
        configured = self._configured
        addresses = await resolved(configured, self._known)
        if configured is not self._configured:  # a reload has resolved the new names
            return
        known, self._known = (
            self._known,
            (
                *(address for address in configured if address in addresses),
                *sorted(addresses.difference(configured)),
            ),
        )
        self._changed(
            [address for address in self._known if address not in known],
            [address for address in known if address not in addresses],
        )


async def resolved(addresses: Iterable[str], known: Collection[str]) -> set[str]:
    """Return `host:port` of each address; `dns:name:port` becomes every address of the name.

    Args:
        addresses: addresses as configured.
        known: addresses found before; they stay if a name cannot be resolved.
    """
    resolved_addresses: set[str] = set()
    for address in addresses:
        if address.startswith(DNS):
            resolved_addresses.update(await _of_name(address.removeprefix(DNS), known))
        else:
            resolved_addresses.add(address)
    return resolved_addresses


def is_address(text: str) -> bool:
    """Return True if the text is `host:port` or `dns:name:port`."""
    host, _, port = text.removeprefix(DNS).rpartition(":")
    return bool(host) and port.isdigit() and 0 < int(port) < 65536


async def _of_name(name: str, known: Collection[str]) -> Iterable[str]:
    host, _, port = name.rpartition(":")
    try:
        address_infos = await asyncio.get_running_loop().getaddrinfo(host, int(port), type=1)
    except OSError as error:
        log.warning("name %s: %s; its known addresses stay in use", host, error)
        return [address for address in known if address.endswith(f":{port}")]
    hosts = {str(entry[4][0]) for entry in address_infos}
    return [f"[{h}]:{port}" if ":" in h else f"{h}:{port}" for h in hosts]
