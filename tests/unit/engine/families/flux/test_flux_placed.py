"""Keys and values that stay in place between steps against those that each step places anew."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from maskserve_benchmarks.steps.replay import in_memory
from maskserve_benchmarks.steps.step_rig import Bench
from maskserve_engine.batch import forward as forward_module
from maskserve_engine.families.flux.adapter import FluxBatch
from maskserve_engine.families.mmdit.rows import FlowRow
from maskserve_engine.families.mmdit.weights import FluxWeights
from maskserve_engine.layers.scatter_kv import KvSource, scatter_kv
from tests.support.draws import fresh_rng

pytestmark = pytest.mark.spread("folder")

BLOCKS = (1, 2)
ROOM = 2**26


@pytest.fixture(scope="module")
def bench() -> Bench:
    return Bench("demo", BLOCKS, torch.float32, torch.device("cpu"), "int4")


class Run:
    """Rows, equal for every run of the bench, whose batch has so much room."""

    def __init__(self, bench: Bench, room: int, ratios: Sequence[float | None]) -> None:
        self.weights: FluxWeights = replace(bench.weights, placed_bytes=room)
        torch.manual_seed(1)
        self.rows = [bench.row(ratio, seed) for seed, ratio in enumerate(ratios)]
        self.batch: FluxBatch | None = None

    def step(self, rows: Sequence[FlowRow], kinds: Sequence[str]) -> list[torch.Tensor]:
        with torch.inference_mode():
            for row in rows:
                row.step %= row.steps
            self.batch = FluxBatch.of(rows, self.batch)
            self.batch.step(self.weights, kinds)
        return [row.latents.clone() for row in rows]


def test_rows_are_where_they_would_be_if_every_step_placed_their_keys_anew(bench: Bench) -> None:
    """Rows join, leave and turn to other entries, and plans change: bit for bit the same."""
    rng = fresh_rng()
    bench.fill_entry("both")
    entries = [bench.entry]
    bench.fill_entry("both")
    entries.append(bench.entry)
    ratios = (0.1, 0.3, None, 0.2)
    runs = [Run(bench, room, ratios) for room in (ROOM, 0)]
    chosen = [True] * len(ratios)
    for _ in range(40):
        kinds = rng.choice(["kv", "kv", "kv", "project", "dense"], sum(BLOCKS))
        if rng.random() < 0.3:
            chosen = [bool(flag) for flag in rng.random(len(ratios)) < 0.7]
            chosen[int(rng.integers(len(ratios)))] = True
        turning, to = int(rng.integers(len(ratios))), int(rng.integers(2))
        turns = rng.random() < 0.4 and ratios[turning] is not None
        latents = []
        for run in runs:
            if turns:
                row = run.rows[turning]
                assert row.selection is not None
                row.entry = in_memory(entries[to], row.selection)
            rows = [row for row, into in zip(run.rows, chosen, strict=True) if into]
            latents.append(run.step(rows, kinds.tolist()))
        assert all(map(torch.equal, *latents)), kinds


@pytest.mark.parametrize(
    ("room", "placed"), [(ROOM, [6, 0, 0, 3, 0, 0, 3]), (2**19, [6] * 5 + [3, 6])]
)
def test_entries_are_placed_once_where_there_is_room(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, room: int, placed: list[int]
) -> None:
    """At the fourth step one of two rows has turned to another entry, and it alone reads it. The
    sixth step is the other's alone, which keeps what it has; what leaves has to be read again.
    Where the keys of all blocks do not fit none are kept.
    """
    counted: list[int] = []

    def counting(sources: Sequence[KvSource | None], *rest: Any) -> None:
        counted[-1] += sum(source is not None for source in sources)
        scatter_kv(sources, *rest)

    monkeypatch.setattr(forward_module, "scatter_kv", counting)
    bench.fill_entry("kv")
    run = Run(bench, room, (0.1, 0.3))
    for step in range(7):
        counted.append(0)
        if step == 3:
            row = run.rows[1]
            assert row.selection is not None
            row.entry = in_memory(bench.entry, row.selection)
        run.step(run.rows[: 1 if step == 5 else 2], ("kv",) * 3)
    assert counted == placed
