"""How entries get to a CUDA device, on a stand-in that copies as late as it may."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from maskserve_common.config import ENTRY_FORMATS
from maskserve_common.contracts.keys import Anchor
from maskserve_engine.cache import loader
from maskserve_engine.cache.entries import PARTS, AnchorEntry, Coded, encode
from maskserve_engine.cache.entry_file import StoredEntry
from maskserve_engine.cache.folder_tier import FolderTier
from maskserve_engine.cache.loader import (
    Arrival,
    CudaMover,
    HostMover,
    LinkRates,
    Load,
    Loader,
    Part,
    Selection,
)
from maskserve_engine.cache.registered import Registrar
from maskserve_engine.cache.reserve import Block
from tests.fakes.cuda_runtime import Runtime
from tests.fakes.entries import NOTE, random_entry
from tests.support.draws import fresh_rng
from tests.support.eventually import eventually

pytestmark = pytest.mark.each_value

BUFFER = 4096
"""Bytes of a pinned buffer: a part takes many."""


class Stream:
    """Work in order, done only when somebody waits for it."""

    count = 0

    def __init__(self, device: object = None) -> None:
        Stream.count += 1
        self.work: list[Callable[[], object]] = []
        self.done = 0

    def wait_stream(self, other: Stream) -> None:
        self.work.append(lambda: other.reach(len(other.work)))

    def reach(self, count: int) -> None:
        while self.done < count:
            self.work[self.done]()
            self.done += 1

    def wait_event(self, event: Event) -> None:
        self.work.append(event.synchronize)


class Event:
    def __init__(self) -> None:
        self.stream, self.at = Stream(), 0

    def record(self, stream: Stream) -> None:
        self.stream, self.at = stream, len(stream.work)

    def query(self) -> bool:
        return self.stream.done >= self.at

    def synchronize(self) -> None:
        self.stream.reach(self.at)


class Cuda:
    """The part of torch.cuda that CudaMover may use: nothing in it waits for the whole device."""

    Stream, Event = Stream, Event

    def __init__(self) -> None:
        self.current = self.default = Stream()
        self.pinned = 0
        self.recorded = 0
        self.ring: list[Tensor] = []
        self.runtime = Runtime()
        self.sent: list[int] = []
        """Bytes of each copy to the device."""

    def reads(self, source: Tensor) -> None:
        """The device does so now: of what is pinned or registered, or its own."""
        if isinstance(source, OnDevice):
            return
        begin = source.data_ptr()
        pinned = any(
            tensor.data_ptr() <= begin < tensor.data_ptr() + tensor.nbytes for tensor in self.ring
        )
        assert pinned or self.runtime.holds(source), "the host would copy this"

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        current, self.current = self.current, stream
        yield
        self.current = current

    def device(self, device: object) -> contextlib.nullcontext[None]:
        return contextlib.nullcontext()

    def current_stream(self) -> Stream:
        return self.current

    def default_stream(self, device: object) -> Stream:
        return self.default


class OnDevice(Tensor):
    """A tensor of the device; copies to it go into the current stream."""

    cuda: Cuda

    def copy_(self, source: Tensor, non_blocking: bool = False) -> OnDevice:
        assert non_blocking, "the host waits for this copy"
        plain = self.as_subclass(Tensor)  # type: ignore[no-untyped-call]
        if not isinstance(source, OnDevice):
            self.cuda.sent.append(source.nbytes)

        def copy() -> None:
            self.cuda.reads(source)
            plain.copy_(source)

        self.cuda.current.work.append(copy)
        return self

    def record_stream(self, stream: Stream) -> None:
        self.cuda.recorded += 1


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    fake = Cuda()

    def empty(*shape: Any, pin_memory: bool = False, device: object = None, **more: Any) -> Tensor:
        tensor = torch.empty(*shape, **more)
        if pin_memory:
            fake.pinned += 1
            fake.ring.append(tensor)
        return tensor if device is None else tensor.as_subclass(OnDevice)  # type: ignore[no-untyped-call]

    monkeypatch.setattr(OnDevice, "cuda", fake, raising=False)

    def index_select(source: Tensor, dim: int, ids: Tensor, out: Tensor) -> None:
        plain = [t.as_subclass(Tensor) for t in (source, ids, out)]  # type: ignore[no-untyped-call]
        gather = partial(torch.index_select, plain[0], dim, plain[1])
        fake.current.work.append(lambda: plain[2].copy_(gather()))

    dtypes = {name: getattr(torch, name) for name in ("uint8", "int16", "int32", "int64")}
    parts = {"empty": empty, "index_select": index_select, "from_numpy": torch.from_numpy}
    monkeypatch.setattr(loader, "torch", SimpleNamespace(cuda=fake, **parts, **dtypes))
    return fake


@pytest.fixture
def stored(cuda: Cuda, tmp_path: Path) -> Iterator[Stored]:
    registrar = Registrar(torch.device("cpu"), cuda.runtime)
    mover = CudaMover(torch.device("cpu"), BUFFER, registrar=registrar, rates=LinkRates(1.0, 1e9))
    yield Stored(mover, FolderTier("host", tmp_path, 10**8, opened=mover.register))
    mover.close()
    assert not cuda.runtime.ranges


class Stored(NamedTuple):
    """A host tier whose files the device reads by itself, as far as `mover.rates` say so."""

    mover: CudaMover
    tier: FolderTier

    def entry(self, seed: int, format: str = "int8") -> tuple[StoredEntry, AnchorEntry]:
        entry = random_entry(seed, tokens=300, width=64, format=format)
        assert self.tier.put(str(seed), entry, NOTE)
        file = self.tier.open(str(seed), entry.anchor)
        assert file is not None
        return file, entry


def part(seed: int, format: str) -> tuple[Coded, Coded]:
    """Keys and values of 300 tokens."""
    torch.manual_seed(seed)
    keys, values = (encode(torch.randn(300, 64), format) for _ in range(2))
    return keys, values


def arrives_right(mover: CudaMover, cuda: Cuda, format: str) -> bool:
    """Whether two parts moved one after the other are what a row is to read of them."""
    ids = np.sort(fresh_rng().permutation(300)[:200])
    sources = [part(seed, format) for seed in range(2)]
    moved = [arrival.get() for arrival in [mover.move(source, ids) for source in sources]]
    assert not cuda.default.done  # it is the model's stream that waits, and not the host
    cuda.default.reach(len(cuda.default.work))
    return all(
        torch.equal(have.as_subclass(Tensor), want)  # type: ignore[no-untyped-call]
        for parts, source in zip(moved, sources, strict=True)
        for arrived, coded in zip(parts, source, strict=True)
        for have, want in zip(
            arrived.tensors(), coded.take(torch.from_numpy(ids)).tensors(), strict=True
        )
    )


@pytest.mark.parametrize("format", ["int8", "int4", "model"])
def test_a_buffer_of_the_ring_is_used_again_when_its_copy_has_left(cuda: Cuda, format: str) -> None:
    mover = CudaMover(torch.device("cpu"), BUFFER)
    assert arrives_right(mover, cuda, format)
    assert len(mover.stream.work) > 3 * cuda.pinned == 9  # the ring went round


def test_a_ring_that_does_not_wait_overwrites_what_is_on_its_way(
    cuda: Cuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The naive rival: the check above sees it."""
    mover = CudaMover(torch.device("cpu"), BUFFER)
    mover._ring = [(buffer, SimpleNamespace(synchronize=lambda: None, record=lambda s: None))
                   for buffer, _ in mover._ring]  # type: ignore[misc]  # fmt: skip
    assert not arrives_right(mover, cuda, "int8")


def test_each_part_has_an_event_of_its_own(cuda: Cuda) -> None:
    """A step's first block begins while the next one's part is on its way."""
    mover = CudaMover(torch.device("cpu"), 2**20, buffers=8)
    first, second = (mover.move(part(seed, "int8"), None) for seed in range(2))
    assert not first.ready()
    assert first.copying is not None
    assert first.copying.event is not None
    first.copying.event.synchronize()
    assert first.ready()
    assert not second.ready()


@pytest.mark.parametrize("format", ENTRY_FORMATS)
def test_entries_lie_token_by_token_however_they_were_computed(format: str) -> None:
    """A 1x1 convolution leaves them channel by channel, of which no token can be gathered."""
    x = torch.randn(64, 24).t()
    stored = encode(x, format)
    assert all(tensor.is_contiguous() for tensor in stored.tensors())
    [coded] = HostMover().move((stored,), np.array([3, 20])).get()
    expected, result = torch.empty(2, 64), torch.empty(2, 64)
    encode(x.contiguous(), format).take(torch.tensor([3, 20])).into(expected)
    coded.into(result)
    assert torch.equal(result, expected)


def test_an_arrival_is_waited_for_once(cuda: Cuda) -> None:
    """A row reads the same parts at every step until its next anchor."""
    arrival = CudaMover(torch.device("cuda"), BUFFER).move(part(0, "int8"), None)
    assert not arrival.ready()
    parts = arrival.get()
    counts = len(cuda.default.work), cuda.recorded
    assert counts == (1, 4)  # keys and values, with a scale each
    for _ in range(3):
        assert arrival.ready()
        assert arrival.get() is parts
    assert (len(cuda.default.work), cuda.recorded) == counts


def test_copies_to_the_host_share_a_stream(cuda: Cuda) -> None:
    mover = CudaMover(torch.device("cuda"), BUFFER)
    entry = AnchorEntry(Anchor(1.0, 1000.0), ())
    count_before = Stream.count
    assert [mover.to_host(entry) for _ in range(3)] == [entry] * 3
    assert Stream.count == count_before


def equal(arrived: tuple[Coded, ...], expected: tuple[Coded, ...]) -> bool:
    return all(
        torch.equal(raw(have), raw(want))
        for one, other in zip(arrived, expected, strict=True)
        for have, want in zip(one.tensors(), other.tensors(), strict=True)
    )


def raw(x: Tensor) -> Tensor:
    return x.as_subclass(Tensor).contiguous().view(torch.uint8)  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("format", ENTRY_FORMATS)
@pytest.mark.parametrize("tokens", [None, 1, 267])
def test_what_the_device_reads_by_itself_is_what_a_row_is_to_read(
    cuda: Cuda, stored: Stored, format: str, tokens: int | None
) -> None:
    rng = fresh_rng()
    ids = None if tokens is None else rng.permutation(300)[:tokens]
    entries = [stored.entry(seed, format) for seed in range(3)]
    moved = [
        stored.mover.move(stored_entry.blocks[1].part("kv"), ids) for stored_entry, _ in entries
    ]
    for arrival, (_, entry) in zip(moved, entries, strict=True):
        parts = arrival.get()
        cuda.default.reach(len(cuda.default.work))
        expected = entry.blocks[1].part("kv")
        if ids is not None:
            expected = tuple(coded.take(torch.from_numpy(ids)) for coded in expected)
        assert equal(parts, expected)


def test_what_is_moved_lies_in_the_block_that_was_taken_for_it(cuda: Cuda, stored: Stored) -> None:
    """By either way, and of all blocks of the entry."""
    stored_entry, entry = stored.entry(0)
    ids = fresh_rng().permutation(300)[:200]
    for way in (LinkRates(1.0, 0.0), LinkRates(1.0, 1e9)):
        stored.mover.rates = way
        load = Load(stored_entry, "host", Selection([ids]))
        memory = torch.zeros(load.room, dtype=torch.uint8)
        block = Block(memory.as_subclass(OnDevice))  # type: ignore[no-untyped-call]
        for number in range(len(entry.blocks)):
            parts = stored.mover.move(load.parts(number, "kv"), ids, block).get()
            cuda.default.reach(len(cuda.default.work))
            expected = [c.take(torch.from_numpy(ids)) for c in entry.blocks[number].part("kv")]
            assert equal(parts, tuple(expected))
            for tensor in (tensor for coded in parts for tensor in coded.tensors()):
                offset = tensor.data_ptr() - memory.data_ptr()
                assert 0 <= offset <= len(memory) - tensor.nbytes


def arrivals(loader: Loader, load: Load, parts: list[Part]) -> list[tuple[int, str, Arrival]]:
    """Parts when the loader has done its work, whose stream is this thread's here, too."""
    return [(*part, loader.wait(load, part)) for part in parts]


@pytest.mark.parametrize("format", ENTRY_FORMATS)
@pytest.mark.parametrize("names", [("kv",), ("h", "kv", "end")])
def test_a_whole_entry_travels_in_few_copies(
    cuda: Cuda, stored: Stored, format: str, names: tuple[str, ...]
) -> None:
    """Eight calls of the host: a copy and an event each. A step waits once for each copy."""
    entry = random_entry(0, tokens=64, width=64, blocks=12, format=format, parts=names)
    assert stored.tier.put("deep", entry, NOTE)
    file = stored.tier.open("deep", entry.anchor)
    assert file is not None
    few, most = Selection([np.arange(0, 64, 2)]), Selection([np.arange(1, 64)])
    stored.mover.rates = LinkRates(10e9, 15e9)
    assert [stored.mover.reads_whole(file, selection) for selection in (few, most)] == [False, True]
    load, loader = Load(file, "host", None), Loader(stored.mover)
    parts = [(block, part) for block in range(12) for part in PARTS if load.keeps((block, part))]
    cuda.sent.clear()
    loader.ask(load, parts, 0)
    for block, part, arrival in arrivals(loader, load, parts):
        arrived = arrival.get()
        cuda.default.reach(len(cuda.default.work))
        assert equal(arrived, entry.blocks[block].part(part))
    assert len(cuda.sent) <= 4
    assert len(cuda.default.work) == cuda.recorded == len(cuda.sent)
    assert sum(cuda.sent) == entry.nbytes == load.moved
    loader.close()


def test_parts_that_do_not_follow_one_another_travel_alone(cuda: Cuda, stored: Stored) -> None:
    stored_entry, entry = stored.entry(0)
    parts = [(2, "kv"), (1, "h"), (0, "kv")]
    load, loader = Load(stored_entry, "host", None), Loader(stored.mover)
    loader.ask(load, parts, 0)
    for block, part, arrival in arrivals(loader, load, parts):
        arrived = arrival.get()
        cuda.default.reach(len(cuda.default.work))
        assert equal(arrived, entry.blocks[block].part(part))
    assert len(cuda.sent) == len(parts)
    loader.close()


def test_whole_tensors_travel_in_one_copy_each_and_ids_once(cuda: Cuda, stored: Stored) -> None:
    stored_entry, _ = stored.entry(0)
    ids = np.arange(0, 300, 2)
    for block in range(3):
        stored.mover.move(stored_entry.blocks[block].part("kv"), ids)
    scale = 64 * 4
    block = [scale, 300 * 64, scale, 300 * 64]
    assert cuda.sent == [scale, 8 * len(ids), *block[1:], *block, *block]


@pytest.mark.parametrize("tokens", [10, 59, 61, 300])
def test_the_way_that_is_done_sooner_is_taken(cuda: Cuda, stored: Stored, tokens: int) -> None:
    """A link five times as fast as a core: whole tensors from a fifth of their tokens on."""
    stored.mover.rates = LinkRates(gathered=10e9, direct=50e9)
    stored_entry, _ = stored.entry(0)
    stored.mover.move(stored_entry.blocks[0].part("h"), np.arange(tokens))
    count, _, scale = 8 * tokens, 300 * 64, 64 * 4
    direct = [scale, count, 300 * 64]
    assert (cuda.sent == direct) is (tokens > 60)
    assert sum(cuda.sent) == (sum(direct) if tokens > 60 else 64 * tokens + scale)


def test_heads_of_whole_tensors_are_cut_on_the_device(cuda: Cuda, stored: Stored) -> None:
    stored_entry, entry = stored.entry(0)
    ids = np.sort(fresh_rng().permutation(300)[:200])
    for levels in ([ids], [np.arange(300)]):
        load = Load(stored_entry, "host", Selection(levels, heads=(1, 3, 4)))
        arrival = stored.mover.move(load.parts(2, "kv"), levels[0])
        parts = arrival.get()
        cuda.default.reach(len(cuda.default.work))
        chosen = torch.from_numpy(levels[0])
        expected = [c.columns(1, 3, 4).take(chosen) for c in entry.blocks[2].part("kv")]
        assert equal(parts, tuple(expected))


def test_a_file_that_was_refused_goes_through_the_ring(cuda: Cuda, stored: Stored) -> None:
    cuda.runtime.refuses = 2
    stored_entry, entry = stored.entry(0)
    assert stored_entry.file.registered is None
    parts = stored.mover.move(stored_entry.blocks[0].part("kv"), None).get()
    cuda.default.reach(len(cuda.default.work))
    assert equal(parts, entry.blocks[0].part("kv"))
    assert max(cuda.sent) <= BUFFER


def test_few_direct_copies_are_on_their_way_at_once(cuda: Cuda, stored: Stored) -> None:
    """A block that is needed sooner does not wait for a whole entry."""
    stored_entry, _ = stored.entry(0)
    for block in range(3):
        stored.mover.move(stored_entry.blocks[block].part("kv"), None)
        assert len(stored.mover.stream.work) - stored.mover.stream.done <= 2


def test_an_entry_evicted_under_a_copy_stays_registered_until_it_is_done(
    cuda: Cuda, stored: Stored, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes = threading.Event()
    real = Event.synchronize

    def waits(event: Event) -> None:
        assert passes.wait(30)
        real(event)

    stored_entry, entry = stored.entry(0)
    arrival = stored.mover.move(stored_entry.blocks[0].part("h"), None)
    monkeypatch.setattr(Event, "synchronize", waits)
    stored.tier.evict("0")
    del stored_entry
    gc.collect()
    with pytest.raises(AssertionError):
        eventually("unregistered", lambda: not cuda.runtime.ranges, timeout_s=0.3)
    passes.set()
    eventually("unregistered", lambda: not cuda.runtime.ranges)
    parts = arrival.get()
    cuda.default.reach(len(cuda.default.work))
    assert equal(parts, entry.blocks[0].part("h"))


def test_a_loader_that_is_closed_has_unregistered_everything(cuda: Cuda, stored: Stored) -> None:
    stored_entry, _ = stored.entry(0)
    load = Load(stored_entry, "host", Selection([np.arange(0, 300, 3)]))
    loader = Loader(stored.mover)
    block_parts = [(block, "kv") for block in range(3)]
    loader.ask(load, block_parts, 0)
    for want in block_parts:
        loader.wait(load, want)
    assert cuda.runtime.ranges
    loader.close()
    assert not cuda.runtime.ranges
    assert cuda.runtime.total == 1
