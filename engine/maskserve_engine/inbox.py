"""What other threads ask of the engine's thread: commands, run between two steps."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from maskserve_core.errors import EngineFailed

T = TypeVar("T")


class Inbox:
    """Commands in the order in which they came."""

    def __init__(self) -> None:
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._door = threading.Lock()
        self._open = True

    # Called from any thread.

    def put(self, command: Callable[[], None]) -> bool:
        """False when nobody will run it any more."""
        with self._door:
            if self._open:
                self._commands.put(command)
            return self._open

    def ask(self, question: Callable[[], T]) -> Future[T]:
        """What the question comes to; EngineFailed when nobody will answer it any more."""
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
        """Run what came in; wait so long for something to come."""
        try:
            command = self._commands.get(timeout=wait_s)
            while True:
                command()
                command = self._commands.get_nowait()
        except queue.Empty:
            return

    def close(self) -> None:
        """Take no more commands, and run those that came in meanwhile."""
        with self._door:
            self._open = False
        while not self._commands.empty():
            self._commands.get()()
