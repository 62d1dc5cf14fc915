"""How entries get to a CUDA device, on a stand-in that copies as late as it may."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from maskserve_core.config import ENTRY_FORMATS
from maskserve_core.contracts.keys import Anchor
from maskserve_engine.cache import loader
from maskserve_engine.cache.entries import AnchorEntry, Coded, encode
from maskserve_engine.cache.loader import CudaMover, HostMover

BUFFER = 4096
"""Bytes of a pinned buffer: a part takes many."""


class Stream:
    """Work in order, done only when somebody waits for it."""

    made = 0

    def __init__(self, device: object = None) -> None:
        Stream.made += 1
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
    """What CudaMover may use of torch.cuda: nothing in it waits for the whole device."""

    Stream, Event = Stream, Event

    def __init__(self) -> None:
        self.current = self.default = Stream()
        self.pinned = 0
        self.recorded = 0

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

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
        self.cuda.current.work.append(lambda: plain.copy_(source))
        return self

    def record_stream(self, stream: Stream) -> None:
        self.cuda.recorded += 1


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    fake = Cuda()

    def empty(*shape: Any, pin_memory: bool = False, device: object = None, **more: Any) -> Tensor:
        fake.pinned += pin_memory
        made = torch.empty(*shape, **more)
        return made if device is None else made.as_subclass(OnDevice)  # type: ignore[no-untyped-call]

    monkeypatch.setattr(OnDevice, "cuda", fake, raising=False)
    monkeypatch.setattr(loader, "torch", SimpleNamespace(cuda=fake, empty=empty, uint8=torch.uint8))
    return fake


def part(seed: int, format: str) -> tuple[Coded, Coded]:
    """Keys and values of 300 tokens."""
    torch.manual_seed(seed)
    keys, values = (encode(torch.randn(300, 64), format) for _ in range(2))
    return keys, values


def arrives_right(mover: CudaMover, cuda: Cuda, format: str) -> bool:
    """Whether two parts moved one after the other are what a row is to read of them."""
    ids = np.sort(np.random.default_rng().permutation(300)[:200])
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
    assert first.event is not None
    first.event.synchronize()
    assert first.ready()
    assert not second.ready()


@pytest.mark.parametrize("format", ENTRY_FORMATS)
def test_entries_lie_token_by_token_however_they_were_computed(format: str) -> None:
    """A 1x1 convolution leaves them channel by channel, of which no token can be gathered."""
    x = torch.randn(64, 24).t()
    stored = encode(x, format)
    assert all(each.is_contiguous() for each in stored.tensors())
    [taken] = HostMover().move((stored,), np.array([3, 20])).get()
    expected, found = torch.empty(2, 64), torch.empty(2, 64)
    encode(x.contiguous(), format).take(torch.tensor([3, 20])).into(expected)
    taken.into(found)
    assert torch.equal(found, expected)


def test_an_arrival_is_waited_for_once(cuda: Cuda) -> None:
    """A row reads the same parts at every step until its next anchor."""
    arrival = CudaMover(torch.device("cuda"), BUFFER).move(part(0, "int8"), None)
    assert not arrival.ready()
    parts = arrival.get()
    asked = len(cuda.default.work), cuda.recorded
    assert asked == (1, 4)  # keys and values, with a scale each
    for _ in range(3):
        assert arrival.ready()
        assert arrival.get() is parts
    assert (len(cuda.default.work), cuda.recorded) == asked


def test_copies_to_the_host_share_a_stream(cuda: Cuda) -> None:
    mover = CudaMover(torch.device("cuda"), BUFFER)
    entry = AnchorEntry(Anchor(1.0, 1000.0), ())
    made = Stream.made
    assert [mover.to_host(entry) for _ in range(3)] == [entry] * 3
    assert Stream.made == made
