"""What keys were given of a worker's time, and which rows of several keys take a step together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol, TypeVar

from maskserve_core.contracts.keys import scope_of


class KeyedRow(Protocol):
    """What of a ticket counts here."""

    @property
    def request_id(self) -> str: ...

    @property
    def active_tokens(self) -> int: ...

    @property
    def seconds(self) -> tuple[float, ...]: ...

    @property
    def shared(self) -> float: ...


T = TypeVar("T", bound=KeyedRow)


class KeyWork:
    """Work that each key was given, of those that have edits; whoever has least is behind."""

    def __init__(self) -> None:
        self._given: dict[str, float] = {}

    def present(self, keys: Iterable[str]) -> None:
        """These keys have edits, and no others. Who comes is given no time for when it was not
        there: it begins as the one that had least.
        """
        keys = tuple(keys)
        least = min((self._given[key] for key in keys if key in self._given), default=0.0)
        self._given = {key: self._given.get(key, least) for key in keys}

    def add(self, key: str, work: float) -> None:
        """A key was given so much more."""
        self._given[key] = self._given.get(key, 0.0) + work

    def behind(self, keys: Iterable[str]) -> str:
        """Of these the one that had least."""
        return min(keys, key=self._given.__getitem__)

    def lag(self, key: str) -> float:
        """How much more the key has had that had most."""
        return max(self._given.values()) - self._given[key]


class KeyTurns:
    """Each of n keys moves on at least an nth as fast as it would alone, however many rows the
    others have.

    Rows of a key are as many as come, and each of them makes the step of all others longer. So
    where keys meet, none gives more work to a step than the key that has least, and what a step
    costs whatever its rows is shared: on a device on which more rows cost little all of them fit.
    A key's rows that do not fit take turns. Where keys' rows cannot share a step, their batches
    take turns by what each key was given.
    """

    def __init__(self) -> None:
        self._work = KeyWork()
        self._stepped: dict[str, int] = {}
        """Request id -> number of its last step."""
        self._step = 0

    def next(self, live: Sequence[KeyedRow]) -> str | None:
        """The key whose turn it is; None: all rows are one key's."""
        keys = dict.fromkeys(map(_whose, live))
        self._work.present(keys)
        if len(keys) < 2:
            self._stepped = {}
            return None
        return self._work.behind(keys)

    def rows(self, batch: Sequence[T], live: Sequence[KeyedRow]) -> tuple[T, ...]:
        """Of a batch those that step now.

        Args:
            batch: rows that may share a step.
            live: all rows; they are of several keys, and `next` was asked about them.
        """
        self._step += 1
        held: dict[str, float] = {}
        for ticket in live:
            held[_whose(ticket)] = held.get(_whose(ticket), 0.0) + _work(ticket)
        shared = max(ticket.shared for ticket in live)
        bound = min(held.values()) + shared * (1 - 1 / len(held))
        given: dict[str, float] = {}
        chosen = set()
        for ticket in sorted(batch, key=lambda ticket: self._stepped.get(ticket.request_id, 0)):
            key, work = _whose(ticket), _work(ticket)
            if key not in given or given[key] + work <= bound:
                given[key] = given.get(key, 0.0) + work
                chosen.add(ticket.request_id)
        for key, work in given.items():
            self._work.add(key, work + shared / len(given))
        ids = {ticket.request_id for ticket in live}
        self._stepped = {name: at for name, at in self._stepped.items() if name in ids}
        self._stepped.update(dict.fromkeys(chosen, self._step))
        return tuple(ticket for ticket in batch if ticket.request_id in chosen)


def _whose(ticket: KeyedRow) -> str:
    return scope_of(ticket.request_id)


def _work(ticket: KeyedRow) -> float:
    """What a step takes longer by this row: seconds, or tokens where nobody knows those."""
    if not ticket.seconds:
        return float(ticket.active_tokens)
    return ticket.seconds[0] - ticket.shared
