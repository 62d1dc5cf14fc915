"""Ejection of a worker that fails edits, and its way back; reads no clock."""

from __future__ import annotations

from maskserve_router.config import Faults


class Breaker:
    """Closed: edits go through. Open: none do, for a time. Half open: one does, and decides.

    Each time the worker is ejected anew without having served well in between, the time doubles.
    """

    def __init__(self, faults: Faults) -> None:
        self._faults = faults
        self._failures = 0
        self._ejections = 0
        self._until = 0.0
        self._trial: str | None = None

    @property
    def ejected(self) -> bool:
        """Open or half open."""
        return self._until > 0.0

    def allows(self, now: float) -> bool:
        """Whether an edit may be sent."""
        return not self.ejected or (now >= self._until and self._trial is None)

    def sent(self, request_id: str) -> None:
        """An edit was sent; of an ejected worker it is the one that decides."""
        if self.ejected:
            self._trial = request_id

    def succeeded(self, request_id: str) -> None:
        """The worker answered an edit as it should."""
        self._failures = 0
        if self._trial == request_id:
            self._until, self._trial = 0.0, None
            self._ejections = 0

    def failed(self, request_id: str, now: float, *, may_eject: bool) -> bool:
        """The worker failed an edit.

        Args:
            request_id: of the edit.
            now: seconds of the caller's clock.
            may_eject: whether another worker may be ejected.

        Returns:
            whether the worker was ejected just now.
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

    def gave_up(self, request_id: str) -> None:
        """An edit ended without telling anything of the worker: its client left."""
        if self._trial == request_id:
            self._trial = None
