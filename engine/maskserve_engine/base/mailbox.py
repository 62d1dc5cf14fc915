"""Commands to the engine's thread, and events from it.

Other threads put commands into the inbox; the engine's thread runs them between two steps. A
separate thread sends events to clients, so that neither a slow client nor a result that is still on
the device delays a step.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from maskserve_common.errors import EngineFailed
from maskserve_engine.base.job import EngineEvent, Sink

T = TypeVar("T")
_log = logging.getLogger(__name__)


class Inbox:
    """Commands for the engine's thread, run in the order of `put`."""

    def __init__(self) -> None:
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._open = True

    # Called from any thread.

    def put(self, command: Callable[[], None]) -> bool:
        """Queue a command; return False if the inbox is closed and nobody will run it."""
        with self._lock:
            if self._open:
                self._commands.put(command)
            return self._open

    def ask(self, question: Callable[[], T]) -> Future[T]:
        """Run `question` on the engine's thread and return a future of its result. The future
        raises EngineFailed if the inbox is closed.
        """
        answer: Future[T] = Future()

        def reply() -> None:
            try:
                answer.set_result(question())
            except Exception as error:
                answer.set_exception(error)

        if not self.put(reply):
            answer.set_exception(EngineFailed("the engine has stopped"))
        return answer

    # Called from the engine thread only.

    def empty(self) -> bool:
        return self._commands.empty()

    def run(self, wait_s: float) -> None:
        """Run the queued commands; wait at most `wait_s` seconds for the first."""
        try:
            command = self._commands.get(timeout=wait_s)
            while True:
                command()
                command = self._commands.get_nowait()
        except queue.Empty:
            return

    def close(self) -> None:
        """Take no more commands, and run those that have arrived."""
        with self._lock:
            self._open = False
        while not self._commands.empty():
            self._commands.get()()


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

    def send_when_ready(
        self,
        sink: Sink,
        make: Callable[[], EngineEvent],
        failed: Callable[[], EngineEvent] | None = None,
    ) -> None:
        """Send an event that `make` builds on this thread, where it may wait for the device. If
        `make` raises, send what `failed` returns (None: nothing).
        """

        def event() -> EngineEvent:
            try:
                return make()
            except Exception:
                if failed is None:
                    raise
                _log.exception("a result could not be copied from the device")
                return failed()

        self._queue.put((sink, event))

    def close(self, timeout_s: float) -> None:
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
