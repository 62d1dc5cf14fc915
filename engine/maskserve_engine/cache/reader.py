"""The entries that one cached row reads: those of this step, and the next ones ahead of time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from maskserve_common.contracts.keys import Anchor
from maskserve_engine.base.device_clock import Span
from maskserve_engine.cache.entry_file import EntrySource
from maskserve_engine.cache.loader import Selection
from maskserve_engine.cache.store import Handle, Store

Heads = tuple[int, int, int]
"""First and last (exclusive) head, and the number of all heads."""


class EntryReader:
    """Gives a row its template's entries, step by step.

    It keeps the entries from the start, so that an eviction cannot take them from the row. It asks
    again at each step for entries that are not open yet (such as a file that is being fetched).

    Args:
        store: cache of the entries.
        key: cache key of the template.
        anchors: anchor of each step of the row; None if no anchor is near enough.
        selection: cached tokens of the row.
        force: whether steps read their entries even if there is no room for them (`reproducible`).
    """

    out_of_memory = False
    refresh_errors: Mapping[int, float] = MappingProxyType({})

    def __init__(
        self,
        store: Store,
        key: str,
        anchors: Sequence[Anchor | None],
        selection: Selection,
        *,
        force: bool = False,
    ) -> None:
        self.key, self.anchors = key, tuple(anchors)
        self._selections: dict[Heads | None, Selection] = {None: selection}
        """Selections by the heads whose keys and values are read."""
        self.heads: Heads | None = None
        self.loaded: dict[str, int] = {}
        """Bytes moved for the row, by the tier in which they were found."""
        self.entry: Handle | None = None
        """Entry that this step reads."""
        self.next: Handle | None = None
        """Entry being loaded for a later step."""
        self._stalls: list[Span] = []
        self._store, self._force = store, force
        self._sources: dict[Anchor, EntrySource] = {}
        self._hold_all()

    @property
    def complete(self) -> bool:
        """Whether it has every entry that its steps read."""
        return self._sources.keys() == {*self.anchors} - {None}

    @property
    def stalled(self) -> float:
        """Seconds that steps have waited for entries, of those already released."""
        return sum(stall.seconds() or 0.0 for stall in self._stalls)

    def entry_at(
        self, step: int, *, whole: bool = False, heads: Heads | None = None
    ) -> Handle | None:
        """Return the entry that `step` reads; None: the step computes all tokens.

        Args:
            step: number of the row's step.
            whole: whether all tokens are moved, once for all rows that ask so.
            heads: heads whose keys and values are read; None: all. Entries loaded for other heads
                are released.
        """
        if heads != self.heads:
            self._let_go()
            self.heads = heads
        anchor = self.anchors[step]
        if self.entry is not None and self.entry.anchor != anchor:
            self._finish(self.entry)
            self.entry = None
        if self.entry is None and anchor is not None:
            if self.next is not None and self.next.anchor == anchor:
                self.entry, self.next = self.next, None
            else:
                self.entry = self._request(anchor, whole=whole, force=self._force)
        return self.entry

    def look_ahead(self, step: int) -> tuple[Handle, int] | None:
        """Return the next entry and the step that reads it; None: there is none, or it is not
        ready.
        """
        at = next(
            (
                n
                for n in range(step, len(self.anchors))
                if self.anchors[n] not in (None, self.anchors[step])
            ),
            None,
        )
        if at is None:
            return None
        anchor = self.anchors[at]
        assert anchor is not None
        if self.next is None or self.next.anchor != anchor:
            if self.next is not None:
                self._finish(self.next)
            self.next = self._request(anchor, whole=False, force=False)
        return None if self.next is None else (self.next, at)

    def lose(self) -> None:
        """Give up this step's entry, which will not arrive."""
        if self.entry is not None:
            anchor = self.entry.anchor
            self._finish(self.entry)
            self.entry = None
            self.anchors = tuple(None if a == anchor else a for a in self.anchors)

    def switch(self, key: str, anchors: Sequence[Anchor | None]) -> None:
        """Read the entries of another key from the next step on."""
        self.release()
        self.key, self.anchors = key, tuple(anchors)
        self._hold_all()

    def release(self) -> None:
        """Release all entries; the row has ended."""
        self._let_go()
        for source in self._sources.values():
            self._store.let_go(source)
        self._sources.clear()

    def _let_go(self) -> None:
        for handle in (self.entry, self.next):
            if handle is not None:
                self._finish(handle)
        self.entry = self.next = None

    def _hold_all(self) -> None:
        for anchor in dict.fromkeys(a for a in self.anchors if a is not None):
            self._hold(anchor)

    def _hold(self, anchor: Anchor) -> EntrySource | None:
        source = self._sources.get(anchor) or self._store.hold(self.key, anchor)
        if source is not None:
            self._sources[anchor] = source
        return source

    def _request(self, anchor: Anchor, *, whole: bool, force: bool) -> Handle | None:
        source = self._hold(anchor)
        if source is None:
            return None
        heads = self.heads
        if heads is not None and heads not in self._selections:
            self._selections[heads] = self._selections[None].of_heads(*heads)
        selection = self._selections[heads]
        return self._store.request(self.key, anchor, selection, source, whole=whole, force=force)

    def _finish(self, handle: Handle) -> None:
        self._stalls += handle.stalls
        tier, moved = self._store.account(handle)
        if moved:
            self.loaded[tier] = self.loaded.get(tier, 0) + moved
        handle.release()
