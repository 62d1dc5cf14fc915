"""Events to clients leave on a thread of their own: neither a slow client nor a result that has yet
to come from the device holds up a step.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

from maskserve_engine.job import EngineEvent, Sink

_log = logging.getLogger(__name__)


class OutputThread:
    """Delivers events in the order in which they were sent."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[Sink, Callable[[], EngineEvent]] | None]
        self._queue = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="engine-output", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def send(self, sink: Sink, event: EngineEvent) -> None:
        self._queue.put((sink, lambda: event))

    def send_made(
        self, sink: Sink, make: Callable[[], EngineEvent], failed: EngineEvent | None = None
    ) -> None:
        """Send an event that is made on this thread, where it may wait for the device.

        Args:
            sink: of the edit.
            make: the event.
            failed: what is sent if that raises; None: nothing.
        """

        def made() -> EngineEvent:
            try:
                return make()
            except Exception:
                if failed is None:
                    raise
                _log.exception("a result did not come from the device")
                return failed

        self._queue.put((sink, made))

    def close(self, timeout_s: float) -> None:
        """Deliver what was sent, then end."""
        self._queue.put(None)
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            sink, make = item
            try:
                sink(make())
            except Exception:
                # One client's broken sink is no other client's trouble.
                _log.exception("an event could not be delivered")
