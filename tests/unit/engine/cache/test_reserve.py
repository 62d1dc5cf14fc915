"""The reserve under churn, beside a model of what torch's allocator does with the same requests."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from maskserve_common.contracts.keys import Anchor
from maskserve_engine.cache.entries import AnchorEntry, BlockEntry, encode
from maskserve_engine.cache.folder_tier import FolderTier
from maskserve_engine.cache.loader import Arrival, HostMover, Loader, Selection, gathered
from maskserve_engine.cache.memory_tier import MemoryTier
from maskserve_engine.cache.reserve import ALIGN, Block, Reserve
from maskserve_engine.cache.store import Store
from tests.fakes.entries import NOTE, same
from tests.support.draws import fresh_rng
from tests.support.eventually import eventually

CPU = torch.device("cpu")
Piece = tuple[str, int, int, int]
"""A stream, bytes, a segment, and where in it they begin."""


class CachingAllocator:
    """Torch's allocator for pieces of over 1 MB: a request takes the smallest free piece of its
    stream that is long enough, and leaves the rest of it free. Without one it takes memory from
    the driver; if the driver has none left, all whole free pieces go back to it. A request may
    fail even then, as parts of pieces are free and no piece is whole.
    """

    def __init__(self, nbytes: int) -> None:
        self.left, self.releases = nbytes, 0
        self._free: dict[str, list[tuple[int, int, int]]] = defaultdict(list)
        """By stream: (bytes, segment, begin)."""
        self._segments: list[int] = []

    def take(self, nbytes: int, stream: str) -> Piece | None:
        for _ in range(2):
            fits = [piece for piece in self._free[stream] if piece[0] >= nbytes]
            if fits:
                size, segment, begin = min(fits)
                self._free[stream].remove((size, segment, begin))
                if size > nbytes:
                    self._free[stream].append((size - nbytes, segment, begin + nbytes))
                return stream, nbytes, segment, begin
            if nbytes > self.left:
                self.releases += 1
                for pieces in self._free.values():
                    for size, segment, begin in list(pieces):
                        if size == self._segments[segment]:
                            pieces.remove((size, segment, begin))
                            self.left += size
            if nbytes <= self.left:
                self.left -= nbytes
                self._segments.append(nbytes)
                self._free[stream].append((nbytes, len(self._segments) - 1, 0))
        return None

    def give(self, piece: Piece | None) -> None:
        if piece is None:
            return
        stream, size, segment, begin = piece
        pieces = self._free[stream]
        for other in list(pieces):  # whole again with its neighbours
            if other[1] == segment and other[2] + other[0] == begin:
                pieces.remove(other)
                begin, size = other[2], size + other[0]
            elif other[1] == segment and begin + size == other[2]:
                pieces.remove(other)
                size += other[0]
        pieces.append((size, segment, begin))


def test_churn_stays_in_the_reserve_where_torch_gives_memory_back() -> None:
    """Entries of two sizes, loads of any, 4,000 of them in four fifths of a card; the oldest entry
    goes where there is no room, as in the store.
    """
    rng = fresh_rng()
    card = 2000 * ALIGN
    reserve, naive = Reserve(card * 4 // 5, CPU), CachingAllocator(card)
    entries: list[tuple[Block, Any]] = []
    loads: list[tuple[Block, Any]] = []
    evicted = 0
    for _ in range(4000):
        stays = rng.random() < 0.3
        size = ALIGN * int(rng.choice((60, 100)) if stays else rng.integers(5, 90))
        block = reserve.take(size, stays=stays)
        while block is None:
            assert entries, "loads alone do not fit"
            naive.give(entries.pop(0)[1])
            evicted += 1
            block = reserve.take(size, stays=stays)
        piece = naive.take(size, "model" if stays else "loader")
        (entries if stays else loads).append((block, piece))
        while len(loads) > rng.integers(2, 5):
            naive.give(loads.pop(int(rng.integers(len(loads))))[1])
        del block
        memories = [item[0]._memory for item in (*entries, *loads)]
        places = sorted((memory.storage_offset(), len(memory)) for memory in memories)
        assert all(a + n <= b for (a, n), (b, _) in pairwise(places))
        assert reserve.free == len(reserve.memory) - sum(n for _, n in places)
    assert evicted > 100
    assert naive.releases > 0
    entries.clear()
    loads.clear()
    assert reserve.free == len(reserve.memory)
    assert reserve.take(len(reserve.memory), stays=False) is not None, "pieces were not joined"


def entry_of(seed: int) -> AnchorEntry:
    torch.manual_seed(seed)
    part = [encode(torch.randn(24, 64), ("int4", "int8")[seed % 2]) for _ in range(4)]
    blocks = BlockEntry(part[0]), BlockEntry(None, *part[1:3]), BlockEntry(map=part[3])
    return AnchorEntry(Anchor(0.5, 500.0), blocks)


def inside(reserve: Reserve, tensor: torch.Tensor) -> bool:
    begin = reserve.memory.data_ptr()
    return begin <= tensor.data_ptr() and (
        tensor.data_ptr() + tensor.nbytes <= begin + len(reserve.memory)
    )


def test_an_entry_in_a_block_is_the_same_and_gives_it_back_when_nobody_reads_it() -> None:
    reserve = Reserve(2**16, CPU)
    entry = entry_of(1)
    block = reserve.take(entry.room, stays=True)
    assert block is not None
    within = entry.within(block)
    del block
    assert same(within, entry)
    assert all(inside(reserve, t) for b in within.blocks for c in b.part("kv") for t in c.tensors())
    assert reserve.free == len(reserve.memory) - entry.room
    del within
    assert reserve.free == len(reserve.memory)


def test_a_store_evicts_until_there_is_one_piece_and_keeps_nothing_outside() -> None:
    one = entry_of(1)
    reserve = Reserve(3 * one.room + ALIGN, CPU)
    store = Store(MemoryTier(10**9), [], None, Loader(HostMover()), reserve=reserve)
    entries = {f"t{i}": entry_of(2 * i + 1) for i in range(5)}
    for key, entry in entries.items():
        assert store.put(key, entry, NOTE)
    assert set(store.memory.entries()) == {"t2", "t3", "t4"}
    for key in ("t2", "t3", "t4"):
        response = store.memory.get(key, one.anchor)
        assert response is not None
        assert same(response, entries[key])
        assert response.memory is not None
    entry_in_use = store.memory.get("t2", one.anchor)
    store.evict("t2")
    assert reserve.free == ALIGN, "a row still reads it"
    del entry_in_use, response
    store.evict("t3")
    store.evict("t4")
    assert reserve.free == len(reserve.memory)
    store.check_integrity()
    store.close()


class Roomy(HostMover):
    """Brings parts to where a GPU's mover would."""

    def move(self, parts: Any, ids: Any, room: Block | None = None) -> Arrival:
        assert room is not None, "memory of its own"

        def moved(source: Any, ids: Any) -> torch.Tensor:
            rows = len(source) if ids is None else len(ids)
            return gathered(source, ids, room.empty((rows, *source.shape[1:]), source.dtype))

        copies = [c.map(lambda t: moved(t, ids), lambda t: moved(t, None)) for c in parts]
        return Arrival(tuple(copies))


def test_loads_have_blocks_until_their_last_row_lets_go(tmp_path: Path) -> None:
    """And beyond that only what has to be read in any case."""
    entry, selection = entry_of(1), Selection([np.arange(0, 24, 2)])
    tier = FolderTier("host", tmp_path, 10**8)
    assert tier.put("t", entry, NOTE)
    room = 8 * entry.room
    reserve = Reserve(room, CPU)
    store = Store(MemoryTier(10**9), [tier], None, Loader(Roomy()), reserve=reserve)
    while (source := store.hold("t", entry.anchor)) is None:
        store.settle()
    for _ in range(50):
        handles = [store.request("t", entry.anchor, selection, source) for _ in range(2)]
        for handle in handles:
            assert handle is not None
            handle.want([(1, "kv")], 1)
            keys, values = handle.wait(1, "kv")
            for coded, expected in zip((keys, values), entry.blocks[1].part("kv"), strict=True):
                assert inside(reserve, coded.data)
                assert torch.equal(coded.data, expected.take(torch.arange(0, 24, 2)).data)
        assert reserve.free < room
        for handle in handles:
            assert handle is not None
            handle.release()
        del handle, handles, keys, values, coded
        eventually("a load lets go", lambda: reserve.free == room)
    whole = reserve.take(room, stays=True)
    assert whole is not None
    assert store.request("t", entry.anchor, selection, source) is None
    assert store.memory.booked == 0
    store.let_go(source)
    store.close()
