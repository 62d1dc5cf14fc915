"""Edits that wait for their template to be primed, or fetched."""

from __future__ import annotations

from maskserve_core.errors import Overloaded


class WaitingEdits:
    """Request ids, by the key of the template they wait for.

    Args:
        most: edits that may wait.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._ids: dict[str, list[str]] = {}

    def add(self, key: str, request_id: str) -> None:
        """
        Raises:
            Overloaded: no more may wait.
        """
        waiting = sum(map(len, self._ids.values()))
        if waiting >= self._most:
            raise Overloaded(f"{waiting} edits wait for their template; try again later")
        self._ids.setdefault(key, []).append(request_id)

    def remove(self, key: str, request_id: str) -> None:
        """It is answered; else a later edit of this id would be taken for it."""
        self._ids[key].remove(request_id)

    def take(self, key: str) -> list[str]:
        """All that wait for a template, in the order in which they came; they wait no longer."""
        return self._ids.pop(key, [])
