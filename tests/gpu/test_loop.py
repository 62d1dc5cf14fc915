"""The engine's own loop on the device: admission, steps, loads and answers wait for nothing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from msgspec import structs

from maskserve_engine.families.registry import Encoder, load_encoder
from maskserve_engine.start.assembly import load_engine
from tests.fakes.jobs import config_of
from tests.support.engines import accept, job
from tests.support.no_waits import nothing_waits
from tests.support.sink import Sink


class Loop:
    """An engine that a test turns by hand."""

    def __init__(self, folder: Path, device: torch.device, encoder: Encoder, disk: str) -> None:
        config = config_of(
            folder,
            model={"device": str(device)},
            cache={"budget_bytes": 2**28, "disk_dir": disk, "disk_bytes": 2**28 if disk else 0},
        )
        self.engine = load_engine(config)
        self.engine.cache.prompt = lambda: encoder.encode_prompt("")

    def turn(self) -> None:
        for run in self.engine.manager.schedule():
            self.engine.runner.step(self.engine.manager.running(run))

    def until_answered(self, sink: Sink) -> None:
        self.engine.output.start()
        while not sink.events:
            self.turn()

    def close(self) -> None:
        self.engine.output.close(5.0)
        self.engine.cache.store.close()


@pytest.mark.parametrize("tier", ["device", "disk"])
def test_steady_steps_of_the_engine_wait_for_nothing(
    tiny_fill: Path, device: torch.device, tmp_path: Path, tier: str
) -> None:
    """Dense and cached rows side by side; their activations on the device, or in files."""
    encoder = load_encoder(config_of(tiny_fill))
    loop = Loop(tiny_fill, device, encoder, str(tmp_path) if tier == "disk" else "")
    engine, manager = loop.engine, loop.engine.manager
    first = job(encoder, 3, "first", cache="require")
    with engine.adapter.session():
        sink = Sink()
        accept(engine, first, sink)
        loop.until_answered(sink)
        assert sink.final().meta["cache"] == "hit"
        if tier == "disk":
            assert engine.cache.store.settle()
            engine.cache.store.memory.evict(engine.cache.key_of(first))
        long = structs.replace(first.request.settings, num_inference_steps=40, cache="auto")
        joining = {}
        for name, cache, steps in (
            ("cached", "auto", 40),
            ("dense", "off", 40),
            ("joins", "auto", 4),
        ):
            settings = structs.replace(long, cache=cache, num_inference_steps=steps)
            request = replace(first.request, request_id=name, settings=settings)
            joining[name] = replace(first, request=request)
        for name in ("cached", "dense"):
            accept(engine, joining[name], Sink())
        assert engine.cache.store.settle()
        for _ in range(3):
            loop.turn()
        assert manager.edits["cached"].tally.kinds().get("kv")
        late = Sink()
        with nothing_waits(device):
            loop.turn()
            accept(engine, joining["joins"], late)
            for _ in range(5):
                loop.turn()
            assert late.final().meta["cache"] == "hit"
        assert {name: edit.tally.done for name, edit in manager.edits.items()} == {
            "cached": 9,
            "dense": 9,
        }
        for name in ("cached", "dense"):
            manager.cancel(name)
    loop.close()
