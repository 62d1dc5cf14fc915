"""Pictures that requests name by URL: data URLs, and https URLs of hosts that the operator listed.

Whoever fetches for a client could be made to ask hosts that only it reaches. So nothing is fetched
but from listed hosts, over TLS with their certificate checked, at public addresses, without
following redirects or using proxies, up to the bytes of an image, and within a time.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import ipaddress
import socket
import ssl
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from typing import TypeAlias

import httpx

from maskserve_core.config import LimitsConfig
from maskserve_core.errors import InvalidRequest
from maskserve_router.admission import Admission
from maskserve_router.config import ImageHosts
from maskserve_router.keys import KeyHolder

_MAX_URL = 4096
_ACCEPTED = '{"image_url": "data:image/png;base64,…"}'
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_OF_PROTOCOLS = ipaddress.ip_network("192.0.0.0/24")
"""Part of it counts as global, where a cloud has its metadata."""

Address: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address
Resolve: TypeAlias = Callable[[str, int], Awaitable[list[str]]]


async def resolve(host: str, port: int) -> list[str]:
    """Addresses of a host; OSError if it has none."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(address[0]) for *_, address in found]


def is_public(address: str) -> bool:
    """Whether an address is of the open internet, and any IPv4 address inside of it as well."""
    try:
        ip: Address = ipaddress.ip_address(address)
    except ValueError:  # such as one with a zone, which is of this network
        return False
    inner: list[Address | None] = [ip]
    if isinstance(ip, ipaddress.IPv6Address):
        inner += [ip.ipv4_mapped, ip.sixtofour, *(ip.teredo or ())]
        if ip in _NAT64:
            inner.append(ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF))
    return all(
        each.is_global
        and not each.is_multicast
        and not each.is_reserved
        and each not in _OF_PROTOCOLS
        for each in inner
        if each is not None and (each is not ip or not _is_embedding(ip))
    )


def _is_embedding(ip: Address) -> bool:
    """Whether only the IPv4 address inside of an IPv6 one says where it leads."""
    return isinstance(ip, ipaddress.IPv6Address) and (ip.ipv4_mapped is not None or ip in _NAT64)


class ImageUrls:
    """Reads the pictures of one router's requests.

    Args:
        hosts: which hosts may be asked.
        limits: bounds on an image.
        admission: counts what was fetched among the bytes under way.
        resolver: addresses of a host and port.
        public: whether an address may be asked.
        trusted: certificates; by default those of certifi.
    """

    def __init__(
        self,
        hosts: ImageHosts,
        limits: LimitsConfig,
        admission: Admission,
        resolver: Resolve = resolve,
        public: Callable[[str], bool] = is_public,
        trusted: ssl.SSLContext | None = None,
    ) -> None:
        self._hosts = frozenset(hosts.hosts)
        self._timeout_s = hosts.timeout_s
        self._most = limits.max_image_bytes
        self._admission = admission
        self._resolver, self._public, self._trusted = resolver, public, trusted

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
            return _from_data(field, url)
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
        verify = self._trusted if self._trusted is not None else True
        async with (
            httpx.AsyncClient(
                verify=verify, trust_env=False, follow_redirects=False, timeout=self._timeout_s
            ) as client,
            client.stream("GET", at, headers=headers, extensions=extensions) as answer,
        ):
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
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise InvalidRequest(field, "is not base64", _ACCEPTED) from None
