"""Waiting for gRPC where Ctrl-C may come at any moment.

gRPC takes locks in Python code, in the thread that calls it. KeyboardInterrupt can leave one held,
or a call half started, and a channel's `close` then waits for good. So a call is started with
interruptions held back (interrupts.py), and is waited for in SimpleQueue.get, which is C code.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from queue import SimpleQueue
from typing import Any


class PendingAnswer:
    """The one answer of a call, by gRPC's future of it."""

    def __init__(self, call: Any) -> None:
        self._call = call
        self._done: SimpleQueue[Any] = SimpleQueue()
        call.add_done_callback(self._done.put)

    def get(self) -> Any:
        """Wait for the answer; raises as gRPC's `result` does."""
        return self._done.get().result()

    def cancel(self) -> None:
        """No effect once it is done."""
        self._call.cancel()


class Answers:
    """The answers of a streaming call, read by a thread as they come."""

    def __init__(self, call: Any) -> None:
        self._call = call
        self._read: SimpleQueue[Any] = SimpleQueue()
        threading.Thread(target=self._read_all, name="answers", daemon=True).start()

    def __iter__(self) -> Iterator[Any]:
        """Each answer; raises as gRPC's iterator does."""
        while (answer := self._read.get()) is not None:
            if isinstance(answer, Exception):
                raise answer
            yield answer

    def drain(self) -> None:
        """Read to the end, whatever that is."""
        while not isinstance(self._read.get(), Exception | None):
            pass

    def cancel(self) -> None:
        """No effect once it is done."""
        self._call.cancel()

    def _read_all(self) -> None:
        try:
            for answer in self._call:
                self._read.put(answer)
            self._read.put(None)
        except Exception as error:
            self._read.put(error)
