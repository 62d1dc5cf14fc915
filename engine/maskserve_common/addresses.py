"""Addresses of servers as configuration names them: HOST:PORT, or dns:NAME:PORT, which stands for
every address of a name.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Collection, Iterator, Sequence

log = logging.getLogger("maskserve")
DNS = "dns:"


def is_address(text: str) -> bool:
    """Return True if the text is `host:port` or `dns:name:port`."""
    host, _, port = text.removeprefix(DNS).rpartition(":")
    return bool(host) and port.isdigit() and 0 < int(port) < 65536


def resolved(addresses: Sequence[str], known: Collection[str]) -> tuple[str, ...]:
    """Return `host:port` of each address, once; `dns:name:port` becomes every address of the name.
    Blocks while names are resolved.

    Args:
        addresses: addresses as configured.
        known: addresses found before; they stay if a name cannot be resolved.
    """
    plain = [address for address in addresses if not address.startswith(DNS)]
    names = [address.removeprefix(DNS) for address in addresses if address.startswith(DNS)]
    of_names = {address for name in names for address in _of_name(name, known)}
    return (*dict.fromkeys(plain), *sorted(of_names.difference(plain)))


def _of_name(name: str, known: Collection[str]) -> Iterator[str]:
    host, _, port = name.rpartition(":")
    try:
        address_infos = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
    except OSError as error:
        log.warning("name %s: %s; its known addresses stay in use", host, error)
        yield from (address for address in known if address.endswith(f":{port}"))
        return
    for info in address_infos:
        ip = str(info[4][0])
        yield f"[{ip}]:{port}" if ":" in ip else f"{ip}:{port}"
