"""Events made on the output thread: in their order, and when making one fails."""

from __future__ import annotations

from maskserve_common.errors import EngineFailed
from maskserve_engine.base.job import EngineEvent, Failed, ProgressEvent
from maskserve_engine.base.mailbox import OutputThread


def lost() -> EngineEvent:
    raise RuntimeError("the device is gone")


def test_an_answer_that_does_not_come_is_told_and_holds_up_nobody() -> None:
    """A preview that does not come is left out: the answer is still to come."""
    engine_events: list[EngineEvent] = []
    failed = Failed(EngineFailed("the result did not come from the device"))
    output = OutputThread()
    output.start()
    output.send(engine_events.append, ProgressEvent(1, 4))
    output.send_when_ready(engine_events.append, lost)
    output.send_when_ready(engine_events.append, lambda: ProgressEvent(2, 4))
    output.send_when_ready(engine_events.append, lost, lambda: failed)
    output.send(engine_events.append, ProgressEvent(3, 4))
    output.close(10.0)
    assert engine_events == [ProgressEvent(1, 4), ProgressEvent(2, 4), failed, ProgressEvent(3, 4)]
