"""Three threads meet in the store: the engine's, that of the files and that of the network."""

from __future__ import annotations

import itertools
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from maskserve_common.contracts.keys import Anchor
from maskserve_engine.cache.entry_file import EntrySource
from maskserve_engine.cache.folder_tier import FolderTier
from maskserve_engine.cache.loader import HostMover, Loader
from maskserve_engine.cache.memory_tier import MemoryTier
from maskserve_engine.cache.remote_tier import RemoteTier
from maskserve_engine.cache.store import Store
from tests.fakes.entries import ANCHORS, NOTE, random_entry

STRESS_S = 2.0


@pytest.fixture
def hurried() -> Iterator[None]:
    """Threads take turns a thousand times more often."""
    getswitchinterval = sys.getswitchinterval()
    sys.setswitchinterval(5e-6)
    yield
    sys.setswitchinterval(getswitchinterval)


def open_store(tmp_path: Path) -> Store:
    folders = [FolderTier("host", tmp_path / "h", 10**9), FolderTier("disk", tmp_path / "d", 10**9)]
    remote = RemoteTier(f"file://{tmp_path}/far", 10**9)
    return Store(MemoryTier(10), folders, remote, Loader(HostMover()))


@pytest.mark.usefixtures("hurried")
def test_evicting_and_reading_while_files_and_network_fetch(tmp_path: Path) -> None:
    """All threads at once fetch, read, evict and write entries that only files hold."""
    store = open_store(tmp_path)
    keys = [f"k{n}" for n in range(6)]
    entries = [random_entry(n, anchor, blocks=1, tokens=4) for n, anchor in enumerate(ANCHORS)]
    failed: list[BaseException] = []
    failures = threading.excepthook
    threading.excepthook = lambda args: failed.append(args.exc_value or args.exc_type())
    # The open entries of many other templates: iterating over them takes a while.
    source = EntrySource(entries[0], "host", "host")
    many = {(f"other{n}", anchor): source for n in range(400) for anchor in ANCHORS}
    end = time.monotonic() + STRESS_S
    try:
        for turn in itertools.cycle(keys):
            if time.monotonic() > end:
                break
            with store.lower._lock:
                for name, other_source in many.items():
                    store.lower._open.put(name, other_source)
            for entry in entries:
                store.put(turn, entry, NOTE)
            for key in keys:
                store.locate(key, ANCHORS)
                store.fetch(key, ANCHORS)
                store.lower.listed, store.lower.version, store.lower.busy(key)
                for anchor in ANCHORS:
                    hold = store.hold(key, anchor)
                    if hold is not None:
                        store.let_go(hold)
                store.evict(key)
    finally:
        threading.excepthook = failures
    assert store.settle(60)
    assert store.lower.network.settle(60)
    assert store.settle(60)  # what the network has brought
    assert not [key for key in keys if store.lower.busy(key)]
    store.check_integrity()
    store.close()
    assert failed == []


def test_what_was_looked_for_in_vain_is_not_remembered_for_ever(tmp_path: Path) -> None:
    most = 1024
    store = open_store(tmp_path)
    for n in range(most + 50):
        key, anchor = f"never{n}", Anchor(0.5, float(n))
        assert store.locate(key, [anchor]) is None
        assert store.hold(key, anchor) is None
    assert store.settle()
    assert store.lower.network.settle(30)
    assert store.lower.lost(key, anchor)  # the newest are remembered
    assert len(store.lower._lost) <= most
    assert len(store.lower._probed) <= most
    store.close()
