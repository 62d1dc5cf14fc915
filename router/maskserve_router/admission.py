"""What the router takes on: edits and bytes under way, per client and in all."""

from __future__ import annotations

import hashlib
import hmac
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from maskserve_core.contracts.keys import NO_SCOPE
from maskserve_router.config import AdmissionBounds, Key
from maskserve_router.failures import RetryLater, Unauthorized
from maskserve_router.metrics import Metrics

_REMEMBERED = 0.1
"""Weight of the last edit in the mean gap between two that end."""


@dataclass(slots=True)
class EditCounts:
    """Edits of one model that a client had answered."""

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


@dataclass(slots=True, eq=False)
class KeyHolder:
    """Whoever holds one API key; without keys, everybody."""

    name: str
    max_edits: int
    admin: bool
    shares: bool = False
    """Its templates are for every client."""
    private_prompts: bool = False
    """Embeddings of its prompts are kept for itself alone."""
    scope: str = NO_SCOPE
    """Of its request ids and templates (`maskserve_core.contracts.keys`). It follows from the
    key's name, so that a key may be changed."""
    edits: int = 0
    """Under way."""
    served: dict[str, EditCounts] = field(default_factory=dict)
    """What this router has answered it, by model."""


def _scope(name: str) -> str:
    return hashlib.blake2b(name.encode(), digest_size=8, person=b"maskserve.scope").hexdigest()


class KeyRing:
    """Who a caller is, by the key that it sends."""

    def __init__(self, keys: tuple[Key, ...], max_edits: int) -> None:
        self._anybody = None if keys else KeyHolder("anybody", max_edits, admin=True)
        self._clients = [
            (
                bytes.fromhex(key.sha256),
                KeyHolder(
                    key.name,
                    key.max_edits,
                    key.admin,
                    key.shares,
                    key.private_prompts,
                    _scope(key.name),
                ),
            )
            for key in keys
        ]

    def client(self, headers: Mapping[str, str]) -> KeyHolder:
        """The caller with these headers (names in lower case).

        Raises:
            Unauthorized: keys are needed, and this is none.
        """
        if self._anybody is not None:
            return self._anybody
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        key = headers.get("x-api-key") or (bearer.strip() if scheme.lower() == "bearer" else "")
        digest = hashlib.sha256(key.encode("utf-8", "replace")).digest()
        # Every key is compared, each in constant time: how long it takes tells nothing.
        found = [client for known, client in self._clients if hmac.compare_digest(known, digest)]
        if not found:
            problem = "is not known" if key else "is missing"
            raise Unauthorized("API key", problem, "x-api-key: KEY or Authorization: Bearer KEY")
        return found[0]


class Admission:
    """Counts edits and bytes; used from the event loop only."""

    def __init__(self, bounds: AdmissionBounds, metrics: Metrics) -> None:
        self._bounds, self._metrics = bounds, metrics
        self.edits = 0
        self.bytes = 0
        self.closed = False
        """The router is stopping."""
        self._ended_at = 0.0
        self._gap_s = 0.0
        """Mean seconds between the ends of two edits."""

    @contextmanager
    def edit(self, client: KeyHolder, size: int) -> Iterator[None]:
        """An edit is under way.

        Raises:
            RetryLater: the router, or the client, has as many as it may.
        """
        if self.closed:
            self._refuse("stopping", "the router is stopping")
        if self.edits >= self._bounds.max_edits:
            self._refuse("edits", f"{self.edits} edits are under way already")
        if client.edits >= client.max_edits:
            self._refuse("key", f"key {client.name} has {client.edits} edits under way already")
        self.edits += 1
        client.edits += 1
        try:
            with self.hold(size):
                yield
        finally:
            self.edits -= 1
            client.edits -= 1
            self._ended(time.monotonic())

    @contextmanager
    def hold(self, size: int) -> Iterator[None]:
        """So many bytes of a request are in memory.

        Raises:
            RetryLater: there is no room for them.
        """
        if self.bytes + size > self._bounds.max_bytes:
            self._refuse("bytes", f"requests of {self.bytes} bytes are under way already")
        self.bytes += size
        try:
            yield
        finally:
            self.bytes -= size

    def _ended(self, now: float) -> None:
        gap = min(now - self._ended_at, 60.0) if self._ended_at else 0.0
        self._gap_s += _REMEMBERED * (gap - self._gap_s)
        self._ended_at = now

    def _refuse(self, reason: str, message: str) -> None:
        """Refuse until, at the pace of late, half of what is under way is done."""
        self._metrics.rejections.labels(reason).inc()
        raise RetryLater(f"{message}; try again later", self._gap_s * self.edits / 2)
