"""The first edit of a template by where it lies, and the ways in which bytes may travel."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from maskserve_core.config import cores
from maskserve_core.contracts.entry_key import Anchor
from maskserve_core.planning.cost_model import estimate
from maskserve_engine.cache.entries import AnchorEntry
from maskserve_engine.cache.entry_file import FileTensor, OpenFile
from maskserve_engine.cache.folder_tier import FolderTier
from maskserve_engine.cache.loader import Loader
from maskserve_engine.cache.memory_tier import MemoryTier
from maskserve_engine.cache.movers import HostMover, gathered
from maskserve_engine.cache.reader import EntryReader
from maskserve_engine.cache.store import Store
from maskserve_engine.cache.tier import Note, Tier
from maskserve_engine.measured_costs import MeasuredCosts
from maskserve_engine.step_planner import Reading, StepPlanner, wants_of
from maskserve_harness.benchmarks.pipeline_rig import tokens
from maskserve_harness.benchmarks.profile_costs import least
from maskserve_harness.benchmarks.step_rig import Bench
from maskserve_harness.benchmarks.timing import forget

TIERS = ("device", "host", "disk")
_BIG = 2**40
_GRID, _WIDTH, _GAP = 64, 3072, 8
"""Of FLUX at 1024x1024; runs of tokens with a smaller gap between them travel as one."""
_PAGE = 4096


@dataclass
class FirstEdit:
    tier: str
    """Where the template lies; `dense`: nowhere, and every step computes all tokens."""
    anchors: int
    edit_s: float
    first_step_s: float
    dense_steps: int
    """Steps that computed all tokens because nothing could be read yet."""
    stall_ms: float
    read_mib: float
    """By the storage layer: what the disk sent, page cache apart."""


def first_edits(bench: Bench, disk: Path, mask_ratio: float, steps: int) -> list[FirstEdit]:
    """Of a template with one anchor and with seven, from each tier and from none."""
    edits = [first_edit(bench, "dense", disk, 1, mask_ratio, steps)]
    for anchors in (1, 7):
        edits += [first_edit(bench, tier, disk, anchors, mask_ratio, steps) for tier in TIERS]
    return edits


def first_edit(
    bench: Bench, tier: str, disk: Path, anchors: int, mask_ratio: float, steps: int
) -> FirstEdit:
    """One edit by a worker that has just started, its costs estimated, the template in one tier.

    The page cache is told to forget what lies on the disk.
    """
    names = [Anchor(0.5, 500.0 + i) for i in range(anchors)]
    walk = [names[n * anchors // steps] for n in range(steps)]
    row = bench.row(mask_ratio, seed=7)
    assert row.selection is not None
    bench.step([row], "dense")  # sets kernels up
    row.entry = None
    planner = StepPlanner(MeasuredCosts(estimate("cpu", "float32", cores=cores())))
    reading_of = bench.work.totals([tokens(row)])
    with _store(bench, tier, disk, names) as store:
        read, taken, dense, begin = _read_bytes(), [], 0, time.perf_counter()
        reader = EntryReader(store, "k", walk if tier != "dense" else [None] * steps, row.selection)
        for n in range(steps):
            step = time.perf_counter()
            handle = row.entry = reader.turn_to(n)
            if handle is None:
                dense += 1
                bench.step([row], "dense")
            else:
                planned = planner.plan(
                    bench.work, [Reading(reading_of, handle.load, reader.stays(n))], None
                )
                handle.want(wants_of(planned.plan), n)
                ahead = reader.look_ahead(n)
                if ahead is not None:
                    ahead[0].want(wants_of(planned.ahead), ahead[1])
                bench.step([row], planned.plan.kinds)
            taken.append(time.perf_counter() - step)
        seconds = time.perf_counter() - begin
        reader.release()
        mib = (_read_bytes() - read) / 2**20
    return FirstEdit(
        tier, anchors, round(seconds, 3), round(taken[0], 3), dense,
        round(1e3 * reader.stalled, 2), round(mib, 1),
    )  # fmt: skip


@contextmanager
def _store(bench: Bench, tier: str, disk: Path, anchors: Sequence[Anchor]) -> Iterator[Store]:
    """A store whose template lies in one tier."""
    entries = [AnchorEntry(anchor, bench.entry.blocks) for anchor in anchors]
    note = Note("t", len(anchors), 1.0)
    with (
        tempfile.TemporaryDirectory(dir="/dev/shm") as near,
        tempfile.TemporaryDirectory(dir=disk) as far,
    ):
        folders = [FolderTier("host", near, _BIG), FolderTier("disk", far, _BIG)]
        memory = MemoryTier(_BIG)
        tiers: list[Tier] = [memory, *folders]
        for each in tiers:
            if each.name == tier:
                for entry in entries:
                    each.put("k", entry, note)
        for path in Path(far).rglob("*.safetensors"):
            forget(path)
        store = Store(memory, folders, None, Loader(HostMover()))
        store.settle()
        try:
            yield store
        finally:
            store.settle()
            store.check_integrity()
            store.close()


def _read_bytes() -> int:
    """That this process had storage send."""
    for line in Path("/proc/self/io").read_text(encoding="ascii").splitlines():
        if line.startswith("read_bytes:"):
            return int(line.split()[1])
    raise OSError("this system does not say what was read")


@dataclass
class Travel:
    """Moving the inactive tokens of one int8 tensor of FLUX at 1024x1024, by way."""

    mask_ratio: float
    gathered_bytes: float
    """Over the bytes of the tokens, as the next two."""
    runs_bytes: float
    whole_bytes: float
    gathered_pages: float
    """Bytes of the 4 KiB pages that hold the tokens, over the same: what a file is read by."""
    gathered_ms: float
    runs_ms: float
    whole_ms: float
    """All tokens, and then those of the row taken on the device."""
    mapped_ms: float
    """Gathered from a mapped file of a tmpfs that was read before, as the next from its file."""
    file_ms: float


def travels(ratios: Sequence[float], repeat: int) -> list[Travel]:
    """Square masks of these ratios in the middle of the picture."""
    torch.manual_seed(0)
    source = torch.randint(-127, 127, (_GRID * _GRID, _WIDTH), dtype=torch.int8)
    return [_travel(source, m, repeat) for m in ratios]


def _travel(source: torch.Tensor, mask_ratio: float, repeat: int) -> Travel:
    side = round(_GRID * mask_ratio**0.5)
    low = (_GRID - side) // 2
    inactive = np.ones((_GRID, _GRID), bool)
    inactive[low : low + side, low : low + side] = False
    ids = np.flatnonzero(inactive)
    runs = _runs(ids)
    ideal = len(ids) * _WIDTH
    pages = np.unique(np.concatenate([ids * _WIDTH, ids * _WIDTH + _WIDTH - 1]) // _PAGE)
    out = torch.empty(source.shape, dtype=source.dtype)
    index = torch.from_numpy(ids)

    def copy_runs() -> None:
        for begin, end in runs:
            gathered(source[begin:end], None, out[begin:end])

    def whole() -> None:
        gathered(source, None, out)
        out.index_select(0, index)

    with tempfile.NamedTemporaryFile(dir="/dev/shm") as file:
        file.write(source.numpy().tobytes())
        file.flush()
        mapped = torch.from_file(
            file.name, shared=False, size=source.numel(), dtype=source.dtype
        ).view(source.shape)
        stored = FileTensor(OpenFile(file.name), 0, source.dtype, source.shape, source.nbytes)
        mapped_s = least(lambda: gathered(mapped, ids, out[: len(ids)]), repeat)
        file_s = least(lambda: gathered(stored, ids, out[: len(ids)]), repeat)
    return Travel(
        round(len(ids) and 1 - len(ids) / len(source), 3),
        1.0,
        round(sum(end - begin for begin, end in runs) * _WIDTH / ideal, 3),
        round(source.nbytes / ideal, 3),
        round(len(pages) * _PAGE / ideal, 3),
        round(1e3 * least(lambda: gathered(source, ids, out[: len(ids)]), repeat), 3),
        round(1e3 * least(copy_runs, repeat), 3),
        round(1e3 * least(whole, repeat), 3),
        round(1e3 * mapped_s, 3),
        round(1e3 * file_s, 3),
    )


def _runs(ids: NDArray[np.intp]) -> list[tuple[int, int]]:
    """Spans of tokens that cover `ids`, across gaps below _GAP."""
    breaks = np.flatnonzero(np.diff(ids) > _GAP)
    begins = np.concatenate(([0], breaks + 1))
    ends = np.concatenate((breaks, [len(ids) - 1]))
    return [(int(ids[b]), int(ids[e]) + 1) for b, e in zip(begins, ends, strict=True)]
