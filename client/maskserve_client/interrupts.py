"""Interruptions at a moment that suits: halfway into a start, what was begun would be left.

gRPC, for one, waits for good in a channel's `close` if KeyboardInterrupt comes as a call starts.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_NUMBERS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def held_back() -> Iterator[None]:
    """SIGINT and SIGTERM that come within the block take effect at its end.

    In other threads than the main one it does nothing: no handler runs there.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    pending_signals: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        pending_signals.append(number)

    # None is a handler that is not Python's: it raises nothing here, and could not be restored.
    handled_signals = [number for number in _NUMBERS if signal.getsignal(number) is not None]
    previous = {number: signal.signal(number, note) for number in handled_signals}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        for late in pending_signals:
            signal.raise_signal(late)
