"""The loader: entries on their way to the device, part by part, beside the step that reads them.

The step begins on block 0 while later blocks arrive; it waits where it meets a part that is not
there yet (FlashPS §4.2). Parts travel in the order of their turn (the step that reads them) and
block, so what the next step will read never delays what this one reads.
"""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections import deque
from collections.abc import Iterable

import numpy as np

from maskserve_engine.cache.entries import PARTS, AnchorEntry
from maskserve_engine.cache.entry_file import StoredEntry
from maskserve_engine.cache.movers import Arrival, Mover
from maskserve_engine.cache.selection import Selection

Want = tuple[int, str]
"""A block and one of PARTS."""

_LOOK_S = 0.2
"""How often who waits looks whether the loader's thread is alive."""


class EntryLost(Exception):
    """A part of an entry will not come: its file has gone bad, or the loader has failed."""


class Load:
    """One entry's tokens on the device: those of a selection, or all of them.

    Args:
        entry: where the parts come from; held until the load is dropped.
        tier: that it lies in.
        selection: tokens that travel; None: all, and each row takes its own on the device.
    """

    def __init__(
        self, entry: AnchorEntry | StoredEntry, tier: str, selection: Selection | None
    ) -> None:
        self.entry, self.tier, self.selection = entry, tier, selection
        self.sizes = np.array(
            [[self._size(block, part) for part in PARTS] for block in range(len(entry.blocks))]
        )
        """[blocks, len(PARTS)] bytes that travel; `inf` for what is not kept."""
        self.missing = self.sizes.copy()
        """The same of what has not arrived."""
        self.moved = 0
        """Bytes that have travelled and were not accounted for."""
        self.arrived: dict[Want, Arrival] = {}
        self.asked: dict[Want, int] = {}
        """Parts on their way, and the turn they are wanted for."""
        self.lost: BaseException | None = None

    @property
    def nbytes(self) -> int:
        """Of everything that may travel."""
        return int(self.sizes[np.isfinite(self.sizes)].sum())

    def keeps(self, want: Want) -> bool:
        """Whether the entry has this part."""
        return bool(np.isfinite(self.sizes[want[0], PARTS.index(want[1])]))

    def arrive(self, want: Want, arrival: Arrival) -> None:
        at = want[0], PARTS.index(want[1])
        self.arrived[want] = arrival
        self.asked.pop(want, None)
        self.moved += int(self.missing[at])
        self.missing[at] = 0.0

    def _size(self, block: int, part: str) -> float:
        parts = self.entry.blocks[block].part(part)
        if not parts:
            return np.inf
        if self.selection is None:
            return sum(coded.nbytes for coded in parts)
        return sum(coded.nbytes_of(len(self.selection.of(block))) for coded in parts)


class Loader:
    """Moves parts to the device on a thread of its own.

    Args:
        mover: how bytes get to this device.
    """

    def __init__(self, mover: Mover) -> None:
        self.mover = mover
        self._moves: deque[tuple[str, float, float]] = deque(maxlen=4096)
        self._tasks: list[tuple[int, int, Load, Want]] = []
        self._order = itertools.count()
        self._changed = threading.Condition()
        self._closed = False
        self._moving: Load | None = None
        self._thread: threading.Thread | None = None

    def ask(self, load: Load, wants: Iterable[Want], turn: int) -> None:
        """Have parts brought in; those there or on their way for an earlier turn stay as they are.

        Args:
            load: of these parts.
            wants: in the order in which the step reads them; parts that are not kept are skipped.
            turn: number of the step that reads them.
        """
        with self._changed:
            new = [
                want
                for want in wants
                if want not in load.arrived
                and load.asked.get(want, turn + 1) > turn
                and load.keeps(want)
            ]
            for want in new:
                load.asked[want] = turn
                heapq.heappush(self._tasks, (turn, next(self._order), load, want))
            self._start()
            if new:  # else the loader would wake at every step, and take the interpreter from it
                self._changed.notify_all()

    def wait(self, load: Load, want: Want) -> Arrival:
        """The part, once it has arrived.

        Raises:
            EntryLost: it will not come.
        """
        with self._changed:
            while want not in load.arrived:
                if load.lost is not None:
                    raise EntryLost(f"block {want[0]}, part {want[1]}") from load.lost
                if want not in load.asked:
                    raise EntryLost(f"block {want[0]}, part {want[1]}, was not asked for")
                if self._thread is None or not self._thread.is_alive():
                    load.lost = EntryLost("the loader has ended")
                    continue
                self._changed.wait(_LOOK_S)
            return load.arrived[want]

    def drop(self, load: Load) -> None:
        """Forget what is still on its way."""
        with self._changed:
            load.asked.clear()
            load.arrived.clear()
            load.lost = EntryLost("the load was dropped")
            self._tasks = [task for task in self._tasks if task[2] is not load]
            heapq.heapify(self._tasks)

    def take_moves(self) -> list[tuple[str, float, float]]:
        """(tier, bytes, seconds) of the moves since this was asked last."""
        return [self._moves.popleft() for _ in range(len(self._moves))]

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(10.0)

    def _start(self) -> None:
        if self._tasks and (self._thread is None or not self._thread.is_alive()):
            if self._moving is not None:  # the thread before has died over it
                self._moving.lost = EntryLost("the loader has ended")
            self._thread = threading.Thread(target=self._run, name="loader", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._tasks and not self._closed:
                    self._changed.wait()
                if self._closed:
                    return
                _, _, load, want = heapq.heappop(self._tasks)
                self._moving = load
            if want not in load.arrived and load.lost is None:
                self._move(load, want)
            self._moving = None

    def _move(self, load: Load, want: Want) -> None:
        begin = time.perf_counter()
        parts = load.entry.blocks[want[0]].part(want[1])
        ids = None if load.selection is None else load.selection.of(want[0])
        try:
            arrival = self.mover.move(parts, ids)
        except Exception as error:  # whatever a device or a file can raise: its readers are told
            with self._changed:
                load.lost = error
                self._changed.notify_all()
            return
        with self._changed:
            if load.lost is None:
                size = float(load.missing[want[0], PARTS.index(want[1])])
                load.arrive(want, arrival)
                self._moves.append((load.tier, size, time.perf_counter() - begin))
            self._changed.notify_all()
