"""Waiting for gRPC calls so that Ctrl-C is safe at any moment.

gRPC takes locks in Python code, in the calling thread. KeyboardInterrupt can leave one held, or a
call half started, and a channel's `close` then waits for ever. So a call starts with interruptions
delayed (interrupts.py), and the caller waits in SimpleQueue.get, which is C code.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from queue import SimpleQueue
from typing import Any


class PendingAnswer:
    """The one answer of a call, from gRPC's future."""

    def __init__(self, call: Any) -> None:
        self._call = call
        self._done: SimpleQueue[Any] = SimpleQueue()
        call.add_done_callback(self._done.put)

    def get(self) -> Any:
        """Wait for the answer; raises as gRPC's `result` does."""
        return self._done.get().result()

    def cancel(self) -> None:
        """Cancel the call; no effect once it is done."""
        self._call.cancel()


class Answers:
    """The answers of a streaming call, read by a thread."""

    def __init__(self, call: Any) -> None:
        self._call = call
        self._read: SimpleQueue[Any] = SimpleQueue()
        threading.Thread(target=self._read_all, name="answers", daemon=True).start()

    def __iter__(self) -> Iterator[Any]:
        """Yield each answer; raises as gRPC's iterator does."""
        while (answer := self._read.get()) is not None:
            if isinstance(answer, Exception):
                raise answer
            yield answer

    def drain(self) -> None:
        """Read to the end, and ignore errors."""
        while not isinstance(self._read.get(), Exception | None):
            pass

    def cancel(self) -> None:
        """Cancel the call; no effect once it is done."""
        self._call.cancel()

    def _read_all(self) -> None:
        try:
            for answer in self._call:
                self._read.put(answer)
            self._read.put(None)
        except Exception as error:
            self._read.put(error)
