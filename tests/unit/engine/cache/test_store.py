"""The store and its loader: what rows are given, when, and what is left when they are gone."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from maskserve_engine.cache.entries import GROUP, AnchorEntry, BlockEntry, Coded, encode
from maskserve_engine.cache.folder_tier import FolderTier
from maskserve_engine.cache.loader import Arrival, EntryLost, HostMover, Loader, Selection
from maskserve_engine.cache.memory_tier import MemoryTier
from maskserve_engine.cache.reader import EntryReader
from maskserve_engine.cache.remote_tier import RemoteTier
from maskserve_engine.cache.store import Handle, Store
from tests.fakes.entries import ANCHORS, NOTE, random_entry, same
from tests.support.draws import fresh_rng

SIZE = random_entry(0).nbytes
SOME = Selection([np.array([1, 5, 7, 20])])
OTHER = Selection([np.array([0, 2, 23])])


class GatedMover(HostMover):
    """Moves a part when it is told to."""

    def __init__(self) -> None:
        self.gate = threading.Semaphore(0)
        self.moved: list[tuple[Coded, ...]] = []

    def move(self, parts: tuple[Coded, ...], ids: NDArray[np.int64] | None) -> Arrival:
        assert self.gate.acquire(timeout=30)
        self.moved.append(parts)
        return super().move(parts, ids)


@pytest.fixture
def folders(tmp_path: Path) -> list[FolderTier]:
    return [FolderTier("host", tmp_path / "host", 10**8), FolderTier("disk", tmp_path / "d", 10**8)]


@pytest.fixture
def store(folders: list[FolderTier]) -> Iterator[Store]:
    store = Store(MemoryTier(100 * SIZE), folders, None, Loader(HostMover()))
    yield store
    assert store.settle()
    store.check_integrity()
    store.close()


def fill(store: Store, key: str = "k") -> None:
    for number, anchor in enumerate(ANCHORS):
        assert store.put(key, random_entry(number, anchor), NOTE)
    assert store.settle()


def request(store: Store, selection: Selection = SOME, key: str = "k") -> Handle:
    source = store.hold(key, ANCHORS[0])
    assert source is not None
    handle = store.request(key, ANCHORS[0], selection, source)
    store.let_go(source)
    assert handle is not None
    return handle


def assert_reads(handle: Handle, selection: Selection, seed: int = 0) -> None:
    """The handle gives exactly the row's tokens of every part."""
    entry = random_entry(seed)
    block_parts = [
        (b, p) for b, e in enumerate(entry.blocks) for p in ("h", "kv", "end") if e.part(p)
    ]
    handle.want(block_parts, 1)
    for block, part in block_parts:
        got, expected = handle.wait(block, part), entry.blocks[block].part(part)
        for coded, whole in zip(got, expected, strict=True):
            assert torch.equal(coded.data, whole.data[torch.from_numpy(selection.of(block))])


def test_a_new_entry_is_in_every_tier(store: Store) -> None:
    fill(store)
    assert store.locate("k", ANCHORS) == "device"
    assert {tier: list(templates) for tier, templates in store.entries().items()} == {
        tier: ["k"] for tier in ("device", "host", "disk")
    }
    assert set(store.tier_bytes()) == {"device", "host", "disk"}


def test_rows_read_their_own_tokens_and_equal_masks_share_a_load(store: Store) -> None:
    fill(store)
    one, same_mask, other = (
        request(store),
        request(store, Selection([SOME.of(0)])),
        request(store, OTHER),
    )
    assert one.load is same_mask.load is not other.load
    assert_reads(one, SOME)
    assert_reads(other, OTHER)
    tier, moved = store.account(one)
    assert (tier, moved > 0) == ("device", True)
    assert store.account(same_mask)[1] == 0  # told once
    for handle in (one, same_mask, other):
        handle.release()
    one.release()  # twice is once


@pytest.mark.parametrize("format", ["model", "int8", "float8", "int4"])
@pytest.mark.parametrize("tier", ["device", "host"])
def test_a_reader_of_some_heads_loads_these_alone(store: Store, tier: str, format: str) -> None:
    """From memory and from a file; another load than one of all heads, of so many bytes fewer."""
    rng, heads = torch.Generator().manual_seed(3), SOME.of_heads(1, 3, 4)
    encodeds = [encode(torch.randn(24, 4 * GROUP, generator=rng), format) for _ in range(3)]
    entry = AnchorEntry(ANCHORS[0], (BlockEntry(*encodeds),))
    assert store.put("k", entry, NOTE)
    assert store.settle()
    if tier == "host":
        store.memory.evict("k")
        store.hold("k", ANCHORS[0])  # has it opened
        assert store.settle()
    all_heads, some = request(store), request(store, heads)
    for handle in (all_heads, some):
        handle.want([(0, "kv"), (0, "h")], 1)
    [hidden] = some.wait(0, "h")
    assert same_coded(hidden, all_heads.wait(0, "h")[0])
    for part, whole in zip(some.wait(0, "kv"), all_heads.wait(0, "kv"), strict=True):
        assert same_coded(part, whole.columns(1, 3, 4))
    (account, moved), (_, of_all) = store.account(some), store.account(all_heads)
    saved = sum(k.nbytes_of(len(SOME.of(0))) for k in encodeds[1:])
    assert (account, of_all - moved) == (tier, saved // 2)
    for handle in (all_heads, some):
        handle.release()


def same_coded(one: Coded, other: Coded) -> bool:
    return all(
        torch.equal(a.view(torch.uint8), b.contiguous().view(torch.uint8))
        for a, b in zip(one.tensors(), other.tensors(), strict=True)
    )


def test_asking_again_for_what_is_there_wakes_nobody(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(store)
    handle = request(store)
    assert_reads(handle, SOME)
    woken: list[str] = []
    monkeypatch.setattr(store.loader._changed, "notify_all", lambda: woken.append("loader"))
    assert_reads(handle, SOME)  # as every later step does
    assert woken == []
    handle.release()


def test_a_whole_load_serves_every_mask(store: Store) -> None:
    fill(store)
    source = store.hold("k", ANCHORS[0])
    assert source is not None
    handles = [store.request("k", ANCHORS[0], s, source, whole=True) for s in (SOME, OTHER)]
    assert handles[0] is not None
    assert handles[1] is not None
    assert handles[0].load is handles[1].load
    assert_reads(handles[0], SOME)
    assert_reads(handles[1], OTHER)
    for handle in handles:
        handle.release()
    store.let_go(source)


def test_what_rows_hold_is_booked_and_no_room_is_not_now(folders: list[FolderTier]) -> None:
    memory = MemoryTier(3 * SIZE + 10)
    store = Store(memory, [], None, Loader(HostMover()))
    fill(store)
    source = store.hold("k", ANCHORS[0])
    assert source is not None
    assert store.request("k", ANCHORS[0], SOME, source) is None
    forced = store.request("k", ANCHORS[0], SOME, source, force=True)
    assert forced is not None
    assert memory.booked == forced.load.nbytes > 0
    store.evict("k")
    assert memory.nbytes == SIZE + forced.load.nbytes  # the row holds the entry still
    assert_reads(forced, SOME)
    forced.release()
    store.let_go(source)
    store.check_integrity()
    store.close()


def test_a_restarted_worker_reads_from_files_and_brings_them_nearer(
    folders: list[FolderTier],
) -> None:
    first = Store(MemoryTier(100 * SIZE), folders, None, Loader(HostMover()))
    fill(first)
    first.close()
    folders[0].evict("k")
    event = threading.Event()
    again = Store(
        MemoryTier(100 * SIZE), folders, None, Loader(HostMover()), lambda key: event.set()
    )
    assert again.locate("k", ANCHORS) == "disk"
    assert again.hold("k", ANCHORS[0]) is None  # not now: it is being fetched
    assert event.wait(30)
    handle = request(again)
    assert handle.load.tier == "host"
    assert_reads(handle, SOME)
    assert again.account(handle)[0] == "disk"  # where it was found
    handle.release()
    assert ANCHORS[0] in folders[0].anchors("k")
    again.check_integrity()
    again.close()


def test_two_workers_share_one_host_tier(folders: list[FolderTier], tmp_path: Path) -> None:
    one = Store(MemoryTier(100 * SIZE), folders[:1], None, Loader(HostMover()))
    fill(one)
    second_tiers = [FolderTier("host", tmp_path / "host", 10**8)]
    two = Store(MemoryTier(100 * SIZE), second_tiers, None, Loader(HostMover()))
    assert two.locate("k", ANCHORS) == "host"
    assert not two.fetch("k", ANCHORS)
    assert two.settle()
    assert two.fetch("k", ANCHORS)
    handle = request(two)
    one.evict("k")  # what is mapped stays readable
    assert_reads(handle, SOME)
    handle.release()
    assert two.locate("k", ANCHORS) is None
    one.close()
    two.close()


@pytest.mark.parametrize("damage", ["names", "bytes", "cut", "empty"])
def test_a_damaged_file_is_dropped_counted_and_never_read(
    folders: list[FolderTier], damage: str
) -> None:
    store = Store(MemoryTier(0), folders[:1], None, Loader(HostMover()))
    fill(store)
    store.close()
    path = next((folders[0].folder / "k").glob("*.safetensors"))
    raw = bytearray(path.read_bytes())
    data = 8 + int.from_bytes(raw[:8], "little")
    if damage == "cut":
        raw = raw[: len(raw) // 2]
    elif damage == "empty":
        raw.clear()
    else:
        first, last = (8, data) if damage == "names" else (data, len(raw))
        raw[fresh_rng().integers(first, last)] ^= 4
    path.write_bytes(raw)
    again = Store(MemoryTier(0), folders[:1], None, Loader(HostMover()))
    again.fetch("k", ANCHORS)
    assert again.settle()
    assert folders[0].corrupt == 1
    assert again.counters()["cache_corrupt_total.host"] == 1
    assert again.locate("k", ANCHORS) is None
    assert not path.exists()
    again.close()


def test_a_far_store_is_asked_in_the_background_and_what_it_has_comes_nearer(
    folders: list[FolderTier], tmp_path: Path
) -> None:
    remote = RemoteTier(f"file://{tmp_path}/far", 10**8)
    for number, anchor in enumerate(ANCHORS):
        remote.put("k", random_entry(number, anchor), NOTE)
    event = threading.Event()
    store = Store(MemoryTier(10**6), folders, remote, Loader(HostMover()), lambda key: event.set())
    assert store.locate("k", ANCHORS) is None  # nobody waits for the network
    assert store.lower.network.settle(30.0)
    assert store.locate("k", ANCHORS) == "remote"
    assert not store.fetch("k", ANCHORS)
    assert event.wait(30)
    handle = request(store)
    assert_reads(handle, SOME)
    assert store.account(handle)[0] == "remote"
    handle.release()
    assert store.locate("k", ANCHORS) == "host"
    store.close()


def test_a_remote_out_of_reach_costs_nothing(folders: list[FolderTier]) -> None:
    remote = RemoteTier("http://127.0.0.1:9/none", 10**8)
    store = Store(MemoryTier(100 * SIZE), folders, remote, Loader(HostMover()))
    fill(store)
    assert store.locate("other", ANCHORS) is None
    assert store.lower.network.settle(30.0)
    assert store.locate("k", ANCHORS) == "device"
    assert store.counters()["cache_failures_total.remote"] > 0
    store.close()


def test_parts_travel_in_the_order_of_their_turn() -> None:
    mover = GatedMover()
    store = Store(MemoryTier(100 * SIZE), [], None, Loader(mover))
    fill(store)
    handle, entry = request(store), random_entry(0)
    handle.want([(0, "kv")], 1)  # taken at once, and held up
    handle.want([(2, "kv"), (1, "h")], 9)
    handle.want([(1, "kv")], 2)
    handle.want([(2, "kv")], 3)  # sooner than was asked first
    for _ in range(4):
        mover.gate.release()
    for block, part in [(0, "kv"), (1, "kv"), (2, "kv"), (1, "h")]:
        handle.wait(block, part)
    expected = [(0, "kv"), (1, "kv"), (2, "kv"), (1, "h")]
    data = [entry.blocks[block].part(part)[0].data for block, part in expected]
    assert all(torch.equal(m[0].data, w) for m, w in zip(mover.moved, data, strict=True))
    assert handle.ready(1, "h")
    assert not handle.ready(0, "h")
    handle.release()
    store.close()


def test_rows_of_one_step_have_their_blocks_brought_in_side_by_side() -> None:
    """A step begins on block 0 of all of its rows: blocks behind it travel later, whoever's."""
    mover = GatedMover()
    store = Store(MemoryTier(100 * SIZE), [], None, Loader(mover))
    fill(store)
    keys, entry = ("k", "other", "third"), random_entry(0)
    for key in keys[1:]:
        fill(store, key)
    handles = [request(store, key=key) for key in keys]
    handles[0].want([(0, "h")], 1)  # taken at once, and held up
    for handle in handles:
        handle.want([(block, "kv") for block in range(3)], 1)
    for _ in range(1 + 3 * len(keys)):
        mover.gate.release()
    for handle in handles:
        handle.wait(2, "kv")
    moved = [block for block in range(3) for _ in keys]
    expected = [entry.blocks[block].part("kv")[0].data for block in moved]
    assert all(torch.equal(m[0].data, w) for m, w in zip(mover.moved[1:], expected, strict=True))
    for handle in handles:
        handle.release()
    store.close()


def test_a_part_that_was_not_asked_for_or_kept_is_an_error_not_a_hang(store: Store) -> None:
    fill(store)
    handle = request(store)
    with pytest.raises(EntryLost, match="not asked for"):
        handle.wait(0, "kv")
    with pytest.raises(EntryLost):
        handle.wait(0, "end")
    handle.release()


class FailingMover(HostMover):
    """Raises `error`, if there is one."""

    def __init__(self, error: BaseException) -> None:
        self.error: BaseException | None = error

    def move(self, parts: tuple[Coded, ...], ids: NDArray[np.int64] | None) -> Arrival:
        if self.error is not None:
            raise self.error
        return super().move(parts, ids)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("error", [OSError("gone"), SystemExit()], ids=["fails", "dies"])
def test_a_loader_that_fails_or_dies_is_told_to_who_waits_and_replaced(
    error: BaseException,
) -> None:
    mover = FailingMover(error)
    store = Store(MemoryTier(100 * SIZE), [], None, Loader(mover))
    fill(store)
    lost = request(store)
    lost.want([(0, "kv")], 1)
    with pytest.raises(EntryLost):
        lost.wait(0, "kv")
    lost.release()
    mover.error = None
    well = request(store)
    assert_reads(well, SOME)
    well.release()
    store.check_integrity()
    store.close()


def test_a_reader_turns_from_anchor_to_anchor_and_lets_go_of_all(store: Store) -> None:
    fill(store)
    steps = [ANCHORS[0], ANCHORS[0], None, ANCHORS[1], ANCHORS[2]]
    reader = EntryReader(store, "k", steps, SOME)
    for step, anchor in enumerate(steps):
        handle = reader.entry_at(step)
        assert (handle and handle.anchor) == anchor
        ahead = reader.look_ahead(step)
        if step < 3:
            assert ahead is not None
            assert (ahead[0].anchor, ahead[1]) == (ANCHORS[1], 3)
    reader.release()


def test_evicting_while_a_row_reads_changes_nothing(store: Store) -> None:
    fill(store)
    reader = EntryReader(store, "k", [ANCHORS[0]], SOME)
    handle = reader.entry_at(0)
    assert handle is not None
    store.evict("k")
    assert_reads(handle, SOME)
    reader.release()
    assert store.memory.nbytes == 0


def test_files_open_with_the_safetensors_library(folders: list[FolderTier]) -> None:
    from safetensors import safe_open

    assert folders[0].put("k", random_entry(3, format="int4"), NOTE)
    (path,) = (folders[0].folder / "k").glob("*.safetensors")
    with safe_open(path, framework="pt") as file:
        assert torch.equal(
            file.get_tensor("1.keys.data"),
            random_entry(3, format="int4").blocks[1].keys.data,  # type: ignore[union-attr]
        )
    assert same(folders[0].get("k", ANCHORS[0]), random_entry(3, format="int4"))
