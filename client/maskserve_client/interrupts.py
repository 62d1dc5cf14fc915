"""Delays interruptions to a safe moment: an interrupted start would leave resources behind.

gRPC, for example, waits for ever in a channel's `close` if KeyboardInterrupt comes while a call
starts.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_NUMBERS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def deferred() -> Iterator[None]:
    """Delay SIGINT and SIGTERM to the end of the block.

    In threads other than the main one it does nothing: no handler runs there.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    pending_signals: list[int] = []

    def record(number: int, frame: FrameType | None) -> None:
        pending_signals.append(number)

    # None is a handler outside Python: it raises nothing here, and could not be restored.
    handled_signals = [number for number in _NUMBERS if signal.getsignal(number) is not None]
    previous = {number: signal.signal(number, record) for number in handled_signals}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        for pending_signal in pending_signals:
            signal.raise_signal(pending_signal)
