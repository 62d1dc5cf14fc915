"""Identification of callers by API key."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping

from maskserve_common.contracts.keys import NO_SCOPE
from maskserve_common.sites import foreign_site
from maskserve_router.config import Key
from maskserve_router.key_holder import Daily, KeyHolder
from maskserve_router.messages.failures import Unauthorized


def scope_of_key(name: str) -> str:
    """Return the scope of a key with this name."""
    return hashlib.blake2b(name.encode(), digest_size=8, person=b"maskserve.scope").hexdigest()


class KeyRing:
    """Identifies callers by API key.

    Args:
        keys: keys of the configuration; without any, every client is let in.
        max_edits: limit for everybody together if there are no keys.
        webhook_secret: secret of webhooks if there are no keys.
        output_urls: prefixes of output URLs if there are no keys.
        origins: origins of pages that may call from a browser if there are no keys. With keys this
            is not checked: a foreign page cannot send a key without permission.
    """

    def __init__(
        self,
        keys: tuple[Key, ...],
        max_edits: int,
        webhook_secret: str = "",
        output_urls: tuple[str, ...] = (),
        origins: tuple[str, ...] = (),
    ) -> None:
        self._origins = origins
        self._max_edits, self._webhook_secret = max_edits, webhook_secret
        self._output_urls = output_urls
        self._anybody: KeyHolder | None = None
        self._clients: list[tuple[bytes, KeyHolder]] = []
        self.change(keys)

    def change(self, keys: tuple[Key, ...]) -> None:
        """Replace the keys. Holders keep their counts by name.

        A removed key opens nothing more, not even on open connections.
        """
        counts_by_name = {client.name: client.served for _, client in self._clients}
        owned = frozenset(pattern for key in keys for pattern in key.adapters)
        anonymous = KeyHolder(
            "anybody",
            self._max_edits,
            admin=True,
            webhook_secret=self._webhook_secret,
            output_urls=self._output_urls,
        )
        self._anybody = None if keys else anonymous
        self._clients = [
            (
                bytes.fromhex(key.sha256),
                KeyHolder(
                    key.name,
                    key.max_edits,
                    key.admin,
                    key.shares,
                    key.private_prompts,
                    scope_of_key(key.name),
                    counts_by_name.get(key.name, {}),
                    key.adapters,
                    tuple(owned.difference(key.adapters)),
                    Daily(key.jobs_per_day, key.job_bytes_per_day, key.job_megapixel_steps_per_day),
                    key.webhook_secret,
                    key.output_urls,
                ),
            )
            for key in keys
        ]

    def holder(self, scope: str) -> KeyHolder | None:
        """Return the holder of a scope; None: its key is gone."""
        if self._anybody is not None:
            return self._anybody if scope == NO_SCOPE else None
        return next((client for _, client in self._clients if client.scope == scope), None)

    def client(self, headers: Mapping[str, str]) -> KeyHolder:
        """Return the caller with these headers (names in lower case).

        Raises:
            Unauthorized: the key is missing or unknown; or there are no keys and a foreign page
                calls.
        """
        if self._anybody is not None:
            if foreign := foreign_site(headers, None, self._origins):
                field, _, problem = foreign.partition(": ")
                raise Unauthorized(field, problem, "its own, and those of [http] cors_origins")
            return self._anybody
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        key = headers.get("x-api-key") or (bearer.strip() if scheme.lower() == "bearer" else "")
        digest = hashlib.sha256(key.encode("utf-8", "replace")).digest()
        # Every key is compared, each in constant time, so that the duration tells nothing.
        matches = [
            client
            for key_digest, client in self._clients
            if hmac.compare_digest(key_digest, digest)
        ]
        if not matches:
            problem = "is not known" if key else "is missing"
            raise Unauthorized("API key", problem, "x-api-key: KEY or Authorization: Bearer KEY")
        return matches[0]
