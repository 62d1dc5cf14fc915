"""The status record: what a worker says about itself, without being asked (design §4, §5).

A reader takes records of its own `VERSION` only. Within a version fields may be added: unknown
keys are skipped, absent ones take their defaults.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

VERSION = 1
STATES = ("loading", "ready", "draining", "stopped", "failed")
KINDS = ("dense", "cached", "prime")

_encode = json.JSONEncoder(separators=(",", ":")).encode
SLOW_FIELDS = ("templates", "costs")


@dataclass(slots=True)
class RowStatus:
    """A row of the running batch, or an edit that waits for one.

    Whoever writes records keeps it for as long as the row lives; only `steps_left` ever changes.
    """

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
    _fixed: str = field(default="", init=False, repr=False, compare=False)
    """JSON of what never changes, without the closing brace."""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind {self.kind!r} is not one of {', '.join(KINDS)}")

    def to_json(self) -> str:
        if not self._fixed:
            fixed = {name: getattr(self, name) for name in _ROW_FIELDS if name != "steps_left"}
            self._fixed = _encode(fixed)[:-1]
        return f'{self._fixed},"steps_left":{self.steps_left}}}'


class Stamp(NamedTuple):
    """What the writer adds to a record."""

    sequence: int
    wall_ns: int
    monotonic_ns: int


@dataclass(slots=True)
class WorkerStatus:
    """One record. Sizes are bytes, stamps nanoseconds; the stamps and the sequence number are the
    writer's.
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
        stamp = Stamp(self.sequence, self.wall_ns, self.monotonic_ns)
        waiting = rows_json(self.waiting)
        return volatile_json(self, stamp, waiting).encode() + slow_json(self)

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
_ROW_FIELDS = tuple(f.name for f in fields(RowStatus) if f.init)
_WORKER_FIELDS = tuple(f.name for f in fields(WorkerStatus))


def _known(kind: type[T], values: dict[str, Any]) -> T:
    names = _ROW_FIELDS if kind is RowStatus else _WORKER_FIELDS
    return kind(**{name: value for name, value in values.items() if name in names})


def rows_json(rows: Iterable[RowStatus]) -> str:
    """Rows as the inside of a JSON array."""
    return ",".join([row.to_json() for row in rows])


def volatile_json(status: WorkerStatus, stamp: Stamp, waiting: str) -> str:
    """What changes from step to step: the JSON object without its closing brace.

    Args:
        status: its `waiting` is not read.
        stamp: the record's own.
        waiting: `rows_json` of those that wait; many, and the same from step to step.
    """
    begin = _begin_json(
        status.version,
        status.worker,
        status.model,
        status.state,
        status.max_rows,
        status.max_waiting,
    )
    return (
        f'{begin},"sequence":{stamp.sequence},"wall_ns":{stamp.wall_ns}'
        f',"monotonic_ns":{stamp.monotonic_ns},"tier_bytes":{numbers_json(status.tier_bytes)}'
        f',"counters":{numbers_json(status.counters)}'
        f',"running":[{rows_json(status.running)}],"waiting":[{waiting}]'
    )


def numbers_json(values: Mapping[str, float]) -> str:
    """A JSON object of finite numbers."""
    return _numbers_template(tuple(values)) % tuple(values.values())


@lru_cache(maxsize=64)
def _numbers_template(names: tuple[str, ...]) -> str:
    return "{" + ",".join(_encode(name).replace("%", "%%") + ":%s" for name in names) + "}"


@lru_cache(maxsize=16)
def _begin_json(
    version: int, worker: str, model: str, state: str, max_rows: int, max_waiting: int
) -> str:
    values = {
        "version": version,
        "worker": worker,
        "model": model,
        "state": state,
        "max_rows": max_rows,
        "max_waiting": max_waiting,
    }
    return _encode(values)[:-1]


def slow_json(status: WorkerStatus) -> bytes:
    """What seldom changes and may be long: the rest of the JSON object."""
    return b"," + _encode({name: getattr(status, name) for name in SLOW_FIELDS}).encode()[1:]
