"""When an edit is due that does not say so, and how one that was due has ended."""

from __future__ import annotations

from collections.abc import Sequence

from maskserve_common.errors import DeadlineExceeded, EngineFailed, Overloaded

OK = "OK"
SIDES = (256, 512, 1024)
"""Sides of the squares that bound the first times; larger edits have the last time."""
SLO_OUTCOMES = ("met", "late", "deadline", "refused", "failed")
"""Outcomes of an edit with a due time; all but `met` are misses."""
_MISSED = {
    DeadlineExceeded.code: "deadline",
    Overloaded.code: "refused",
    EngineFailed.code: "failed",
}


def due_by_size(times_ms: Sequence[int], pixels: int) -> int | None:
    """Return the milliseconds from acceptance to the due time; None: there is none.

    Args:
        times_ms: one for each of SIDES and one more; empty: no such edit is due.
        pixels: pixels that the model computes.
    """
    if not times_ms:
        return None
    return times_ms[sum(pixels > side * side for side in SIDES)]


def slo_outcome(code: str, slack_s: float) -> str | None:
    """Return one of SLO_OUTCOMES; None where the client is the cause: a mistake in its request, or
    a cancel.

    Args:
        code: `OK`, or the error's.
        slack_s: seconds that were left when an edit was answered.
    """
    if code == OK:
        return "met" if slack_s >= 0.0 else "late"
    return _MISSED.get(code)
