"""One contract for every tier: memory, a folder, a URL."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from maskserve_common.contracts.keys import Anchor
from maskserve_engine.cache.entry_file import dump_entry
from maskserve_engine.cache.folder_tier import FolderTier
from maskserve_engine.cache.memory_tier import MemoryTier
from maskserve_engine.cache.remote_tier import RemoteTier
from maskserve_engine.cache.tier import Note, Rebuild, Tier, TierEntry, computed_anew
from tests.fakes.entries import ANCHORS, NOTE, random_entry, same

SIZE = random_entry(0).nbytes
FILE = len(dump_entry(random_entry(0), NOTE)) + 200
"""Bytes of its file; notes and anchors differ by a few characters."""


class Clock:
    """Seconds that a test moves on."""

    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


Make = Callable[..., Tier]


@pytest.fixture(params=["device", "host", "remote"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Make:
    """A tier with room for so many entries, in a folder of its own."""

    def make_tier(entries: float, rebuild: Rebuild = computed_anew, at: str = "a") -> Tier:
        budget, clock = int(entries * FILE), Clock()
        match request.param:
            case "device":
                return MemoryTier(int(entries * SIZE), rebuild, clock)
            case "host":
                return FolderTier("host", tmp_path / at, budget, rebuild, clock)
            case _:
                return RemoteTier(f"file://{tmp_path}/{at}", budget, rebuild, clock)

    return make_tier


def fill(tier: Tier, key: str, seed: int = 0, note: Note = NOTE) -> None:
    for number, anchor in enumerate(ANCHORS):
        assert tier.put(key, random_entry(seed + number, anchor), note)


def test_what_is_put_comes_back_bit_for_bit(make: Make) -> None:
    tier = make(100)
    for number, (format, dtype) in enumerate(
        [
            ("model", torch.float32),
            ("model", torch.bfloat16),
            ("int8", torch.float32),
            ("float8", torch.float32),
            ("int4", torch.bfloat16),
        ]
    ):
        entry = random_entry(number, ANCHORS[number % 3], format=format, dtype=dtype)
        assert tier.put(f"k{number}", entry, NOTE)
        assert same(tier.get(f"k{number}", entry.anchor), entry)
    tier.check_integrity()


def test_what_is_not_there_is_none(make: Make) -> None:
    tier = make(10)
    assert tier.get("no", ANCHORS[0]) is None
    fill(tier, "k")
    assert tier.get("k", Anchor(0.123, 123.0)) is None
    assert tier.anchors("no") == frozenset()
    assert tier.evict("no") == 0


def test_a_template_is_listed_with_its_note_and_whole_when_all_its_anchors_are_there(
    make: Make,
) -> None:
    tier = make(10)
    assert tier.put("k", random_entry(0, ANCHORS[0]), NOTE)
    assert not tier.entries()["k"].whole
    fill(tier, "k")
    tier_entry = tier.entries()["k"]
    assert tier_entry.whole
    assert tier_entry.note == NOTE
    assert set(tier_entry.anchors) == set(ANCHORS) == tier.anchors("k")
    assert 3 * SIZE <= tier_entry.nbytes <= 3 * FILE


def test_the_budget_holds_and_the_least_recently_used_template_goes(make: Make) -> None:
    tier = make(6)
    fill(tier, "old")
    fill(tier, "new")
    tier.touch("old")
    assert tier.put("third", random_entry(9), NOTE)
    assert set(tier.entries()) == {"old", "third"}
    assert tier.evictions == 1
    tier.check_integrity()


def test_what_is_dear_to_have_again_outlives_what_is_cheap(make: Make) -> None:
    """Recency weighted with rebuild cost per byte: the dear one is older, but not by as much."""
    tier = make(6)
    fill(tier, "dear", note=Note("d", 3, 60.0))
    fill(tier, "cheap", note=Note("c", 3, 0.1))
    assert tier.put("third", random_entry(9), NOTE)
    assert set(tier.entries()) == {"dear", "third"}


def test_what_a_tier_below_has_is_cheap(make: Make) -> None:
    def rebuild(key: str, tier_entry: TierEntry) -> float:
        return 0.1 if key == "below" else tier_entry.note.rebuild_s

    tier = make(6, rebuild)
    fill(tier, "alone")
    fill(tier, "below")
    assert tier.put("third", random_entry(9), NOTE)
    assert set(tier.entries()) == {"alone", "third"}


def test_a_pinned_template_stays(make: Make) -> None:
    tier = make(6)
    fill(tier, "pinned")
    tier.pin("pinned", pinned=True)
    fill(tier, "other")
    assert tier.entries()["pinned"].pinned
    assert tier.put("third", random_entry(9), NOTE)
    assert set(tier.entries()) == {"pinned", "third"}
    tier.pin("pinned", pinned=False)
    fill(tier, "fourth")
    assert "pinned" not in tier.entries()


def test_what_cannot_fit_evicts_nobody(make: Make) -> None:
    tier = make(3)
    fill(tier, "k")
    big = random_entry(1, tokens=24 * 2000)
    assert not tier.put("big", big, NOTE)
    assert set(tier.entries()) == {"k"}
    assert tier.evictions == 0


def test_a_template_does_not_evict_itself(make: Make) -> None:
    tier = make(2)
    assert tier.put("k", random_entry(0, ANCHORS[0]), NOTE)
    assert tier.put("k", random_entry(1, ANCHORS[1]), NOTE)
    assert not tier.put("k", random_entry(2, ANCHORS[2]), NOTE)
    assert len(tier.anchors("k")) == 2


def test_what_was_handed_out_stays_valid_after_its_eviction(make: Make) -> None:
    tier = make(10)
    fill(tier, "k")
    entry = tier.get("k", ANCHORS[1])
    assert tier.evict("k") >= 3 * SIZE
    assert tier.entries() == {}
    assert same(entry, random_entry(1, ANCHORS[1]))


def test_putting_an_entry_again_replaces_it(make: Make) -> None:
    tier = make(10)
    fill(tier, "k")
    nbytes = tier.entries()["k"].nbytes
    assert tier.put("k", random_entry(77, ANCHORS[0]), NOTE)
    assert same(tier.get("k", ANCHORS[0]), random_entry(77, ANCHORS[0]))
    assert tier.entries()["k"].nbytes == nbytes
    tier.check_integrity()


def test_memory_books_what_rows_hold() -> None:
    tier = MemoryTier(3 * SIZE)
    fill(tier, "k")
    entry = tier.get("k", ANCHORS[0])
    assert entry is not None
    tier.lend(entry)
    assert not tier.book(SIZE)  # evicting what a row reads frees nothing
    tier.evict("k")
    assert tier.nbytes == SIZE  # the row holds it still
    assert tier.book(2 * SIZE)
    assert not tier.book(1)
    tier.unbook(2 * SIZE)
    tier.give_back(entry)
    assert tier.nbytes == 0
    tier.check_integrity()
