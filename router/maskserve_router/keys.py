"""The callers: holders of API keys."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import NamedTuple

from maskserve_common.contracts.keys import NO_SCOPE
from maskserve_common.errors import AdapterNotFound
from maskserve_common.sites import foreign_site
from maskserve_router.config import Key
from maskserve_router.messages.failures import Unauthorized


@dataclass(slots=True)
class EditCounts:
    """Number and time of a client's answered edits of one model."""

    succeeded: int = 0
    failed: int = 0
    succeeded_ns: int = 0
    failed_ns: int = 0

    def add(self, seconds: float, *, succeeded: bool) -> None:
        taken_ns = int(seconds * 1e9)
        if succeeded:
            self.succeeded, self.succeeded_ns = self.succeeded + 1, self.succeeded_ns + taken_ns
        else:
            self.failed, self.failed_ns = self.failed + 1, self.failed_ns + taken_ns


class Daily(NamedTuple):
    """A key's jobs of one day, as a count or as a limit; a limit of 0 is none."""

    jobs: int = 0
    bytes: int = 0
    megapixel_steps: float = 0


ANY = Daily()


@dataclass(slots=True, eq=False)
class KeyHolder:
    """The holder of one API key; without keys, everybody."""

    name: str
    max_edits: int
    admin: bool
    shares: bool = False
    """True if its templates are for every client."""
    private_prompts: bool = False
    """True if embeddings of its prompts are kept for it alone."""
    scope: str = NO_SCOPE
    """Scope of its request ids and templates (`maskserve_common.contracts.keys`), and its key for
    fair shares (`maskserve_common.shares`). It follows from the key's name, so that a key can be
    replaced."""
    served: dict[str, EditCounts] = field(default_factory=dict)
    """Edits that this router has answered it, by model."""
    adapters: tuple[str, ...] = ()
    """Patterns of the LoRAs that belong to it."""
    foreign: tuple[str, ...] = ()
    """Patterns of the LoRAs that belong to other keys."""
    daily: Daily = ANY
    """Limits of its jobs per day."""
    webhook_secret: str = ""
    """Secret that signs its webhooks; empty: none."""
    output_urls: tuple[str, ...] = ()
    """URL prefixes to which its pictures may be written."""

    def sees(self, adapter: str) -> bool:
        """Return True if the client may use a LoRA."""
        if self.admin or any(fnmatchcase(adapter, own_pattern) for own_pattern in self.adapters):
            return True
        return not any(fnmatchcase(adapter, foreign_pattern) for foreign_pattern in self.foreign)

    def check_adapters(self, names: Iterable[str], field: str) -> None:
        """Raises AdapterNotFound: one of these belongs to another key.

        The text is the same as for an adapter that does not exist.
        """
        for name in names:
            if not self.sees(name):
                raise AdapterNotFound(f"{field}: there is no adapter {name}")


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
