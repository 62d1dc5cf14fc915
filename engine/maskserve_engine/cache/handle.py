"""A row's hold on what it reads of one entry."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import Tensor

from maskserve_core.contracts.entry_key import Anchor
from maskserve_engine.cache.codec import Coded
from maskserve_engine.cache.loader import Load, Loader, Want
from maskserve_engine.cache.selection import Selection
from maskserve_engine.device_clock import Span, mark


class Handle:
    """One entry as one row reads it; valid until released.

    Args:
        anchor: of the entry.
        load: shared by the rows that read the same.
        loader: that brings it in.
        selection: the row's own tokens.
        release: told once, when the row lets go.
    """

    def __init__(
        self,
        anchor: Anchor,
        load: Load,
        loader: Loader,
        selection: Selection,
        release: Callable[[], None],
    ) -> None:
        self.anchor, self.load = anchor, load
        self.stalls: list[Span] = []
        """Where steps have waited for a part."""
        self._loader, self._selection, self._release = loader, selection, release
        self._released = False

    def want(self, wants: Iterable[Want], turn: int) -> None:
        """Have parts brought in for a step; see `Loader.ask`."""
        self._loader.ask(self.load, wants, turn)

    def ready(self, block: int, part: str) -> bool:
        """Whether `wait` would return at once."""
        arrival = self.load.arrived.get((block, part))
        return arrival is not None and arrival.ready()

    def wait(self, block: int, part: str) -> tuple[Coded, ...]:
        """The row's own tokens of a part: (keys, values) of `kv`, one of any other of PARTS.

        Raises:
            EntryLost: it will not come; the row can be stepped without entries.
        """
        parts, ids = self.wait_whole(block, part)
        return parts if ids is None else tuple(coded.take(ids) for coded in parts)

    def wait_whole(self, block: int, part: str) -> tuple[tuple[Coded, ...], Tensor | None]:
        """A part as it lies on the device, and which of its tokens are the row's; None: all are.

        Raises:
            EntryLost: as `wait`.
        """
        arrival = self.load.arrived.get((block, part))
        if arrival is not None and arrival.ready():
            parts = arrival.get()
        else:
            begin = mark(self._loader.mover.device)
            parts = (arrival or self._loader.wait(self.load, (block, part))).get()
            self.stalls.append(Span(begin, mark(self._loader.mover.device)))
        if self.load.selection is not None:
            return parts, None
        return parts, self._selection.on(block, parts[0].data.device)

    def release(self) -> None:
        """Let go; what nobody else reads is dropped."""
        if not self._released:
            self._released = True
            self._release()
