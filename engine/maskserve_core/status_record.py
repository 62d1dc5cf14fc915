"""The status record: what a worker says about itself, without being asked (design §4, §5).

A reader takes records of its own `VERSION` only. Within a version fields may be added: unknown
keys are skipped, absent ones take their defaults.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import lru_cache
from typing import Any, TypeVar

VERSION = 1
STATES = ("loading", "ready", "draining", "stopped", "failed")
KINDS = ("dense", "cached", "prime")

_encode = json.JSONEncoder(separators=(",", ":")).encode
SLOW_FIELDS = ("templates", "costs")


@dataclass(frozen=True, slots=True)
class RowStatus:
    """A row of the running batch, or an edit that waits for one."""

    request_id: str
    kind: str
    """`dense`, `cached` or `prime`."""
    active_tokens: int
    """Tokens computed per step; equal to `total_tokens` for a dense row. Both count twice for an
    edit with a negative prompt, whose steps run the model twice."""
    total_tokens: int
    steps_left: int
    template_id: str = ""
    priority: int = 0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind {self.kind!r} is not one of {', '.join(KINDS)}")


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """One record. Sizes are bytes, stamps nanoseconds; the stamps and the sequence number are set
    by the writer.
    """

    worker: str
    model: str
    state: str
    """`loading`, `ready`, `draining`, `stopped` or `failed`."""
    max_rows: int
    max_waiting: int
    sequence: int = 0
    """Counts the records of one writer from 1."""
    wall_ns: int = 0
    """time.time_ns when written: for people and other hosts."""
    monotonic_ns: int = 0
    """time.monotonic_ns when written: comparable across the processes of one host."""
    running: tuple[RowStatus, ...] = ()
    waiting: tuple[RowStatus, ...] = ()
    tier_bytes: Mapping[str, int] = field(default_factory=dict)
    """Tier -> bytes of entries."""
    counters: Mapping[str, float] = field(default_factory=dict)
    """Totals since the worker started, named like the metrics without their prefix."""
    templates: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Tier (`device`, `host`, `disk`, `remote`) -> ids of the templates whose entries it has."""
    costs: Mapping[str, Any] = field(default_factory=dict)
    """The cost model as JSON values; empty before it is known."""
    version: int = VERSION

    def __post_init__(self) -> None:
        if self.state not in STATES:
            raise ValueError(f"state {self.state!r} is not one of {', '.join(STATES)}")

    def age_s(self, now_ns: int | None = None) -> float:
        """Seconds since the record was written; only on the host that wrote it."""
        return ((time.monotonic_ns() if now_ns is None else now_ns) - self.monotonic_ns) / 1e9

    def to_json(self) -> bytes:
        """Compact UTF-8 JSON of every field."""
        return volatile_json(self) + slow_json(self)

    @classmethod
    def from_json(cls, raw: bytes | str) -> WorkerStatus:
        """Read what `to_json` wrote.

        Raises:
            ValueError: not a record of this version.
        """
        try:
            values = json.loads(raw)
            if values["version"] != VERSION:
                raise ValueError(f"version {values['version']!r}; known: {VERSION}")
            values["running"] = tuple(_known(RowStatus, row) for row in values["running"])
            values["waiting"] = tuple(_known(RowStatus, row) for row in values["waiting"])
            values["templates"] = {
                str(tier): tuple(ids) for tier, ids in values["templates"].items()
            }
            return _known(cls, values)
        except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
            raise ValueError(f"not a status record: {error}") from error


T = TypeVar("T", RowStatus, WorkerStatus)
_PLAIN_FIELDS = tuple(
    f.name for f in fields(WorkerStatus) if f.name not in ("running", "waiting", *SLOW_FIELDS)
)


def _known(kind: type[T], values: dict[str, Any]) -> T:
    names = {f.name for f in fields(kind)}
    return kind(**{name: value for name, value in values.items() if name in names})


def volatile_json(status: WorkerStatus) -> bytes:
    """What changes from step to step: the JSON object without its closing brace."""
    plain = _encode({name: getattr(status, name) for name in _PLAIN_FIELDS})[:-1]
    running, waiting = (",".join(map(_row_json, rows)) for rows in (status.running, status.waiting))
    return f'{plain},"running":[{running}],"waiting":[{waiting}]'.encode()


def _row_json(row: RowStatus) -> str:
    fixed = _fixed_json(
        row.request_id,
        row.kind,
        row.active_tokens,
        row.total_tokens,
        row.template_id,
        row.priority,
    )
    return f'{fixed},"steps_left":{row.steps_left}}}'


@lru_cache(maxsize=1024)
def _fixed_json(
    request_id: str, kind: str, active: int, total: int, template_id: str, priority: int
) -> str:
    """What stays the same while a row runs or waits, which is most of a record."""
    values = {
        "request_id": request_id,
        "kind": kind,
        "active_tokens": active,
        "total_tokens": total,
        "template_id": template_id,
        "priority": priority,
    }
    return _encode(values)[:-1]


def slow_json(status: WorkerStatus) -> bytes:
    """What seldom changes and may be long: the rest of the JSON object."""
    return b"," + _encode({name: getattr(status, name) for name in SLOW_FIELDS}).encode()[1:]
