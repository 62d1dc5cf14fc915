"""Pictures that requests name by URL: data URLs, and https URLs of hosts that the operator listed.

Whoever fetches for a client could be made to ask hosts that only it reaches. So nothing is fetched
but from listed hosts, over TLS with their certificate checked, at public addresses, without
following redirects or using proxies, up to the bytes of an image, and within a time.
"""

from __future__ import annotations

import asyncio
import binascii
import ipaddress
import socket
import ssl
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from typing import TypeAlias

import httpx
import pybase64

from maskserve_core.config import LimitsConfig
from maskserve_core.errors import InvalidRequest
from maskserve_router.admission import Admission
from maskserve_router.config import ImageHosts
from maskserve_router.keys import KeyHolder
from maskserve_router.turns import Turns

_MAX_URL = 4096
_ACCEPTED = '{"image_url": "data:image/png;base64,…"}'
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_UNICAST = ipaddress.ip_network("2000::/3")
"""All of IPv6 that is given out to hosts of the internet."""
_SPECIAL = [
    ipaddress.ip_network(network)
    for network in (
        # IANA's registry of special-purpose IPv4 addresses, and multicast.
        *("0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16"),
        *("172.16.0.0/12", "192.0.0.0/24", "192.0.2.0/24", "192.31.196.0/24", "192.52.193.0/24"),
        *("192.88.99.0/24", "192.168.0.0/16", "192.175.48.0/24", "198.18.0.0/15"),
        *("198.51.100.0/24", "203.0.113.0/24", "224.0.0.0/4", "240.0.0.0/4"),
        # Of that for IPv6, what lies in 2000::/3: protocols (Teredo, ORCHID, …), documentation,
        # 6to4, AS112.
        *("2001::/23", "2001:db8::/32", "2002::/16", "2620:4f:8000::/48", "3fff::/20"),
    )
]

Address: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address
Resolve: TypeAlias = Callable[[str, int], Awaitable[list[str]]]


_LOOK_UPS = ThreadPoolExecutor(4, "look-up")
"""Names that clients give are looked up apart from those of workers, however long that takes."""


async def resolve(host: str, port: int) -> list[str]:
    """Addresses of a host; OSError if it has none."""
    found = await asyncio.get_running_loop().run_in_executor(
        _LOOK_UPS, partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
    )
    return [str(address[0]) for *_, address in found]


def is_public(address: str) -> bool:
    """Whether an address is of the open internet: none that a registry of IANA sets aside. Of an
    IPv6 address that stands for an IPv4 one, that one is asked about.
    """
    try:
        ip: Address = ipaddress.ip_address(address)
    except ValueError:  # such as one with a zone, which is of this network
        return False
    if isinstance(ip, ipaddress.IPv6Address):
        inner = ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF) if ip in _NAT64 else ip.ipv4_mapped
        if inner is None and ip not in _UNICAST:
            return False
        ip = inner or ip
    return not any(ip in network for network in _SPECIAL)


class ImageUrls:
    """Reads the pictures of one router's requests.

    Args:
        hosts: which hosts may be asked.
        limits: bounds on an image.
        admission: counts what was fetched among the bytes under way.
        turns: decodes data URLs.
        resolver: addresses of a host and port.
        public: whether an address may be asked.
        trusted: certificates; by default those of certifi.
    """

    def __init__(
        self,
        hosts: ImageHosts,
        limits: LimitsConfig,
        admission: Admission,
        turns: Turns,
        resolver: Resolve = resolve,
        public: Callable[[str], bool] = is_public,
        trusted: ssl.SSLContext | None = None,
    ) -> None:
        self._hosts = frozenset(hosts.hosts)
        self._timeout_s = hosts.timeout_s
        self._most = limits.max_image_bytes
        self._admission, self._turns = admission, turns
        self._resolver, self._public = resolver, public
        # Made once: to read all certificates that are trusted takes as long as fifty requests. No
        # connection is kept, since the next host at its address may be another.
        self._client = httpx.AsyncClient(
            verify=(trusted or httpx.create_ssl_context()) if self._hosts else False,
            trust_env=False,
            follow_redirects=False,
            timeout=self._timeout_s,
            limits=httpx.Limits(max_keepalive_connections=0),
        )

    async def close(self) -> None:
        await self._client.aclose()

    async def read(self, field: str, url: str, holder: KeyHolder, held: ExitStack) -> bytes:
        """The picture's bytes.

        Args:
            field: of the request, for errors.
            url: a data URL, or one of a listed host.
            holder: of the key; its share of the bytes under way is used.
            held: holds what was fetched among the bytes under way.

        Raises:
            InvalidRequest: naming the field.
            RetryLater: too many bytes are under way.
        """
        if url[:5].lower() == "data:":
            return await self._turns.run(holder, len(url), _from_data, field, url)
        host, port, asked = self._allowed(field, url)
        try:
            return await asyncio.wait_for(
                self._fetched(field, host, port, asked, holder, held), self._timeout_s
            )
        except (TimeoutError, asyncio.TimeoutError):
            raise InvalidRequest(
                field, f"did not come within {self._timeout_s:g} s", _ACCEPTED
            ) from None
        except (httpx.HTTPError, httpx.InvalidURL, OSError, UnicodeError):
            # Why not is the network's affair, and not the client's to learn.
            raise InvalidRequest(field, f"could not be fetched from {host}", _ACCEPTED) from None

    def _allowed(self, field: str, url: str) -> tuple[str, int, httpx.URL]:
        """Host, port and URL of what may be fetched."""
        if not self._hosts:
            raise InvalidRequest(field, "is not a data URL; none is fetched", _ACCEPTED)
        accepted = f"data URLs, https URLs of {', '.join(sorted(self._hosts))}"
        try:
            asked = httpx.URL(url[: _MAX_URL + 1])
            host, port = asked.host.lower(), asked.port or 443
        except (httpx.InvalidURL, ValueError, UnicodeError):
            raise InvalidRequest(field, "is no URL", accepted) from None
        if len(url) > _MAX_URL:
            raise InvalidRequest(field, f"has over {_MAX_URL} characters", accepted)
        if asked.scheme != "https":
            raise InvalidRequest(field, "is no https URL", accepted)
        if asked.userinfo:
            raise InvalidRequest(field, "has a user or password", accepted)
        name = host if port == 443 else f"{host}:{port}"
        if name not in self._hosts:
            raise InvalidRequest(field, "is of a host that is not listed", accepted)
        return host, port, asked

    async def _fetched(
        self,
        field: str,
        host: str,
        port: int,
        url: httpx.URL,
        holder: KeyHolder,
        held: ExitStack,
    ) -> bytes:
        addresses = await self._resolver(host, port)
        if not addresses or not all(map(self._public, addresses)):
            raise OSError("not a public address")
        # The address that was checked is the one that is asked: a name may change between two
        # look-ups. Certificate and Host are the name's.
        at = url.copy_with(host=addresses[0], fragment=None)
        headers = {"Host": url.netloc.decode(), "Accept": "image/*", "Accept-Encoding": "identity"}
        extensions = {"sni_hostname": host}
        ask = self._client.stream("GET", at, headers=headers, extensions=extensions)
        async with ask as answer:
            if answer.status_code != 200:
                raise InvalidRequest(
                    field, f"is answered with status {answer.status_code}", "one answered with 200"
                )
            parts: list[bytes] = []
            size = 0
            async for part in answer.aiter_raw():
                size += len(part)
                if size > self._most:
                    raise InvalidRequest(field, f"is over {self._most} bytes", f"to {self._most}")
                held.enter_context(self._admission.hold(holder, len(part)))
                parts.append(part)
        return b"".join(parts)


def _from_data(field: str, url: str) -> bytes:
    head, comma, text = url.partition(",")
    if not (head.endswith(";base64") and comma):
        raise InvalidRequest(field, "is a data URL of another form", _ACCEPTED)
    try:
        return pybase64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise InvalidRequest(field, "is not base64", _ACCEPTED) from None
