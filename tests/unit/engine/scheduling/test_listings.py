"""A reader that is told changes knows what one that is told all does."""

from __future__ import annotations

import json
from collections.abc import Mapping

from hypothesis import given
from hypothesis import strategies as st

from maskserve_common.contracts.status_record import TemplateChanges
from maskserve_common.listings import _MOST_VERSIONS, TemplateListings
from tests.support.examples import examples

Listing = Mapping[str, set[str]]
LISTINGS = st.dictionaries(
    st.sampled_from(("device", "host", "disk", "remote")),
    st.sets(st.sampled_from("abcdefgh")),
)


class Reader:
    def __init__(self) -> None:
        self.version, self.listing = "", dict[str, set[str]]()

    def hear(self, changes: TemplateChanges) -> None:
        if changes.since != self.version:
            assert changes.since == ""
            self.listing = {}
        for tier, ids in changes.added.items():
            self.listing.setdefault(tier, set()).update(ids)
        for tier, ids in changes.removed.items():
            self.listing[tier].difference_update(ids)
        self.version = changes.version


def take(listings: TemplateListings, listing: Listing) -> None:
    listings.take(memoryview(json.dumps({t: sorted(ids) for t, ids in listing.items()}).encode()))


def without_empty(listing: Listing) -> Listing:
    return {tier: set(ids) for tier, ids in listing.items() if ids}


@examples(100)
@given(steps=st.lists(st.tuples(LISTINGS, st.sets(st.integers(0, 2))), max_size=30))
def test_readers_know_the_listing_however_seldom_they_ask(
    steps: list[tuple[Listing, set[int]]],
) -> None:
    listings, readers = TemplateListings(), [Reader() for _ in range(3)]
    for listing, asking in steps:
        take(listings, listing)
        for number in asking:
            readers[number].hear(listings.changes(readers[number].version))
            assert without_empty(readers[number].listing) == without_empty(listing)


def test_a_listing_that_stays_has_no_changes() -> None:
    listings = TemplateListings()
    take(listings, {"host": {"a", "b"}})
    first = listings.changes("")
    assert (first.since, first.added, first.removed) == ("", {"host": ("a", "b")}, {})
    take(listings, {"host": {"a", "b"}})
    assert listings.changes(first.version) == TemplateChanges(first.version, first.version)
    take(listings, {"host": {"b"}, "disk": {"a"}})
    second = listings.changes(first.version)
    assert (second.since, second.added) == (first.version, {"disk": ("a",)})
    assert second.removed == {"host": ("a",)}


def test_who_knows_another_process_or_too_old_a_version_is_told_all() -> None:
    old, listings = TemplateListings(), TemplateListings()
    take(old, {"host": {"a"}})
    for number in range(_MOST_VERSIONS + 2):
        take(listings, {"host": {str(number)}})
        if not number:
            first = listings.version
    for version in (old.version, first, "no such"):
        assert listings.changes(version).since == ""
        assert listings.changes(version).added == {"host": (str(_MOST_VERSIONS + 1),)}
