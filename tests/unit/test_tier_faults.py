"""Tiers in files while processes die, media refuse and others write: real files, real processes."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from maskserve_engine.cache.folder_tier import FolderTier
from maskserve_engine.cache.loader import Loader
from maskserve_engine.cache.memory_tier import MemoryTier
from maskserve_engine.cache.movers import HostMover
from maskserve_engine.cache.store import Store
from tests.fakes.entries import ANCHORS, NOTE, random_entry, same

ROOT = Path(__file__).parents[2]
SECONDS = 60 if os.environ.get("MASKSERVE_FULL") else 3
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
while time.time() < end:
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


def start(code: str, *arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", code, *map(str, arguments)]
    path = f"{ROOT}:{ROOT / 'engine'}"
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path}
    )


def test_a_writer_that_is_killed_leaves_nothing_half_visible(tmp_path: Path) -> None:
    expected = random_entry(0, ANCHORS[0], **BIG)  # type: ignore[arg-type]
    for pause in (0.01, 0.05, 0.11):
        with start(WRITER, tmp_path) as writer:
            assert writer.stdout is not None
            assert writer.stdout.readline() == "ready\n"
            time.sleep(pause)
            writer.send_signal(signal.SIGKILL)
        tier = FolderTier("disk", tmp_path, 10**9)
        found = tier.get("k", ANCHORS[0])
        assert found is None or same(found, expected)
        assert tier.corrupt == 0
        tier.check_integrity()  # and nothing is left beside it


def test_workers_that_write_evict_and_read_one_folder_see_whole_entries_only(
    tmp_path: Path,
) -> None:
    budget = 8 * (random_entry(0).nbytes + 4096)
    workers = [start(WORKER, tmp_path, budget, SECONDS, seed) for seed in range(2)]
    for worker in workers:
        out, _ = worker.communicate(timeout=SECONDS + 120)
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
        assert set(tier.held()) == {"small"}
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
    entry = tier.get("k", ANCHORS[0])
    shutil.rmtree(folder)
    if harm != "deleted":
        folder.write_text("in the way")
    assert same(entry, random_entry(0, ANCHORS[0]))  # what is mapped stays
    assert tier.get("k", ANCHORS[0]) is None
    assert tier.anchors("k") == frozenset()
    assert store.put("k", random_entry(1, ANCHORS[1]), NOTE)  # the device has it
    assert store.settle()
    assert (tier.failures > 0) == (harm != "deleted")
    assert store.locate("k", ANCHORS[:2]) == ("device")
    store.close()


def test_a_budget_below_one_template_keeps_none_and_evicts_itself_never(tmp_path: Path) -> None:
    tier = FolderTier("disk", tmp_path, random_entry(0).nbytes // 2)
    assert not tier.put("k", random_entry(0), NOTE)
    assert tier.held() == {}
    assert tier.failures == 0
