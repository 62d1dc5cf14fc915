"""What one cached row reads over its steps: this step's entry, and the next one ahead of time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from maskserve_common.contracts.keys import Anchor
from maskserve_engine.base.device_clock import Span
from maskserve_engine.cache.entry_file import EntrySource
from maskserve_engine.cache.loader import Selection
from maskserve_engine.cache.store import Handle, Store

Heads = tuple[int, int, int]
"""First and last (exclusive) of so many."""


class EntryReader:
    """The row's way to its template's entries.

    It holds the entries from the start, so that an eviction cannot take them from under the row;
    what is not there yet (a file that is being fetched) is asked for again at each step.

    Args:
        store: of the entries.
        key: of the template.
        anchors: per step of the row; None where no anchor is near enough.
        selection: the row's inactive tokens.
        sure: whether a step may not go without its entry for want of room (`reproducible`).
    """

    def __init__(
        self,
        store: Store,
        key: str,
        anchors: Sequence[Anchor | None],
        selection: Selection,
        *,
        sure: bool = False,
    ) -> None:
        self.key, self.anchors = key, tuple(anchors)
        self._selections: dict[Heads | None, Selection] = {None: selection}
        """By what is read of keys and values."""
        self.heads: Heads | None = None
        self.loaded: dict[str, int] = {}
        """Bytes that travelled for it, by the tier in which they were found."""
        self.now: Handle | None = None
        """What this step reads."""
        self.next: Handle | None = None
        """What is being brought in for a later step."""
        self._stalls: list[Span] = []
        self._steps = Counter(self.anchors)
        self._store, self._sure = store, sure
        self._sources: dict[Anchor, EntrySource] = {}
        self._hold_all()

    @property
    def complete(self) -> bool:
        """Whether it holds every entry that its steps read."""
        return self._sources.keys() == self._steps.keys() - {None}

    @property
    def stalled(self) -> float:
        """Seconds that steps have waited for what it has let go by now."""
        return sum(stall.seconds() or 0.0 for stall in self._stalls)

    def turn_to(
        self, step: int, *, whole: bool = False, heads: Heads | None = None
    ) -> Handle | None:
        """What `step` reads; None: it computes all tokens.

        Args:
            step: of the row.
            whole: as of `Store.request`.
            heads: whose keys and values alone it reads; None: those of all. What was brought in for
                others is let go.
        """
        if heads != self.heads:
            self._let_go()
            self.heads = heads
        anchor = self.anchors[step]
        if self.now is not None and self.now.anchor != anchor:
            self._finish(self.now)
            self.now = None
        if self.now is None and anchor is not None:
            if self.next is not None and self.next.anchor == anchor:
                self.now, self.next = self.next, None
            else:
                self.now = self._request(anchor, whole=whole, force=self._sure)
        return self.now

    def look_ahead(self, step: int) -> tuple[Handle, int] | None:
        """What is read after this step's entry, and by which step; None: nothing, or not now."""
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

    def stays(self, step: int) -> int:
        """Steps of the row that read the same entry."""
        return self._steps[self.anchors[step]]

    def lose(self) -> None:
        """Go without the rest of this step's entry: it will not come."""
        if self.now is not None:
            anchor = self.now.anchor
            self._finish(self.now)
            self.now = None
            self.anchors = tuple(None if a == anchor else a for a in self.anchors)

    def turn_over(self, key: str, anchors: Sequence[Anchor | None]) -> None:
        """Read the entries of another key from the next step on."""
        self.release()
        self.key, self.anchors = key, tuple(anchors)
        self._steps = Counter(self.anchors)
        self._hold_all()

    def release(self) -> None:
        """The row has ended."""
        self._let_go()
        for source in self._sources.values():
            self._store.let_go(source)
        self._sources.clear()

    def _let_go(self) -> None:
        for handle in (self.now, self.next):
            if handle is not None:
                self._finish(handle)
        self.now = self.next = None

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
