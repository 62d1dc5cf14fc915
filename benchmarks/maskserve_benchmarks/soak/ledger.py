"""Reports of visitors: how each visit ended and how long it took."""

from __future__ import annotations

import statistics
import threading
from collections import Counter
from dataclasses import dataclass

_MAX_PROBLEMS = 20


@dataclass(frozen=True, slots=True)
class Window:
    """The visits since the last call of `window`."""

    visits: int
    per_s: float
    p50_ms: float | None
    """Median of edits of hot pictures, which all have the same mix; None without edits."""
    unexpected: int


class Ledger:
    """Counts visits; safe for threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ends: dict[str, Counter[str]] = {}
        self._problems: list[str] = []
        self._unexpected = 0
        self._visits = 0
        self._seconds: list[float] = []

    def book(self, kind: str, end: str, seconds: float) -> None:
        with self._lock:
            self._ends.setdefault(kind, Counter())[end] += 1
            self._visits += 1
            if kind == "hot":
                self._seconds.append(seconds)

    def complain(self, kind: str, problem: str) -> None:
        """Count an unexpected answer."""
        with self._lock:
            self._unexpected += 1
            if len(self._problems) < _MAX_PROBLEMS:
                self._problems.append(f"{kind}: {problem}")
        self.book(kind, "unexpected", 0.0)

    def window(self, seconds: float) -> Window:
        """Return the visits since the last call, `seconds` ago."""
        with self._lock:
            visits, times, self._visits, self._seconds = self._visits, self._seconds, 0, []
            p50 = round(1e3 * statistics.median(times), 2) if times else None
            return Window(visits, round(visits / max(seconds, 1e-9), 3), p50, self._unexpected)

    @property
    def unexpected(self) -> int:
        return self._unexpected

    def problems(self) -> list[str]:
        """Return the first unexpected answers, in words."""
        with self._lock:
            return list(self._problems)

    def ends(self) -> dict[str, dict[str, int]]:
        """Return kind of visit → how it ended → how often."""
        with self._lock:
            return {kind: dict(ends) for kind, ends in sorted(self._ends.items())}
