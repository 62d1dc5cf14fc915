"""Responses of calls into decoupled models, kept until Triton's stub has let go of them.

The stub (2.51) has a reference of its own to a call's responses, and drops it in a thread of its
own soon after the last one was taken. Were that reference the last, their arrays would be freed
without Python's lock, and sooner or later the process would die of a corrupted heap. So Python's
reference is made the last: a call's responses are kept for some time after their end.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator
from typing import Any

_KEPT_S = 2.0
"""The stub's thread needs milliseconds; on a busy machine it may be hundreds."""


class KeepAlive:
    """Holds on to things for some time, then lets go of them in a thread of Python's.

    Args:
        kept_s: seconds.
    """

    def __init__(self, kept_s: float) -> None:
        self._kept_s = kept_s
        self._held: queue.SimpleQueue[tuple[float, Any]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def keep(self, thing: Any) -> None:
        self._held.put((time.monotonic() + self._kept_s, thing))
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="keeper", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        while True:
            until, thing = self._held.get()
            time.sleep(max(0.0, until - time.monotonic()))
            del thing


_KEEPER = KeepAlive(_KEPT_S)
"""Of this process, as the stub is."""


def responses_of(call: Any, keeper: KeepAlive = _KEEPER) -> Iterator[Any]:
    """The responses of `call` (a pb_utils.InferenceRequest), one after the other. Blocks."""
    responses = call.exec(decoupled=True)
    try:
        yield from responses
    finally:
        keeper.keep(responses)
