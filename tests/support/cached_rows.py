"""Templates primed and cached rows run without an engine, for the adapter of any family.

These checks hold for every family (tests/unit/engine/families/test_family_contract.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from maskserve_benchmarks.steps.replay import Replay
from maskserve_engine.base.job import EditJob
from maskserve_engine.cache.entries import PARTS, AnchorEntry
from maskserve_engine.cache.sizing import choose_kinds
from maskserve_engine.families.adapter import Adapter, EditRow
from maskserve_engine.families.encoder import Encoder
from maskserve_engine.planning.cost_model import cpu_rates, estimate
from maskserve_engine.planning.entry_bytes import FORMATS
from tests.fakes.jobs import tolerance

KINDS = ("dense", "project", "kv")
NOISE_SEED = 1234
_ANY_COSTS = estimate(cpu_rates())


class Primed:
    """A template's entries, and the row of the family's type that made them."""

    def __init__(
        self, adapter: Adapter, encoder: Encoder, job: EditJob, kind: str = "both",
        format: str = "model", stride: int = 1,
    ) -> None:  # fmt: skip
        anchors = adapter.anchors(adapter.tokens(job).total, 4, stride)
        _, height, width = job.moments.shape
        work, fmt = adapter.work(height, width), FORMATS["float32"]
        kind = "kv" if adapter.spec.encoder_picture else kind  # such models have no other entries
        kinds = choose_kinds(kind, work, fmt, _ANY_COSTS, 12.0)
        prompt = job.conditioning if adapter.spec.encoder_picture else encoder.priming_prompt()
        self.row: Any = adapter.priming_row(job, anchors, prompt, NOISE_SEED, kinds, format)
        self.entries: list[AnchorEntry] = []
        while self.row.step < self.row.steps:
            adapter.step([self.row], None)
            self.entries.append(self.row.take_entry())


def cached(replay: Replay, job: EditJob, primed: Primed) -> EditRow:
    """A cached row. At each step it reads the entry nearest in sigma."""
    entries = [
        min(primed.entries, key=lambda entry: abs(entry.anchor.sigma - sigma))
        for sigma, _ in replay.adapter.sigmas(job)
    ]
    return replay.cached_row(job, entries, NOISE_SEED)


def run(replay: Replay, rows: Sequence[EditRow], kind: str) -> None:
    """Take all steps of the rows together."""
    while live := [row for row in rows if row.step < row.steps]:
        replay.step(live, (kind,) * replay.adapter.blocks)


def result(replay: Replay, row: EditRow, kind: str = "dense") -> NDArray[np.float32]:
    """Latents of a row that runs alone."""
    run(replay, [row], kind)
    return row.result().array()


def assert_equal(latents: NDArray[np.float32], expected: NDArray[np.float32]) -> None:
    """Check that latents agree within the tolerance of design §8."""
    assert np.abs(latents - expected).max() <= tolerance(expected)


def check_all_active(replay: Replay, encoder: Encoder, job: EditJob, *kinds: str) -> None:
    """Check that a cached row equals the dense row if all tokens are computed, with each kind of
    blocks.
    """
    job = replace(job, edit_mask=np.full_like(job.edit_mask, 255))
    primed, dense = Primed(replay.adapter, encoder, job), replay.adapter.dense_row(job)
    expected = result(replay, dense)
    for kind in kinds:
        assert_equal(result(replay, cached(replay, job, primed), kind), expected)


def check_ring_over_all(replay: Replay, encoder: Encoder, job: EditJob, kind: str) -> None:
    """Check that a ring's tokens take the dense row's inputs, whose mask is the small one. The
    job's ring reaches from a corner over the whole picture.
    """
    job = replace(job, edit_mask=np.zeros_like(job.edit_mask))
    job.edit_mask[-3:, :5] = 255
    row = cached(replay, job, Primed(replay.adapter, encoder, job))
    dense = replay.adapter.dense_row(job)
    assert_equal(result(replay, row, kind), result(replay, dense))


def check_entries_unwritten(replay: Replay, encoder: Encoder, job: EditJob) -> None:
    """Check that rows read entries and never write them."""
    primed = Primed(replay.adapter, encoder, job)
    tensors = [coded.data for entry in primed.entries for block in entry.blocks for part in PARTS
               for coded in block.part(part)]  # fmt: skip
    copies = [data.clone() for data in tensors]
    for kind in KINDS:
        run(replay, [cached(replay, job, primed)], kind)
    assert all(torch.equal(a, b) for a, b in zip(copies, tensors, strict=True))


def check_mixed_batch(
    replay: Replay, jobs: Sequence[EditJob], primed: Sequence[Primed], kind: str
) -> None:
    """Check that dense and cached rows that join, leave and are cancelled do not change each other.

    Args:
        replay: of the adapter.
        jobs: edits of rows that may share a batch.
        primed: the template of each edit.
        kind: of the cached rows' blocks.
    """

    def rows() -> list[EditRow]:
        return [
            replay.adapter.dense_row(job) if number % 3 == 0 else cached(replay, job, template)
            for number, (job, template) in enumerate(zip(jobs, primed, strict=True))
        ]

    alone, together = rows(), rows()
    for row in alone:
        run(replay, [row], kind)
    run(replay, together[:2], kind)  # these rows leave before the others join
    late = together[2:]
    replay.step(late[:2], (kind,) * replay.adapter.blocks)
    late.pop(1)  # cancelled mid-flight
    run(replay, late, kind)
    done = [(one, other) for one, other in zip(alone, together, strict=True)
            if other.step == other.steps]  # fmt: skip
    assert len(done) >= len(jobs) - 1
    for one, other in done:
        assert_equal(other.result().array(), one.result().array())


def check_step_without_anchor(replay: Replay, job: EditJob, primed: Primed) -> None:
    """Check that a step without an anchor equals the all-dense plan. Both compute the cached tokens
    from the template's inputs.
    """
    with_plan, without = cached(replay, job, primed), cached(replay, job, primed)
    replay.reads(without, [None] * without.steps)
    assert_equal(result(replay, without, "kv"), result(replay, with_plan, "dense"))
