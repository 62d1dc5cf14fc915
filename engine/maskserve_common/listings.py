"""Versions of a worker's template listing, and the changes between them."""

from __future__ import annotations

import secrets
from collections.abc import Mapping

import msgspec

from maskserve_common.contracts.status_record import TemplateChanges

_MOST_VERSIONS = 16
"""Versions whose changes are remembered; readers of an older one get the whole listing."""
_decode = msgspec.json.Decoder(dict[str, frozenset[str]]).decode
_NOTHING: frozenset[str] = frozenset()


class TemplateListings:
    """The last versions of one worker's listing; used from one thread."""

    def __init__(self) -> None:
        # Versions of a restarted process differ.
        self._name = secrets.token_hex(4)
        self._number = 0
        self._raw = b""
        self._versions: dict[str, Mapping[str, frozenset[str]]] = {}
        self._changes: dict[str, TemplateChanges] = {}
        """Changes up to the last version, by the version since which they are."""

    @property
    def version(self) -> str:
        """Version of the last listing."""
        return f"{self._name}-{self._number}"

    def take(self, raw: memoryview) -> None:
        """A record's listing has been read, tier -> ids as JSON; most are as the one before."""
        if raw == self._raw and self._number:
            return
        self._raw = bytes(raw)
        self._number += 1
        self._versions[self.version] = _decode(self._raw)
        for old in list(self._versions)[:-_MOST_VERSIONS]:
            del self._versions[old]
        self._changes.clear()

    def changes(self, since: str) -> TemplateChanges:
        """Return the changes since a version; all templates where that version is not known.

        Args:
            since: version that the reader has; empty: none.
        """
        since = since if since in self._versions else ""
        if since not in self._changes:
            old_listing, new_listing = self._versions.get(since, {}), self._versions[self.version]
            self._changes[since] = changes_of(old_listing, new_listing, since, self.version)
        return self._changes[since]


def changes_of(
    before: Mapping[str, frozenset[str]],
    now: Mapping[str, frozenset[str]],
    since: str = "",
    version: str = "",
) -> TemplateChanges:
    """Return the differences of the second listing from the first, with the versions of both."""
    return TemplateChanges(version, since, added=_more(now, before), removed=_more(before, now))


def _more(
    listing: Mapping[str, frozenset[str]], earlier: Mapping[str, frozenset[str]]
) -> dict[str, tuple[str, ...]]:
    """Return the ids that only the first listing has, by tier."""
    differences = {tier: ids - earlier.get(tier, _NOTHING) for tier, ids in listing.items()}
    return {tier: tuple(sorted(ids)) for tier, ids in differences.items() if ids}
