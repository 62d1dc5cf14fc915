"""Resolution of configured names to addresses."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Iterable

log = logging.getLogger("maskserve.router")
DNS = "dns:"


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
