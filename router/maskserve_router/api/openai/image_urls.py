"""Pictures given by URL: data URLs, and https URLs of hosts that the operator listed.

They are fetched by the rules of `public_hosts`, within limits on bytes and time.
"""

from __future__ import annotations

import asyncio
import binascii
import ssl
from collections.abc import Callable
from contextlib import ExitStack

import httpx
import pybase64

from maskserve_common.config import LimitsConfig
from maskserve_common.errors import InvalidRequest
from maskserve_router.api.public_hosts import PublicHosts, PublicUrl, Resolve, is_public, resolve
from maskserve_router.config import ImageHosts
from maskserve_router.fair_share import FairShare
from maskserve_router.key_holder import KeyHolder
from maskserve_router.scheduling.admission import Admission

_ACCEPTED = '{"image_url": "data:image/png;base64,…"}'


class ImageUrls:
    """Reads the pictures of one router's requests.

    Args:
        hosts: hosts that may be called.
        limits: limits on an image.
        admission: counts fetched bytes as bytes under way.
        fair_share: threads that decode data URLs.
        resolver: returns the addresses of a host and port.
        public: returns whether an address may be called.
        trusted: trusted certificates; by default those of certifi.
    """

    def __init__(
        self,
        hosts: ImageHosts,
        limits: LimitsConfig,
        admission: Admission,
        fair_share: FairShare,
        resolver: Resolve = resolve,
        public: Callable[[str], bool] = is_public,
        trusted: ssl.SSLContext | None = None,
    ) -> None:
        self._hosts = PublicHosts(hosts.hosts, hosts.timeout_s, resolver, public, trusted)
        self._timeout_s = hosts.timeout_s
        self._most = limits.max_image_bytes
        self._admission, self._fair_share = admission, fair_share

    async def close(self) -> None:
        await self._hosts.close()

    async def read(self, field: str, url: str, holder: KeyHolder, resources: ExitStack) -> bytes:
        """Return the picture's bytes.

        Args:
            field: field of the request, for errors.
            url: a data URL, or one of a listed host.
            holder: holder of the key whose share of bytes is used.
            resources: counts the fetched bytes until it is closed.

        Raises:
            InvalidRequest: naming the field.
            RetryLater: too many bytes are under way.
        """
        if url[:5].lower() == "data:":
            return await self._fair_share.run(holder, len(url), _from_data, field, url)
        if not self._hosts.hosts:
            raise InvalidRequest(field, "is not a data URL; none is fetched", _ACCEPTED)
        target = self._hosts.allowed(field, url, "data URLs, ")
        try:
            return await asyncio.wait_for(
                self._fetched(field, target, holder, resources), self._timeout_s
            )
        except (TimeoutError, asyncio.TimeoutError):
            raise InvalidRequest(
                field, f"was not fetched within {self._timeout_s:g} s", _ACCEPTED
            ) from None
        except (httpx.HTTPError, httpx.InvalidURL, OSError, UnicodeError):
            # The reason could tell the client about the router's network, so it is left out.
            raise InvalidRequest(
                field, f"could not be fetched from {target.host}", _ACCEPTED
            ) from None

    async def _fetched(
        self, field: str, url: PublicUrl, holder: KeyHolder, resources: ExitStack
    ) -> bytes:
        headers = {"Accept": "image/*", "Accept-Encoding": "identity"}
        async with await self._hosts.ask("GET", url, headers) as answer:
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
                resources.enter_context(self._admission.hold(holder, len(part)))
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
