"""Edits in flight at a front."""

from __future__ import annotations

import threading
import time
import uuid
from dataclasses import dataclass, field
from typing import Any

from msgspec import structs

from maskserve_common.contracts.keys import edit_of
from maskserve_common.contracts.request import AcceptedEdit
from maskserve_common.contracts.settings import MAX_DEADLINE_MS, EditSettings
from maskserve_common.errors import InvalidRequest, MaskserveError
from maskserve_triton.answer import Answer


@dataclass(slots=True, eq=False)
class Call:
    """An accepted edit, until it is answered."""

    edit: AcceptedEdit
    pictures: dict[str, list[bytes]]
    """Elements of the pictures that are passed on unread (`contracts.tensors.PICTURES`)."""
    answer: Answer
    limit_name: str = "SETTINGS.deadline_ms"
    """Name of the limit that the client set on the edit's time."""
    traceparent: str = ""
    """Parent of the spans that the models record for it."""
    run: str = ""
    """Workflow run for which the answer is put into a file; empty: the answer is sent."""
    encoding: str = ""
    """MAKE or TAKE (`maskserve_common.files.values.ENCODING`), or empty."""
    accepted: float = field(default_factory=time.monotonic)
    sent: bool = False
    """Whether it is in the pipeline; until then it waits for a thread."""
    last_event: float = 0.0
    """Time at which the engine last reported it or an event of it came; 0: never."""
    withdrawn: bool = False
    """Whether the client has gone, so that the row is to be freed."""
    withdrawing: threading.Lock = field(default_factory=threading.Lock)

    @property
    def request_id(self) -> str:
        assert self.edit.settings.request_id is not None
        return self.edit.settings.request_id

    def inputs(self) -> dict[str, list[bytes]]:
        """Return the pipeline's input elements."""
        return {**self.pictures, "ACCEPTED": [self.edit.to_json()]}

    def too_late(self, now: float) -> bool:
        limit = self.edit.settings.deadline_ms
        return limit is not None and now - self.accepted > limit / 1e3


class Calls:
    """The edits of a front by id, answered or not, until they leave the pipeline."""

    def __init__(self) -> None:
        self._calls: dict[str, Call] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._calls)

    def __contains__(self, call: Call) -> bool:
        return self._calls.get(call.request_id) is call

    def tries_of(self, request_id: str) -> list[Call]:
        """Return all tries of an edit that are in flight."""
        return [call for call in self.all() if edit_of(call.request_id) == edit_of(request_id)]

    def all(self) -> list[Call]:
        with self._lock:
            return list(self._calls.values())

    def add(self, call: Call) -> None:
        """Add an edit.

        Raises:
            InvalidRequest: another edit in flight has its id.
        """
        with self._lock:
            existing_call = self._calls.get(call.request_id)
            # A client may send the id again as soon as it has its answer.
            if existing_call is not None and (
                existing_call.withdrawn or not existing_call.answer.done
            ):
                raise InvalidRequest(
                    "SETTINGS.request_id", "names an edit that is in flight", "a fresh id"
                )
            self._calls[call.request_id] = call

    def remove(self, call: Call) -> None:
        """Remove an edit that has left the pipeline; its id may be another edit's by now."""
        with self._lock:
            if call in self:
                del self._calls[call.request_id]

    def fail_all(self, problem: MaskserveError) -> None:
        """Answer each that has no answer yet."""
        for call in self.all():
            call.answer.fail(problem)


@dataclass(frozen=True, slots=True)
class LimitedRequest:
    """A client's request with its limits, as a front takes it."""

    settings: EditSettings
    """Settings; after their `deadline_ms` the edit is dropped; None: never."""
    limit_name: str
    """Name of the limit that the client set on the edit's time."""
    due_ms: int | None
    """Milliseconds after which the client wants the answer."""


def limited_request(settings: EditSettings, request: Any, *, streaming: bool) -> LimitedRequest:
    """Return a client's settings as a front uses them: with an id, the nearer of both time limits,
    and without events that the client would not see.

    Args:
        settings: settings of the client.
        request: Triton's request; its parameter `timeout` is in microseconds, 0 if there is none.
        streaming: whether the front sends progress and previews on.
    """
    limit_ms, limit_name = settings.limit_ms, "SETTINGS.deadline_ms"
    timeout_ms = -(-request.timeout() // 1000)
    if 0 < timeout_ms <= MAX_DEADLINE_MS and (limit_ms is None or timeout_ms < limit_ms):
        limit_ms, limit_name = timeout_ms, "timeout"
    front_settings = structs.replace(
        settings,
        request_id=settings.request_id or uuid.uuid4().hex,
        deadline_ms=limit_ms,
        progress=settings.progress and streaming,
        preview_every=settings.preview_every if streaming else 0,
    )
    limits_ms = [ms for ms in (settings.deadline_ms, limit_ms) if ms is not None]
    return LimitedRequest(front_settings, limit_name, min(limits_ms, default=None))
