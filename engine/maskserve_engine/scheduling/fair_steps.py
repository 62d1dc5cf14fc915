"""The rows of several keys that step together, so that each key has its part of a step's time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

from maskserve_common.contracts.keys import scope_of
from maskserve_common.key_work import KeyWork


class KeyedRow(Protocol):
    """The part of a ticket that `FairSteps` reads."""

    @property
    def request_id(self) -> str: ...

    @property
    def active_tokens(self) -> int: ...

    @property
    def seconds(self) -> tuple[float, ...]: ...

    @property
    def shared(self) -> float: ...


T = TypeVar("T", bound=KeyedRow)
_FAR = 8
"""Steps of work by which a key must lag before it steps alone."""


class FairSteps:
    """Gives each of n keys at least an nth of the speed that it would have alone, however many rows
    the others have.

    A key may have any number of rows, and each makes the step longer for all. So if several keys
    have rows, no key adds more work to a step than the key with least work. The fixed cost of a
    step is shared: on a device on which more rows cost little, all of them fit. Rows of a key that
    do not fit alternate. If rows of several keys cannot share a step, their batches alternate by
    the work that each key received. A key that received little work recently has the step's time to
    itself; others join if that costs nothing.
    """

    def __init__(self) -> None:
        self._work = KeyWork()
        self._stepped: dict[str, int] = {}
        """Request id -> number of its last step."""
        self._step = 0

    def next(self, live: Sequence[KeyedRow]) -> str | None:
        """Return the key that is served next; None: all rows belong to one key."""
        keys = dict.fromkeys(map(_key_of, live))
        return self._work.furthest_behind(keys) if len(keys) > 1 else None

    def rows(self, batch: Sequence[T], live: Sequence[KeyedRow]) -> tuple[T, ...]:
        """Return the rows of a batch that step now.

        Args:
            batch: rows that may share a step, at least one of the key that `next` names.
            live: all rows.
        """
        self._step += 1
        work_by_key: dict[str, float] = {}
        for ticket in live:
            work_by_key[_key_of(ticket)] = work_by_key.get(_key_of(ticket), 0.0) + _work(ticket)
        shared = max(ticket.shared for ticket in live)
        if len(work_by_key) == 1:
            self._stepped = {}
            self._work.add(_key_of(batch[0]), sum(map(_work, batch)) + shared)
            return tuple(batch)
        first = self._work.furthest_behind(work_by_key)
        steps_alone = self._work.lag(first, work_by_key) > _FAR * (work_by_key[first] + shared)
        free = shared * (1 - 1 / len(work_by_key))
        bound = min(work_by_key.values()) + free
        granted_work: dict[str, float] = {}
        chosen = set()
        for ticket in sorted(batch, key=lambda ticket: self._stepped.get(ticket.request_id, 0)):
            key, work = _key_of(ticket), _work(ticket)
            joins = key not in granted_work and (key == first or not steps_alone)
            if joins or granted_work.get(key, 0.0) + work <= (
                free if steps_alone and key != first else bound
            ):
                granted_work[key] = granted_work.get(key, 0.0) + work
                chosen.add(ticket.request_id)
        for key, work in granted_work.items():
            self._work.add(key, work + shared / len(granted_work))
        ids = {ticket.request_id for ticket in live}
        self._stepped = {name: at for name, at in self._stepped.items() if name in ids}
        self._stepped.update(dict.fromkeys(chosen, self._step))
        return tuple(ticket for ticket in batch if ticket.request_id in chosen)


def _key_of(ticket: KeyedRow) -> str:
    return scope_of(ticket.request_id)


def _work(ticket: KeyedRow) -> float:
    """Return what the row adds to a step: seconds, or tokens if seconds are unknown."""
    if not ticket.seconds:
        return float(ticket.active_tokens)
    return ticket.seconds[0] - ticket.shared
