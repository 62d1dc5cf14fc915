"""Tensors of a row in host memory: what a step's reads ask of the loader, and what they cost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from functools import partial
from typing import ClassVar

import numpy as np
import pytest
import torch

from maskserve_engine.cache.entries import Coded, encode
from maskserve_engine.cache.host_cache import BLOCKS_AHEAD, HostCache, HostMemory
from maskserve_engine.cache.loader import HostMover, Load, Loader, Part
from maskserve_engine.planning.two_stream import StepCosts, evaluate
from tests.support import examples
from tests.support.draws import fresh_rng


class InstantLoader(Loader):
    """A loader whose parts arrive when they are asked for."""

    def __init__(self) -> None:
        super().__init__(HostMover())
        self.moves: Counter[Part] = Counter()
        self.most = 0
        """Most parts that lay on the device at once."""

    def ask(self, load: Load, parts: Iterable[Part], step: int) -> None:
        for part in parts:
            if part not in load.arrived:
                load.arrive(part, self.mover.move(load.parts(*part), None))
                self.moves[part] += 1
        self.most = max(self.most, len(load.arrived))


class CountedPart(tuple[int, str]):
    """A part that counts how often it is looked up or compared."""

    __slots__ = ()
    looks: ClassVar[int] = 0

    def __hash__(self) -> int:
        CountedPart.looks += 1
        return super().__hash__()

    def __eq__(self, other: object) -> bool:
        CountedPart.looks += 1
        return super().__eq__(other)


def coded(seed: int) -> tuple[Coded, ...]:
    draws = torch.Generator().manual_seed(seed)
    return tuple([encode(torch.randn(3, 8, generator=draws), "model") for _ in range(2)])


def host_cache(blocks: int, parts: Iterable[Part]) -> tuple[HostCache, InstantLoader]:
    """A cache whose parts are written in that order."""
    loader = InstantLoader()
    cache = HostCache(HostMemory(2**20), loader, blocks, [])
    for seed, part in enumerate(parts):
        assert cache.put(part, coded(seed)) is not None
    return cache, loader


def unet_parts(blocks: int) -> list[Part]:
    """A UNet's parts in the order in which a step computes and reads them: blocks' keys and values,
    and behind the last block of a stack its end.
    """
    rng = fresh_rng()
    parts: list[Part] = []
    for block in range(blocks):
        parts.append((block, "kv"))
        if block + 1 == blocks or rng.random() < 0.4:
            parts.append((block, "end"))
    return parts


def test_each_part_is_moved_once_a_step_and_comes_as_it_was_written() -> None:
    parts = unet_parts(9)
    cache, loader = host_cache(9, parts)
    for step in range(1, 4):
        cache.begin(step)
        for seed, part in enumerate(parts):
            for arrived, written in zip(cache.get(part), coded(seed), strict=True):
                assert torch.equal(arrived.data, written.data)
        assert loader.moves == dict.fromkeys(parts, step)
        assert loader.most <= 2 * (1 + BLOCKS_AHEAD)


def test_what_a_read_looks_up_does_not_grow_with_the_blocks() -> None:
    def looks(blocks: int) -> list[int]:
        parts = [CountedPart((block, "kv")) for block in range(blocks)]
        cache, _ = host_cache(blocks, parts)
        cache.begin(1)
        counts: list[int] = []
        for part in parts:
            before = CountedPart.looks
            cache.get(part)
            counts.append(CountedPart.looks - before)
        return counts

    assert max(looks(200)) == max(looks(20))


def test_what_a_write_looks_up_does_not_grow_with_the_blocks() -> None:
    def looks(blocks: int) -> int:
        before = CountedPart.looks
        host_cache(blocks, [CountedPart((block, "kv")) for block in range(blocks)])
        return CountedPart.looks - before

    one, many = looks(1), looks(200)
    assert many <= 200 * (one + 2)


@pytest.mark.parametrize("blocks", [1, 3])
def test_without_room_a_part_stays_as_it_was(blocks: int) -> None:
    part: Part = (0, "kv")
    nbytes = sum(tensor.nbytes for tensor in coded(0))
    memory = HostMemory(nbytes)
    cache = HostCache(memory, InstantLoader(), blocks, [])
    put = partial(cache.put, part)
    assert put(coded(0)) is not None
    assert put((*coded(1), *coded(2))) is None
    assert (cache.nbytes, memory.booked) == (nbytes, nbytes)
    cache.clear()
    assert memory.booked == 0


class ClockedLoader(InstantLoader):
    """A loader over a link of one byte a second, on a clock of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.free = 0.0
        """Seconds at which the step is, and at which the link has done all that was asked."""
        self.due: dict[Part, float] = {}

    def ask(self, load: Load, parts: Iterable[Part], step: int) -> None:
        for part in parts:
            if part not in load.arrived:
                seconds = sum(coded.nbytes for coded in load.parts(*part))
                self.due[part] = self.free = max(self.free, self.now) + seconds
                super().ask(load, [part], step)


def test_a_step_takes_as_long_as_the_planner_predicts() -> None:
    """On a clock that counts blocks' compute and the link's bytes: the loads of few blocks ahead do
    what a link does that never waits. The planner predicts the whole step.
    """
    rng = fresh_rng()
    for _ in range(examples.number(60)):
        blocks = int(rng.integers(10, 60))
        wide = int(rng.integers(1, blocks))
        sizes = [int(rng.integers(4, 12)) * (1 + (block < wide)) for block in range(blocks)]
        loader = ClockedLoader()
        cache = HostCache(HostMemory(2**30), loader, blocks, [])
        for block, size in enumerate(sizes):
            assert cache.put((block, "kv"), (encode(torch.zeros(size, 8), "model"),)) is not None
        loads = cache.sizes()[:, :2]
        mean = loads[:, 1].mean() * 10.0 ** rng.uniform(-0.7, 0.7)
        compute = mean * rng.uniform(0.8, 1.2, blocks) * (1 + (np.arange(blocks) < wide))
        costs = StepCosts(
            np.repeat(compute[:, None], 3, axis=1),
            np.stack((np.full(blocks, np.inf), loads[:, 1]), axis=1),
            np.zeros(blocks),
        )
        predicted = evaluate(costs, ("kv",) * blocks, lead=0.0).latency
        cache.begin(1)
        for block in range(blocks):
            cache.get((block, "kv"))
            loader.now = max(loader.now, loader.due[block, "kv"]) + compute[block]
        assert predicted <= loader.now * 1.000001
        assert loader.now <= 1.05 * predicted
