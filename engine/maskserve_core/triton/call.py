"""One edit in flight at a front."""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass, field, replace
from typing import Any

from maskserve_core.contracts.request import AcceptedEdit
from maskserve_core.contracts.settings import MAX_DEADLINE_MS, EditSettings
from maskserve_core.triton.answer import Answer


@dataclass(slots=True, eq=False)
class Call:
    """An accepted edit, until it is answered."""

    edit: AcceptedEdit
    pictures: dict[str, list[bytes]]
    """Elements of what is handed on unread (`contracts.tensors.PICTURES`)."""
    answer: Answer
    limit_name: str = "SETTINGS.deadline_ms"
    """What the client bounded the edit by."""
    traceparent: str = ""
    """The span below which the models record what they do for it."""
    accepted: float = field(default_factory=time.monotonic)
    sent: bool = False
    """Into the pipeline; until then it waits for a thread."""
    heard: float = 0.0
    """When the engine was last seen to hold it, or an event of it came; 0: never."""
    withdrawn: bool = False
    """Nobody waits for it; its row is to be freed."""
    next_cancel: float = 0.0
    cancelling: bool = False

    @property
    def request_id(self) -> str:
        assert self.edit.settings.request_id is not None
        return self.edit.settings.request_id

    def inputs(self) -> dict[str, list[bytes]]:
        """What the pipeline is given."""
        return {**self.pictures, "ACCEPTED": [self.edit.to_json()]}

    def too_late(self, now: float) -> bool:
        limit = self.edit.settings.deadline_ms
        return limit is not None and now - self.accepted > limit / 1e3


def bounded(asked: EditSettings, request: Any, *, streaming: bool) -> tuple[EditSettings, str]:
    """A client's settings as a front takes them: with an id, the nearer of both time limits, and
    no events that the client would not see.

    Args:
        asked: as the client gave them.
        request: Triton's; its parameter `timeout` comes in microseconds, 0 if there is none.
        streaming: whether the front sends progress and previews on.

    Returns:
        The settings, and the name of the limit.
    """
    limit_ms, limit_name = asked.deadline_ms, "SETTINGS.deadline_ms"
    timeout_ms = -(-request.timeout() // 1000)
    if 0 < timeout_ms <= MAX_DEADLINE_MS and (limit_ms is None or timeout_ms < limit_ms):
        limit_ms, limit_name = timeout_ms, "timeout"
    taken = replace(
        asked,
        request_id=asked.request_id or uuid.uuid4().hex,
        deadline_ms=limit_ms,
        progress=asked.progress and streaming,
        preview_every=asked.preview_every if streaming else 0,
    )
    return taken, limit_name
