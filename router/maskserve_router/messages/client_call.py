"""A call that this router answers itself: what an edit and a workflow run have in common."""

from __future__ import annotations

import asyncio
import math
import secrets
import time
import uuid
from dataclasses import dataclass, field
from typing import Any, ClassVar

from msgspec import structs

from maskserve_common.contracts.keys import NO_SCOPE, edit_of, name_of, scope_of, scoped
from maskserve_common.contracts.settings import EditSettings
from maskserve_common.errors import InvalidRequest
from maskserve_router.key_holder import KeyHolder
from maskserve_router.messages.model_request import ModelRequest

_SEED_BITS = 32


@dataclass(slots=True, eq=False, kw_only=True)
class ClientCall:
    """A client's request until its answer; times are on time.monotonic's clock."""

    kind: ClassVar[str]
    """Word for logs and errors."""
    message: ModelRequest
    settings: EditSettings | None
    """Settings with seed and request id; None if the request is malformed. A worker then reports
    the error."""
    owner: KeyHolder
    """Holder of the key that calls."""
    request_id: str
    """Unique among the calls of its kind; it begins with the scope of the client's key."""
    timeout: float | None = None
    """Seconds that the client waits, counted from `arrival`."""
    arrival: float = field(default_factory=time.monotonic)
    by_size_ms: int | None = None
    """Milliseconds in which a call of its size is due without a deadline; None: unknown or
    none."""
    work: asyncio.Task[Any] | None = None
    """Makes the answer; None: it has not begun."""
    cancelled: bool = False
    """True once it was cancelled by its id."""

    @property
    def limits(self) -> dict[str, float]:
        """The client's limits by name, in seconds from `arrival`: later nobody wants the answer."""
        limits = {} if self.timeout is None else {"the call's own timeout": self.timeout}
        limit_ms = None if self.settings is None else self.settings.limit_ms
        if limit_ms is not None:
            limits["SETTINGS.deadline_ms"] = limit_ms / 1e3
        # KServe's own parameter, which the worker also obeys. Indexing the map would add a key.
        if "timeout" in self.message.head.parameters:
            parameter = self.message.head.parameters["timeout"]
            # `check_request` admits both kinds of whole numbers.
            if timeout_us := parameter.int64_param or parameter.uint64_param:
                limits["parameter timeout"] = timeout_us / 1e6
        return limits

    @property
    def deadline(self) -> float | None:
        """The time after which nobody wants the answer."""
        limits = self.limits
        return self.arrival + min(limits.values()) if limits else None

    @property
    def deadline_name(self) -> str:
        """Name of the client's limit that ends first, for errors."""
        limits = self.limits
        return min(limits, key=limits.__getitem__)

    @property
    def due_s(self) -> float | None:
        """Seconds from `arrival` until its answer is due; None: it has no known due time."""
        dues = [*self.limits.values()]
        if self.settings is not None and self.settings.deadline_ms is not None:
            dues.append(self.settings.deadline_ms / 1e3)
        if not dues and self.by_size_ms is not None:
            return self.by_size_ms / 1e3
        return min(dues, default=None)

    @property
    def due(self) -> float:
        """The time at which its answer is due; infinite: it has no known due time."""
        due_s = self.due_s
        return math.inf if due_s is None else self.arrival + due_s

    @property
    def answered(self) -> bool:
        """True once its work has succeeded."""
        work = self.work
        return (
            work is not None and work.done() and not work.cancelled() and work.exception() is None
        )

    def cancel(self) -> bool:
        """End its work with the error Cancelled. Return False: the work has already ended."""
        if self.work is not None and self.work.done():
            return False
        self.cancelled = True
        if self.work is not None:
            self.work.cancel()
        return True


def identified(settings: EditSettings, scope: str) -> EditSettings:
    """Return settings with seed and request id, which are drawn if the client gives none.

    So a retry is the same edit. The id gets the client's `scope`.

    Raises:
        InvalidRequest: the client's id has the form of another client's.
    """
    return structs.replace(
        settings,
        request_id=request_id_of(settings.request_id or uuid.uuid4().hex, scope),
        seed=secrets.randbits(_SEED_BITS) if settings.seed is None else settings.seed,
    )


def request_id_of(name: str, scope: str) -> str:
    """Return the id at workers for a client's own `name`.

    Raises:
        InvalidRequest: it has the form of another client's id.
    """
    for part, foreign in (
        ("before '!'", scope_of(name) not in (NO_SCOPE, scope)),
        ("behind '~'", edit_of(name) != name),
    ):
        if foreign:
            raise InvalidRequest(
                "SETTINGS.request_id", f"has a part {part}", "letters, digits, or any of . _ : / -"
            )
    return scoped(scope, name_of(name))
