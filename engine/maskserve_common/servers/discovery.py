"""Servers whose addresses follow from configured names."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence

from maskserve_common.addresses import resolved

log = logging.getLogger("maskserve")


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

    @property
    def has_names(self) -> bool:
        return bool(self._configured)

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
        addresses = await asyncio.to_thread(resolved, configured, self._known)
        if configured is not self._configured:  # a reload has resolved the new names
            return
        known, self._known = self._known, addresses
        self._changed(
            [address for address in addresses if address not in known],
            [address for address in known if address not in addresses],
        )
