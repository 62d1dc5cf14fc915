"""Calls webhooks when jobs end: a signed request, repeated until it is accepted.

The form is that of Standard Webhooks (https://www.standardwebhooks.com), which has libraries in
most languages to check the signature. The id is the job's: repeated calls have the same id.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import logging
import ssl
import time
from collections.abc import Callable
from typing import Any, Final

import httpx
import msgspec
from tenacity import (
    AsyncRetrying,
    RetryError,
    retry_if_exception_type,
    stop_after_attempt,
    wait_random_exponential,
)

from maskserve_common.errors import InvalidRequest
from maskserve_router.api.public_hosts import PublicHosts, PublicUrl, Resolve, is_public, resolve
from maskserve_router.config import JobsConfig, webhook_key

log = logging.getLogger("maskserve.router")
_LONGEST_PAUSE_S: Final = 300
_GONE: Final = 410


class _Undelivered(Exception):
    """The reason why a call was not accepted; it may be repeated."""


def signature(key: bytes, name: str, seconds: int, body: bytes) -> str:
    """Return the signature of a message."""
    digest = hmac.digest(key, b"%b.%d.%b" % (name.encode(), seconds, body), hashlib.sha256)
    return f"v1,{base64.b64encode(digest).decode()}"


class Webhooks:
    """Calls the hosts that the operator listed.

    Args:
        config: configuration of jobs.
        resolver: returns the addresses of a host and port.
        public: returns whether an address may be called.
        trusted: trusted certificates; by default those of certifi.
        pause_s: longest pause after the first call; later pauses may each be twice as long.
    """

    def __init__(
        self,
        config: JobsConfig,
        resolver: Resolve = resolve,
        public: Callable[[str], bool] = is_public,
        trusted: ssl.SSLContext | None = None,
        pause_s: float = 1.0,
    ) -> None:
        self._hosts = PublicHosts(
            config.webhook_hosts, config.webhook_timeout_s, resolver, public, trusted
        )
        self._timeout_s = config.webhook_timeout_s
        self._tries, self._pause_s = config.webhook_tries, pause_s

    async def close(self) -> None:
        await self._hosts.close()

    def check(self, url: str, secret: str) -> None:
        """Check a webhook before its job is accepted.

        Raises:
            InvalidRequest: naming the field.
        """
        if not self._hosts.hosts:
            raise InvalidRequest("webhook", "is given, and no host is listed for them", "none")
        self._hosts.allowed("webhook", url)
        if not secret:
            raise InvalidRequest("webhook", "is given, and the key has no webhook_secret", "none")

    async def deliver(self, url: str, secret: str, name: str, event: dict[str, Any]) -> bool:
        """Call a webhook until it answers 2xx; return False if it never does.

        Args:
            url: the webhook.
            secret: secret that signs the event.
            name: id of the event, the same in each call.
            event: body of the call.
        """
        body = msgspec.json.encode(event)
        tries = AsyncRetrying(
            stop=stop_after_attempt(self._tries),
            wait=wait_random_exponential(self._pause_s, _LONGEST_PAUSE_S),
            retry=retry_if_exception_type(_Undelivered),
        )
        try:
            target = self._hosts.allowed("webhook", url)
            return await tries(self._call, target, webhook_key(secret), name, body)
        except InvalidRequest as error:  # the host is no longer listed
            failure: BaseException = error
        except RetryError as error:
            failure = error.last_attempt.exception() or error
        log.warning("job %s: its webhook was not accepted: %s", name, failure)
        return False

    async def _call(self, url: PublicUrl, key: bytes, name: str, body: bytes) -> bool:
        seconds = int(time.time())
        headers = {
            "content-type": "application/json",
            "webhook-id": name,
            "webhook-timestamp": str(seconds),
            "webhook-signature": signature(key, name, seconds, body),
        }
        try:
            # A limit on the whole call: httpx's limit is per wait, and bytes may come one by one.
            async with (
                asyncio.timeout(self._timeout_s),
                await self._hosts.ask("POST", url, headers, body) as answer,
            ):
                status = answer.status_code
        except (httpx.HTTPError, OSError, UnicodeError) as error:
            raise _Undelivered(f"{url.host}: {type(error).__name__}: {error}") from None
        if 200 <= status < 300:
            return True
        if status == _GONE:  # the host wants no more calls
            return False
        raise _Undelivered(f"{url.host} answered with status {status}")
