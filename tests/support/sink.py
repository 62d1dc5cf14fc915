"""The events of one edit in an engine."""

from __future__ import annotations

import threading
from typing import Any

from maskserve_engine.base.job import EngineEvent, Failed, FinalEvent


class Sink:
    """Collects one edit's events."""

    def __init__(self) -> None:
        self.events: list[EngineEvent] = []
        self.done = threading.Event()

    def __call__(self, event: EngineEvent) -> None:
        self.events.append(event)
        if isinstance(event, FinalEvent | Failed):
            self.done.set()

    def wait(self) -> FinalEvent | Failed:
        assert self.done.wait(240), "no final answer"  # restarted ranks take long on a busy machine
        last = self.events[-1]
        assert isinstance(last, FinalEvent | Failed)
        return last

    def final(self) -> FinalEvent:
        last = self.wait()
        assert isinstance(last, FinalEvent), last
        return last

    def error(self) -> Any:
        last = self.wait()
        assert isinstance(last, Failed), last
        return last.error
