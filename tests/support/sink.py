"""What becomes of one edit in an engine."""

from __future__ import annotations

import threading
from typing import Any

from maskserve_engine.job import EngineEvent, Failed, Final


class Sink:
    """Collects one edit's events."""

    def __init__(self) -> None:
        self.events: list[EngineEvent] = []
        self.done = threading.Event()

    def __call__(self, event: EngineEvent) -> None:
        self.events.append(event)
        if isinstance(event, Final | Failed):
            self.done.set()

    def wait(self) -> Final | Failed:
        assert self.done.wait(60), "no final answer"
        last = self.events[-1]
        assert isinstance(last, Final | Failed)
        return last

    def final(self) -> Final:
        last = self.wait()
        assert isinstance(last, Final), last
        return last

    def error(self) -> Any:
        last = self.wait()
        assert isinstance(last, Failed), last
        return last.error
