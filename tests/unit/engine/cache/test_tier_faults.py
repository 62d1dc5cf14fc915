"""Tiers in files while processes die, media refuse and others write: real files, real processes."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from maskserve_engine.cache.entries import PARTS
from maskserve_engine.cache.folder_tier import FolderTier
from maskserve_engine.cache.loader import HostMover, Loader
from maskserve_engine.cache.memory_tier import MemoryTier
from maskserve_engine.cache.store import Store
from tests.fakes.entries import ANCHORS, NOTE, random_entry, same
from tests.support.draws import fresh_random, fresh_rng
from tests.support.examples import WHOLE

ROOT = Path(__file__).parents[4]
SECONDS = 60 if WHOLE else 1
BIG = {"tokens": 4096, "width": 64}

WRITER = """
import sys
from maskserve_engine.cache.folder_tier import FolderTier
from tests.fakes.entries import ANCHORS, NOTE, random_entry
tier = FolderTier("disk", sys.argv[1], 10**9)
entry = random_entry(0, ANCHORS[0], tokens=4096, width=64)
print("ready", flush=True)
while True:
    tier.put("k", entry, NOTE)
"""

WORKER = """
import random, sys, time
from maskserve_engine.cache.folder_tier import FolderTier
from tests.fakes.entries import ANCHORS, NOTE, random_entry, same
folder, budget, seconds, seed = sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4])
tier, dice = FolderTier("host", folder, budget), random.Random(seed)
end, read = time.time() + seconds, 0
entries = {(k, n): random_entry(10 * k + n, ANCHORS[n]) for k in range(4) for n in range(3)}
while time.time() < end or not read:
    k, n = dice.randrange(4), dice.randrange(3)
    match dice.randrange(5):
        case 0 | 1:
            tier.put(f"k{k}", entries[k, n], NOTE)
        case 2:
            tier.evict(f"k{k}")
        case _:
            found = tier.get(f"k{k}", ANCHORS[n])
            assert found is None or same(found, entries[k, n]), "another entry was read"
            read += found is not None
print(tier.corrupt, tier.failures, read)
"""


CUT_OFF = """
import sys
from pathlib import Path
import numpy as np
from maskserve_engine.cache.folder_tier import FolderTier
from maskserve_engine.cache.loader import EntryLost, Loader
from maskserve_engine.cache.memory_tier import MemoryTier
from maskserve_engine.cache.loader import HostMover
from maskserve_engine.cache.loader import Selection
from maskserve_engine.cache.store import Store
from tests.fakes.entries import ANCHORS
tier = FolderTier("host", sys.argv[1], 10**9)
store = Store(MemoryTier(10**9), [tier], None, Loader(HostMover()))
source = None
while source is None:
    source = store.hold("k", ANCHORS[0])
    store.settle(10.0)  # no second search is under way, which would open the file once more
handle = store.request("k", ANCHORS[0], Selection([np.arange(5, 4000, 3)]), source)
for path in Path(sys.argv[1]).glob("k/*.safetensors"):
    with path.open("r+b") as file:
        file.truncate(4096)
handle.want([(0, "kv")], 1)
try:
    handle.wait(0, "kv")
    print("read", flush=True)
except EntryLost:
    print("lost", flush=True)
handle.release()
store.let_go(source)
while store.lower.source("k", ANCHORS[0]) is not None or not store.lower.lost("k", ANCHORS[0]):
    store.hold("k", ANCHORS[0])  # found to be bad, and dropped
    store.settle(10.0)
print(tier.corrupt, len(tier.anchors("k")))
store.check_integrity()
"""


def start(code: str, *arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", code, *map(str, arguments)]
    path = f"{ROOT}:{ROOT / 'engine'}"
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path}
    )


def test_a_writer_that_is_killed_leaves_nothing_half_visible(tmp_path: Path) -> None:
    expected = random_entry(0, ANCHORS[0], **BIG)  # type: ignore[arg-type]
    pauses = (0.01, 0.05, 0.11)
    for pause in pauses if WHOLE else [fresh_random().choice(pauses)]:
        with start(WRITER, tmp_path) as writer:
            assert writer.stdout is not None
            assert writer.stdout.readline() == "ready\n"
            time.sleep(pause)
            writer.send_signal(signal.SIGKILL)
        tier = FolderTier("disk", tmp_path, 10**9)
        response = tier.get("k", ANCHORS[0])
        assert response is None or same(response, expected)
        assert tier.corrupt == 0
        tier.check_integrity()  # and nothing is left beside it


def test_workers_that_write_evict_and_read_one_folder_see_whole_entries_only(
    tmp_path: Path,
) -> None:
    budget = 8 * (random_entry(0).nbytes + 4096)
    workers = [start(WORKER, tmp_path, budget, SECONDS, seed) for seed in range(2)]
    for worker in workers:
        out, _ = worker.communicate()  # to begin may take minutes on a busy machine
        assert worker.returncode == 0
        corrupt, failures, read = map(int, out.split())
        assert (corrupt, failures) == (0, 0)
        assert read > 0
    FolderTier("host", tmp_path, budget).check_integrity()


def test_a_full_medium_refuses_and_what_was_there_stays(tmp_path: Path) -> None:
    """A real file system of one mebibyte, where this user may mount one."""
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(folder)], capture_output=True
    )
    if mounted.returncode:
        pytest.skip("this user may not mount a file system")
    try:
        tier = FolderTier("host", folder, 10**9)
        assert tier.put("small", random_entry(0), NOTE)
        assert not tier.put("big", random_entry(1, **BIG), NOTE)  # type: ignore[arg-type]
        assert tier.failures == 1
        assert set(tier.entries()) == {"small"}
        assert same(tier.get("small", ANCHORS[0]), random_entry(0))
        tier.check_integrity()
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize("harm", ["deleted", "a file in its place"])
def test_a_folder_that_goes_costs_the_cache_and_nothing_else(tmp_path: Path, harm: str) -> None:
    folder = tmp_path / "tier"
    tier = FolderTier("disk", folder, 10**9)
    store = Store(MemoryTier(10**6), [tier], None, Loader(HostMover()))
    assert store.put("k", random_entry(0, ANCHORS[0]), NOTE)
    assert store.settle()
    entry = tier.open("k", ANCHORS[0])
    assert entry is not None
    shutil.rmtree(folder)
    if harm != "deleted":
        folder.write_text("in the way")
    (hidden,) = HostMover().move(entry.blocks[0].part("h"), None).get()
    (expected,) = random_entry(0, ANCHORS[0]).blocks[0].part("h")
    assert torch.equal(hidden.data, expected.data)  # what is open stays
    assert tier.get("k", ANCHORS[0]) is None
    assert tier.anchors("k") == frozenset()
    assert store.put("k", random_entry(1, ANCHORS[1]), NOTE)  # the device has it
    assert store.settle()
    assert (tier.failures > 0) == (harm != "deleted")
    assert store.locate("k", ANCHORS[:2]) == ("device")
    store.close()


def test_a_file_that_is_cut_off_while_a_row_reads_it_is_a_lost_entry(tmp_path: Path) -> None:
    tier = FolderTier("host", tmp_path, 10**9)
    assert tier.put("k", random_entry(0, ANCHORS[0], **BIG), NOTE)  # type: ignore[arg-type]
    with start(CUT_OFF, tmp_path) as reader:
        out, _ = reader.communicate(timeout=60)
    assert reader.returncode == 0  # a mapped file would end it by SIGBUS
    assert out.split("\n")[:2] == ["lost", "1 0"]


@pytest.mark.parametrize("format", ["model", "int8", "int4", "float8"])
def test_tokens_are_read_from_a_file_as_from_memory(tmp_path: Path, format: str) -> None:
    """Runs, scattered tokens, all of them, in any order; after the file was unlinked, too."""
    tier = FolderTier("disk", tmp_path, 10**9)
    entry = random_entry(3, ANCHORS[0], tokens=3000, width=96, format=format)
    assert tier.put("k", entry, NOTE)
    stored = tier.open("k", ANCHORS[0])
    assert stored is not None
    tier.evict("k")
    dice = fresh_rng()
    sort = np.sort(dice.choice(3000, 1000, replace=False))
    for ids in (None, np.arange(100, 2900), sort, dice.permutation(sort), np.array([2999, 0, 7])):
        for block, whole in zip(stored.blocks, entry.blocks, strict=True):
            for part in PARTS:
                assert_reads_alike(block.part(part), whole.part(part), ids)


def assert_reads_alike(stored: Any, whole: Any, ids: NDArray[np.int64] | None) -> None:
    for a, b in zip(stored, whole, strict=True):
        assert a.nbytes == b.nbytes
        assert a.nbytes_of(17) == b.nbytes_of(17)
    read, expected = (HostMover().move(parts, ids).get() for parts in (stored, whole))
    for a, b in zip(read, expected, strict=True):
        assert a.format == b.format
        for x, y in zip(a.tensors(), b.tensors(), strict=True):
            assert x.dtype == y.dtype
            assert x.shape == y.shape
            assert torch.equal(x.contiguous().view(torch.uint8), y.contiguous().view(torch.uint8))


def test_a_budget_below_one_template_keeps_none_and_evicts_itself_never(tmp_path: Path) -> None:
    tier = FolderTier("disk", tmp_path, random_entry(0).nbytes // 2)
    assert not tier.put("k", random_entry(0), NOTE)
    assert tier.entries() == {}
    assert tier.failures == 0
