"""Calls to internet hosts that a client named in a URL.

A client could misuse the router to reach hosts that only the router can reach. It therefore calls
only listed hosts, over TLS with a checked certificate, at public addresses, and without redirects
or proxies.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import ssl
from collections.abc import Awaitable, Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import httpx

from maskserve_common.errors import InvalidRequest

_MAX_URL = 4096
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_UNICAST = ipaddress.ip_network("2000::/3")
"""All IPv6 addresses that are assigned to hosts of the internet."""
_SPECIAL = [
    ipaddress.ip_network(network)
    for network in (
        # IANA's registry of special-purpose IPv4 addresses, and multicast.
        *("0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16"),
        *("172.16.0.0/12", "192.0.0.0/24", "192.0.2.0/24", "192.31.196.0/24", "192.52.193.0/24"),
        *("192.88.99.0/24", "192.168.0.0/16", "192.175.48.0/24", "198.18.0.0/15"),
        *("198.51.100.0/24", "203.0.113.0/24", "224.0.0.0/4", "240.0.0.0/4"),
        # Public by every registry, but a platform's agent on each of its machines (Azure).
        "168.63.129.16/32",
        # From the registry for IPv6, the networks in 2000::/3: protocols (Teredo, ORCHID, …),
        # documentation, 6to4, AS112.
        *("2001::/23", "2001:db8::/32", "2002::/16", "2620:4f:8000::/48", "3fff::/20"),
    )
]

Address: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address
Resolve: TypeAlias = Callable[[str, int], Awaitable[list[str]]]


_LOOK_UPS = ThreadPoolExecutor(4, "look-up")
"""Threads for names that clients give, so that slow ones do not delay those of workers."""


async def resolve(host: str, port: int) -> list[str]:
    """Return the addresses of a host. Raises OSError: it has none."""
    address_infos = await asyncio.get_running_loop().run_in_executor(
        _LOOK_UPS, partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
    )
    return [str(address[0]) for *_, address in address_infos]


def is_public(address: str) -> bool:
    """Return True if an address is on the public internet: no registry of IANA reserves it.

    An IPv6 address that stands for an IPv4 one is judged by that.
    """
    try:
        ip: Address = ipaddress.ip_address(address)
    except ValueError:  # such as one with a zone, which is local
        return False
    if isinstance(ip, ipaddress.IPv6Address):
        inner = ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF) if ip in _NAT64 else ip.ipv4_mapped
        if inner is None and ip not in _UNICAST:
            return False
        ip = inner or ip
    return not any(ip in network for network in _SPECIAL)


@dataclass(frozen=True, slots=True)
class PublicUrl:
    """A URL that may be called."""

    host: str
    port: int
    url: httpx.URL


class PublicHosts:
    """Calls listed hosts.

    Args:
        hosts: hosts that may be called, `name` or `name:port`.
        timeout_s: seconds of each wait for the network.
        resolver: returns the addresses of a host and port.
        public: returns whether an address may be called.
        trusted: trusted certificates; by default those of certifi.
    """

    def __init__(
        self,
        hosts: Collection[str],
        timeout_s: float,
        resolver: Resolve = resolve,
        public: Callable[[str], bool] = is_public,
        trusted: ssl.SSLContext | None = None,
    ) -> None:
        self.hosts = frozenset(hosts)
        self._resolver, self._public = resolver, public
        # Made once, because reading all trusted certificates is slow. Connections are not kept: the
        # next host at the same address may be another.
        self._client = httpx.AsyncClient(
            verify=(trusted or httpx.create_ssl_context()) if self.hosts else False,
            trust_env=False,
            follow_redirects=False,
            timeout=timeout_s,
            limits=httpx.Limits(max_keepalive_connections=0),
        )

    async def close(self) -> None:
        await self._client.aclose()

    def allowed(self, field: str, url: str, also: str = "") -> PublicUrl:
        """Check a URL and return its parts.

        Args:
            field: field of the request, for errors.
            url: URL from the client.
            also: further forms that the field accepts, for errors.

        Raises:
            InvalidRequest: naming the field.
        """
        accepted = f"{also}https URLs of {', '.join(sorted(self.hosts)) or 'no host'}"
        try:
            parsed_url = httpx.URL(url[: _MAX_URL + 1])
            host, port = parsed_url.host.lower(), parsed_url.port or 443
        except (httpx.InvalidURL, ValueError, UnicodeError):
            raise InvalidRequest(field, "is not a URL", accepted) from None
        if len(url) > _MAX_URL:
            raise InvalidRequest(field, f"has over {_MAX_URL} characters", accepted)
        if parsed_url.scheme != "https":
            raise InvalidRequest(field, "is not an https URL", accepted)
        if parsed_url.userinfo:
            raise InvalidRequest(field, "has a user or password", accepted)
        name = host if port == 443 else f"{host}:{port}"
        if name not in self.hosts:
            raise InvalidRequest(field, "is of a host that is not listed", accepted)
        return PublicUrl(host, port, parsed_url)

    async def ask(
        self,
        method: str,
        url: PublicUrl,
        headers: Mapping[str, str],
        content: bytes | None = None,
    ) -> AbstractAsyncContextManager[httpx.Response]:
        """Send a request and return its response to enter; the body is not read yet.

        Raises:
            OSError: the host has no address, or one that is not public.
        """
        addresses = await self._resolver(url.host, url.port)
        if not addresses or not all(map(self._public, addresses)):
            raise OSError("not a public address")
        # Call the address that was checked: the name may resolve differently the next time.
        # Certificate and Host are the name's.
        at = url.url.copy_with(host=addresses[0], fragment=None)
        return self._client.stream(
            method,
            at,
            content=content,
            headers={"Host": url.url.netloc.decode(), **headers},
            extensions={"sni_hostname": url.host},
        )
