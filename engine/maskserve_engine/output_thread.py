"""Events to clients leave on a thread of their own: a slow client never holds up a step."""

from __future__ import annotations

import logging
import queue
import threading

from maskserve_engine.job import EngineEvent, Sink

_log = logging.getLogger(__name__)


class OutputThread:
    """Delivers events in the order in which they were sent."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[Sink, EngineEvent] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="engine-output", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def send(self, sink: Sink, event: EngineEvent) -> None:
        self._queue.put((sink, event))

    def close(self, timeout_s: float) -> None:
        """Deliver what was sent, then end."""
        self._queue.put(None)
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            sink, event = item
            try:
                sink(event)
            except Exception:
                # One client's broken sink is no other client's trouble.
                _log.exception("an event could not be delivered")
