"""`code_path` counts what an edit enters, and not what an idle engine does meanwhile."""

from __future__ import annotations

import time
from pathlib import Path

from maskserve_benchmarks.edits.code_path import CallCounter
from maskserve_engine.loop.engine import Engine
from maskserve_engine.start.assembly import load_engine
from tests.fakes.jobs import config_of


def test_idle_turns_of_the_engine_do_not_count(tiny_fill: Path) -> None:
    config = config_of(tiny_fill, engine={"heartbeat_s": 0.01})
    with CallCounter() as counter:
        engine = load_engine(config)
        engine.start()
        try:
            engine.heartbeat().result(10.0)
            idle = counter.count(lambda: time.sleep(0.2))
            counts = counter.count(lambda: [engine.heartbeat().result(10.0) for _ in range(2)])
        finally:
            engine.close(5.0)
    assert not idle
    assert counts[Engine.heartbeat.__code__] == 2
    assert counts[Engine.state.fget.__code__] >= 1  # in the turn that ran the first question
