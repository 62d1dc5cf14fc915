"""A circuit breaker that ejects a worker after failed edits. The caller gives the time."""

from __future__ import annotations

from maskserve_router.config import Faults


class Breaker:
    """Closed: edits pass. Open: no edit passes for a time. Half open: one trial edit decides.

    The ejection time doubles with each ejection until an edit succeeds as a trial.
    """

    def __init__(self, faults: Faults) -> None:
        self._faults = faults
        self._failures = 0
        self._ejections = 0
        self._until = 0.0
        self._trial: str | None = None

    @property
    def ejected(self) -> bool:
        """True if open or half open."""
        return self._until > 0.0

    def allows(self, now: float) -> bool:
        """Return True if an edit may be sent now."""
        return not self.ejected or (now >= self._until and self._trial is None)

    def record_sent(self, request_id: str) -> None:
        """Record that an edit was sent; at an ejected worker it becomes the trial."""
        if self.ejected:
            self._trial = request_id

    def record_success(self, request_id: str) -> None:
        """Close the breaker if the edit was the trial, and forget earlier failures."""
        self._failures = 0
        if self._trial == request_id:
            self._until, self._trial = 0.0, None
            self._ejections = 0

    def record_failure(self, request_id: str, now: float, *, may_eject: bool) -> bool:
        """Count a failed edit.

        Args:
            request_id: id of the try.
            now: seconds of the caller's clock.
            may_eject: False if too many workers are ejected already.

        Returns:
            True if this failure ejected the worker.
        """
        self._failures += 1
        if self.ejected:
            if self._trial != request_id:
                return False  # sent before the ejection
        elif self._failures < self._faults.failures_to_eject or not may_eject:
            return False
        wait = self._faults.eject_s * 2.0 ** min(self._ejections, 30)
        self._until = now + min(wait, self._faults.max_eject_s)
        self._ejections += 1
        self._trial = None
        return True

    def record_unknown(self, request_id: str) -> None:
        """Record that an edit ended and told nothing about the worker."""
        if self._trial == request_id:
            self._trial = None
