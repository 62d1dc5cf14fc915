"""The step scheduler: it chooses the rows that run at a step boundary (FlashPS §4.3).

The scheduler only decides. It has tickets, not tensors, and reads no clock, so the engine and the
simulator run the same code. It is not thread-safe: one thread owns it.

With static batching a batch is formed when the last one has ended, and no row joins it.

Order of live tickets: a free row goes to the key with fewest rows (`maskserve_common.shares`), and
within a key to the ticket that is due first. A ticket without a due time counts as due PATIENCE_S
after its arrival, and a step of priority as AGING_S seconds (`TicketQueue`). Rows join and leave at
any step boundary. Rows that cannot share a step (`batch_key`) alternate. Rows of a key also
alternate if they would delay another key's (`FairSteps`). No other live row ever waits.

Background tickets (priming) are rows of a second class:

- Without live tickets, they fill the whole batch and run at full speed.
- Beside live rows they are *parked* between turns: a parked row keeps its state but has no place in
  the batch, so live tickets are admitted as if it were not there.
- A turn is paid in advance. Each step earns `priming_share` x the computed tokens of its live rows;
  a turn (one row for one step) costs the computed tokens of its row. So priming never adds more
  than `priming_share` to the work of live rows. The unit is tokens, not steps, because a priming
  row computes all its tokens: in one of four steps it could take most of the time. Credit above the
  price of the next turn is not kept.
- A turn needs a place in the batch. In a full batch there is none until a live row ends; then a due
  turn takes the place for one step, before the waiting live tickets. Otherwise priming would starve
  while live tickets wait.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

from maskserve_common.contracts.keys import name_of, scope_of
from maskserve_common.errors import InvalidRequest, Overloaded
from maskserve_common.fair_queue import FairQueue, Turn
from maskserve_common.shares import PATIENCE_S, Full, KeyWork, urgency


@dataclass(frozen=True, slots=True)
class Ticket:
    """An edit in the scheduler. Times are seconds of the caller's clock."""

    request_id: str
    steps: int
    """Model calls from start to end."""
    total_tokens: int
    active_tokens: int
    """Mean computed tokens per step; all tokens for a dense row."""
    arrival: float
    priority: int = 0
    deadline: float | None = None
    background: bool = False
    """Whether it is priming, which gives way to live edits."""
    batch_key: Hashable = None
    """Key of the batch: rows of equal keys may share a step."""
    cost: float = 0.0
    """Predicted cost of one step alone, in FLOPs or seconds, comparable within one source. 0:
    unknown.
    """
    due: float | None = None
    """Time when its last step should have ended. Unlike after `deadline`, a late edit goes on."""
    seconds: tuple[float, ...] = ()
    """Predicted seconds of one step alone on 1, 2, 4 and 8 devices, as far as there are; empty:
    unknown.
    """
    shared: float = 0.0
    """Part of each of `seconds` that does not depend on a step's rows: several rows share it."""
    rows: int = 1
    """Rows without further references whose tokens its row has: it takes as many of `max_rows`."""
    key: str = field(init=False, repr=False, compare=False)
    """Scope of the client (`scope_of`)."""
    work: float = field(init=False, repr=False, compare=False)
    """Seconds that its row adds to a step; its tokens if seconds are unknown."""
    seconds_alone: float = field(init=False, repr=False, compare=False)
    """Seconds of one step alone; its tokens if seconds are unknown."""

    def __post_init__(self) -> None:
        fits = 0 <= self.active_tokens <= self.total_tokens
        if self.steps < 1 or not fits or not self.cost >= 0.0:
            raise ValueError(f"ticket {self.request_id}: no such work: {self}")
        if not all(0.0 < t < math.inf for t in self.seconds):
            raise ValueError(f"ticket {self.request_id}: no such times of a step: {self}")
        if any(math.isnan(t) for t in (self.arrival, self.deadline, self.due) if t is not None):
            raise ValueError(f"ticket {self.request_id}: a time is not a number: {self}")
        work = self.seconds[0] - self.shared if self.seconds else float(self.active_tokens)
        object.__setattr__(self, "key", scope_of(self.request_id))
        object.__setattr__(self, "work", work)
        object.__setattr__(self, "seconds_alone", work + self.shared)

    def repriced(self, ticket: Ticket, fewer: int = 0) -> Ticket:
        """Return this ticket with the tokens, cost and seconds of a step of another, and `fewer`
        steps less.
        """
        return replace(
            self,
            steps=self.steps - fewer,
            active_tokens=ticket.active_tokens,
            cost=ticket.cost,
            seconds=ticket.seconds,
            shared=ticket.shared,
        )


@dataclass(frozen=True, slots=True)
class Run:
    """Rows that share model calls."""

    rows: tuple[Ticket, ...]
    devices: tuple[int, ...] = (0,)
    """Devices of the worker that compute the rows together."""
    steps: int = 1
    """Calls until the next decision; a row that ends earlier leaves earlier."""


@dataclass(frozen=True, slots=True)
class Decision:
    admitted: tuple[Ticket, ...]
    """Tickets that get a row now, in order."""
    runs: tuple[Run, ...]
    """No row is in two runs. Admitted tickets need not be among their rows; parked rows are not."""
    expired: tuple[Ticket, ...]
    """Tickets past their deadline, waiting or running; they are already removed."""
    next_decision: float = math.inf
    """Time of the next decision, beside each new ticket and each end of a step."""

    @property
    def running(self) -> tuple[Ticket, ...]:
        if len(self.runs) == 1:
            return self.runs[0].rows
        return tuple(ticket for run in self.runs for ticket in run.rows)


class Devices(NamedTuple):
    """Devices of a worker on which no step can begin now."""

    busy: frozenset[int] = frozenset()
    """Devices that run a step."""
    lost: frozenset[int] = frozenset()
    """Devices without a process, for now."""


ALL_FREE = Devices()


def id_in_use(request_id: str) -> InvalidRequest:
    """Return the error of an edit whose id another one has that has not ended."""
    return InvalidRequest(
        "SETTINGS.request_id", f"{name_of(request_id)!r} is still being served", "a new id"
    )


class SchedulingPolicy(Protocol):
    """Decides which rows run, on which devices and for how long, in the engine and in the
    simulator.

    It has tickets, not tensors, and reads no clock. One thread owns it. A ticket leaves by exactly
    one of `finish`, `cancel` or `Decision.expired`.
    """

    @property
    def running(self) -> tuple[Ticket, ...]:
        """Tickets with a row, in this step or not."""
        ...

    @property
    def waiting(self) -> tuple[Ticket, ...]:
        """Tickets without a row, in the order in which they will get one."""
        ...

    def __len__(self) -> int:
        """Number of tickets in the scheduler."""
        ...

    def submit(self, ticket: Ticket) -> None:
        """Queue a ticket.

        Raises:
            Overloaded: no more are taken.
            InvalidRequest: the scheduler has a ticket of this id.
        """
        ...

    def cancel(self, request_id: str) -> Ticket | None:
        """Remove a ticket wherever it is; None: the scheduler does not have it."""
        ...

    def finish(self, request_id: str) -> None:
        """Remove a ticket whose row has taken its last step.

        Raises:
            KeyError: no row of that name runs.
        """
        ...

    def reprice(self, ticket: Ticket, fewer: int = 0) -> None:
        """Give the row of this name the ticket's prices (`Ticket.repriced`): the work that is left
        of it differs from what was expected.

        Args:
            ticket: ticket with the prices; its steps do not count.
            fewer: steps that the row takes less than its own ticket says.

        Raises:
            KeyError: no row of that name runs.
        """
        ...

    def schedule(self, now: float, devices: Devices = ALL_FREE) -> Decision:
        """Decide what runs until the next decision; the caller then runs it.

        Args:
            now: seconds of the caller's clock.
            devices: devices that no run may have.
        """
        ...

    def check_integrity(self) -> None:
        """Raises RuntimeError naming the invariant that does not hold."""
        ...


MakePolicy = Callable[[int, int, float], SchedulingPolicy]
"""Makes a policy from the rows of a batch, the tickets that may wait, and the share of work that
priming may add.
"""


AGING_S = 5.0
"""Seconds of waiting that one step of priority is worth."""
_ALONE_LAG_STEPS = 8
"""Steps of work by which a key must lag before it steps alone."""
_LEAD_STEPS = 32
"""Steps of work by which one key may get ahead of another."""
_PAUSE_S = 0.3
"""Seconds without tickets after which a key's burst is over."""
_MOST_BURSTS = 4096
"""Bursts of keys without tickets that are remembered."""


class TicketQueue:
    """Waiting tickets, and the rows of each key, which decide the order of turns.

    A row is free again when its edit ends, so one key alone may have all rows. Tickets may wait for
    any time, so each key has a share of the queue.

    Args:
        most: tickets that may wait.
    """

    def __init__(self, most: int) -> None:
        self._queue: FairQueue[Ticket] = FairQueue(most_waiting=most)
        self.turns: dict[str, Turn[Ticket]] = {}
        """Request id -> turn of a waiting ticket."""

    def __iter__(self) -> Iterator[Ticket]:
        """Yield tickets in the order in which they will get a row."""
        return (turn.item for turn in self._queue.order())

    def check_room(self, ticket: Ticket) -> None:
        """Check that a ticket may wait.

        Raises:
            Overloaded: no more tickets may wait, in all or of its key.
        """
        key = ticket.key
        try:
            self._queue.waiting.check(key)
        except Full as full:
            key_text = f"{self._queue.waiting.in_use(key)} edits of this key"
            count_text = key_text if full.of_key else f"{len(self.turns)} edits"
            raise Overloaded(f"{count_text} are waiting already; try again later") from None

    def add(self, ticket: Ticket) -> None:
        due_at = ticket.deadline if ticket.due is None else ticket.due
        urgent = urgency(ticket.arrival, ticket.priority, AGING_S, due_at, PATIENCE_S)
        turn = self._queue.put(ticket.key, ticket, urgent)
        self.turns[ticket.request_id] = turn

    def discard(self, request_id: str) -> Ticket | None:
        """Remove a waiting ticket; None: it does not wait."""
        turn = self.turns.pop(request_id, None)
        if turn is None:
            return None
        self._queue.cancel(turn)
        return turn.item

    def admit(self, room: int, *, alone: bool = False) -> list[Ticket]:
        """Remove the tickets that get a row now, in order: up to the first for which there is no
        room.

        Args:
            room: free rows.
            alone: whether the first fits without other rows, however large it is.
        """
        admitted: list[Ticket] = []
        for turn in self._queue.offers() if room > 0 else ():
            if turn.item.rows > room and (admitted or not alone):
                break
            self._queue.take(turn)
            admitted.append(self.turns.pop(turn.item.request_id).item)
            room -= turn.item.rows
            if room <= 0:
                break
        return admitted

    def free(self, ticket: Ticket) -> None:
        self._queue.give_back(ticket.key)

    def check_integrity(self) -> bool:
        """Whether all structures agree."""
        turns = {turn.item.request_id: turn for turn in self._queue.order()}
        return turns == self.turns and self._queue.check_integrity()


@dataclass(slots=True)
class _Burst:
    """Work of a key since its last pause."""

    received: float = 0.0
    left: dict[str, float] = field(default_factory=dict)
    """Request id -> work left of a ticket, also of one that waits."""
    ended: float = -math.inf
    """Time when its last ticket left."""

    @property
    def size(self) -> float:
        """Its work, received and left."""
        return self.received + sum(self.left.values())


class FairSteps:
    """Gives each of n keys at least an nth of the speed that it would have alone, however many rows
    the others have. A key with little work does not wait for keys with much.

    A key may have any number of rows, and each makes the step longer for all. So if several keys
    have rows, no key adds more work to a step than the key with least work. The fixed cost of a
    step is shared: on a device on which more rows cost little, all of them fit. Rows of a key that
    do not fit alternate. If rows of several keys cannot share a step, their batches alternate.

    The next turn goes to the key with the smallest *burst*: the work that it has received since its
    last pause, and that it has left; up to `_LEAD_STEPS` steps of it count. But no key gets ahead
    of another by more than `_LEAD_STEPS` steps in all: then the turn goes to the one that is
    behind. When a key gets its first ticket, every key's arrears above twice that are forgotten. A
    key that received little work recently has its step's time to itself; others join if that costs
    nothing.
    """

    def __init__(self) -> None:
        self._received, self._recent = KeyWork(), KeyWork()
        self._bursts: dict[str, _Burst] = {}
        self._stepped: dict[str, int] = {}
        """Request id -> number of its last step."""
        self._step = 0
        self._ahead = 0.0
        """Seconds of _LEAD_STEPS steps of the largest row."""
        self._step_ends = -math.inf
        """Time when the last step ends, as far as its seconds are known."""

    def join(self, ticket: Ticket) -> None:
        key = ticket.key
        burst = self._bursts.setdefault(key, _Burst())
        if not burst.left:
            with_tickets = [name for name, other in self._bursts.items() if other.left]
            self._received.catch_up([key, *with_tickets], 2 * self._ahead)
            if ticket.arrival - burst.ended > _PAUSE_S:
                burst.received = 0.0
        burst.left[ticket.request_id] = ticket.steps * ticket.seconds_alone

    def leave(self, ticket: Ticket) -> None:
        burst = self._bursts[ticket.key]
        del burst.left[ticket.request_id]
        self._stepped.pop(ticket.request_id, None)
        if not burst.left:
            burst.ended = self._step_ends
            if len(self._bursts) > _MOST_BURSTS:
                self._bursts = {key: other for key, other in self._bursts.items() if other.left}

    def reprice(self, before: Ticket, after: Ticket) -> None:
        if before.seconds_alone:
            change = after.seconds_alone / before.seconds_alone * after.steps / before.steps
            self._bursts[after.key].left[after.request_id] *= change

    def next(self, live: Sequence[Ticket], now: float) -> str | None:
        """Return the key whose turn is next; None: all rows belong to one key.

        Args:
            live: all rows.
            now: seconds of the caller's clock.
        """
        self._step_ends = now
        self._ahead = _LEAD_STEPS * max((t.seconds_alone for t in live), default=0.0) or self._ahead
        keys = dict.fromkeys(ticket.key for ticket in live)
        if len(keys) < 2:
            return None
        received = {key: self._received.used(key) for key in keys}
        limit = min(received.values()) + self._ahead
        bursts = {key: min(self._bursts[key].size, self._ahead) for key in keys}
        return min(keys, key=lambda key: (received[key] > limit, bursts[key], received[key]))

    def rows(
        self, batch: Sequence[Ticket], live: Sequence[Ticket], first: str | None
    ) -> tuple[Ticket, ...]:
        """Return the rows of a batch that step now.

        Args:
            batch: rows that may share a step, at least one of the key `first`.
            live: all rows.
            first: see `next`.
        """
        shared = max(ticket.shared for ticket in live)
        rows = batch if first is None else self._allowed(batch, live, first)
        self._step += 1
        work_by_key = _work_by_key(rows)
        if all(ticket.seconds for ticket in rows):
            self._step_ends += shared + sum(work_by_key.values())
        for ticket in rows:
            left = self._bursts[ticket.key].left
            left[ticket.request_id] = max(0.0, left[ticket.request_id] - ticket.seconds_alone)
            self._stepped[ticket.request_id] = self._step
        for key, work in work_by_key.items():
            seconds = work + shared / len(work_by_key)
            self._received.add(key, seconds, steps=0)
            self._recent.add(key, seconds)
            self._bursts[key].received += seconds
        ids = {ticket.request_id for ticket in rows}
        return tuple(ticket for ticket in batch if ticket.request_id in ids)

    def check_integrity(self, tickets: Iterable[Ticket]) -> bool:
        """Whether the work left is that of these tickets."""
        names = {(ticket.key, ticket.request_id) for ticket in tickets}
        return names == {(key, name) for key, burst in self._bursts.items() for name in burst.left}

    def _allowed(self, batch: Sequence[Ticket], live: Sequence[Ticket], first: str) -> list[Ticket]:
        """Return the rows that fit into what each key may add to a step, those first that stepped
        longest ago.
        """
        live_work, shared = _work_by_key(live), max(ticket.shared for ticket in live)
        lag = self._recent.lag(first, live_work)
        steps_alone = lag > _ALONE_LAG_STEPS * (live_work[first] + shared)
        free_work = shared * (1 - 1 / len(live_work))
        most_work = min(live_work.values()) + free_work
        granted_work: dict[str, float] = {}
        allowed = []
        for ticket in sorted(batch, key=lambda ticket: self._stepped.get(ticket.request_id, 0)):
            key, may_join = ticket.key, ticket.key == first or not steps_alone
            work = granted_work.get(key, 0.0) + ticket.work
            if (may_join and key not in granted_work) or work <= (
                most_work if may_join else free_work
            ):
                granted_work[key] = work
                allowed.append(ticket)
        return allowed


def _work_by_key(tickets: Sequence[Ticket]) -> dict[str, float]:
    work_by_key: dict[str, float] = {}
    for ticket in tickets:
        work_by_key[ticket.key] = work_by_key.get(ticket.key, 0.0) + ticket.work
    return work_by_key


class StepScheduler:
    """Bounded queues in front of a batch of at most `max_rows` rows on one device, decided at each
    step (`SchedulingPolicy`).

    Live and background tickets have separate queues, each of at most `max_waiting`, so that priming
    never causes the refusal of a live edit. A ticket (waiting, running or parked) leaves by exactly
    one of `finish`, `cancel` or `Decision.expired`.
    """

    def __init__(
        self,
        max_rows: int,
        max_waiting: int,
        priming_share: float = 0.25,
        *,
        static: bool = False,
    ) -> None:
        """Make an empty scheduler.

        Args:
            max_rows: rows of the batch.
            max_waiting: tickets that may wait, per class.
            priming_share: work that priming may add beside live rows, as a share of theirs, 0 to 1;
                at 0 it runs only without live tickets.
            static: whether live tickets get rows only when no live row is left, as in servers
                without continuous batching (FlashPS §6.4).
        """
        if max_rows < 1 or max_waiting < 1 or not 0.0 <= priming_share <= 1.0:
            raise ValueError(f"no such capacity: {max_rows=} {max_waiting=} {priming_share=}")
        self.max_rows = max_rows
        self.max_waiting = max_waiting
        self.priming_share = priming_share
        self._static = static
        self._number = 0
        # Request id -> the ticket and its number, in order of submission.
        self._tickets: dict[str, tuple[int, Ticket]] = {}
        self._live_waiting = TicketQueue(max_waiting)
        self._background_waiting = TicketQueue(max_waiting)
        self._ids: dict[int, str] = {}  # a ticket's number -> request id
        # Insertion order is admission order.
        self._live: dict[str, Ticket] = {}
        self._background: dict[str, Ticket] = {}
        self._deadlines: list[tuple[float, int]] = []  # heap of (deadline, number); may hold stale
        self._credit = 0.0  # computed tokens that priming may add beside live rows
        self._step = 0
        self._last_batch: dict[Hashable, int] = {}  # batch key -> its last step
        self._fair_steps = FairSteps()

    @property
    def running(self) -> tuple[Ticket, ...]:
        """Tickets with a row, parked ones included, in order of admission within a class."""
        return (*self._live.values(), *self._background.values())

    @property
    def waiting(self) -> tuple[Ticket, ...]:
        """Tickets without a row, in the order in which they will get one, live ones first."""
        return (*self._live_waiting, *self._background_waiting)

    def __len__(self) -> int:
        """Return the number of tickets: waiting, running and parked."""
        return len(self._tickets)

    def submit(self, ticket: Ticket) -> None:
        """Queue `ticket`; it runs from a later `schedule` on.

        Raises:
            Overloaded: the ticket's queue is full, or its key's share of it.
            InvalidRequest: the scheduler has a ticket of this id.
        """
        if ticket.request_id in self._tickets:
            raise id_in_use(ticket.request_id)
        self._queue_of(ticket).check_room(ticket)
        self.take(ticket)

    def take(self, ticket: Ticket) -> None:
        """Queue a ticket that was accepted before, however many wait."""
        self._number += 1
        self._queue_of(ticket).add(ticket)
        self._tickets[ticket.request_id] = (self._number, ticket)
        self._ids[self._number] = ticket.request_id
        if not ticket.background:
            self._fair_steps.join(ticket)
        if ticket.deadline is not None and ticket.deadline < math.inf:
            heapq.heappush(self._deadlines, (ticket.deadline, self._number))

    def _queue_of(self, ticket: Ticket) -> TicketQueue:
        return self._background_waiting if ticket.background else self._live_waiting

    def cancel(self, request_id: str) -> Ticket | None:
        """Remove a ticket wherever it is; None: it is not in the scheduler, or has just ended."""
        if request_id not in self._tickets:
            return None
        return self._remove(request_id)

    def finish(self, request_id: str) -> None:
        """Remove a ticket whose row has taken its last step.

        Raises:
            KeyError: no row of that name runs; the caller's state is wrong.
        """
        if request_id not in self._live and request_id not in self._background:
            raise KeyError(request_id)
        self._remove(request_id)

    def reprice(self, ticket: Ticket, fewer: int = 0) -> None:
        rows = self._background if ticket.background else self._live
        repriced = rows[ticket.request_id].repriced(ticket, fewer)
        number, _ = self._tickets[ticket.request_id]
        if not ticket.background:
            self._fair_steps.reprice(rows[ticket.request_id], repriced)
        rows[ticket.request_id], self._tickets[ticket.request_id] = repriced, (number, repriced)

    def schedule(self, now: float, devices: Devices = ALL_FREE) -> Decision:
        """Decide the next step: expire, admit, and choose the rows. The caller then runs them."""
        expired = self._expire(now)
        places = self._background_places()
        is_closed = self._static and bool(self._live)
        used_rows = sum(ticket.rows for ticket in self._live.values())
        room = 0 if is_closed else self.max_rows - places - used_rows
        admitted = self._admit(self._live_waiting, self._live, room)
        admitted += self._admit(
            self._background_waiting, self._background, places - len(self._background)
        )
        live, background = self._choose_batch(
            tuple(self._live.values()), tuple(self._background.values())[:places], now
        )
        self._update_credit(live, background)
        rows = (*live, *background)
        return Decision(admitted, (Run(rows),) if rows else (), expired)

    def _choose_batch(
        self, live: tuple[Ticket, ...], background: tuple[Ticket, ...], now: float
    ) -> tuple[tuple[Ticket, ...], tuple[Ticket, ...]]:
        """Choose rows that may share a step: of several batches the one that ran longest ago; if
        clients' keys compete, the batch of the next key, with no more rows than the keys' shares
        allow.
        """
        first = self._fair_steps.next(live, now)
        keys = dict.fromkeys(ticket.batch_key for ticket in (*live, *background))
        self._step += 1
        self._last_batch = {key: self._last_batch.get(key, 0) for key in keys}
        if first is not None:
            batch_keys = (ticket.batch_key for ticket in live if ticket.key == first)
            keys = dict.fromkeys(batch_keys)
        if not keys:
            return (), ()
        batch_key = min(keys, key=self._last_batch.__getitem__)
        self._last_batch[batch_key] = self._step
        batch = tuple(ticket for ticket in live if ticket.batch_key == batch_key)
        return (
            self._fair_steps.rows(batch, live, first) if batch else (),
            tuple(ticket for ticket in background if ticket.batch_key == batch_key),
        )

    def _expire(self, now: float) -> tuple[Ticket, ...]:
        expired = []
        while self._deadlines and self._deadlines[0][0] <= now:
            _, number = heapq.heappop(self._deadlines)
            if number in self._ids:
                expired.append(self._remove(self._ids[number]))
        # Tickets that end before their deadline leave stale entries; a day's worth is too many.
        if len(self._deadlines) > 2 * len(self._tickets) + 64:
            self._deadlines = [entry for entry in self._deadlines if entry[1] in self._ids]
            heapq.heapify(self._deadlines)
        return tuple(expired)

    def _background_places(self) -> int:
        """Return the rows that background tickets may have in this step."""
        background_count = len(self._background) + len(self._background_waiting.turns)
        if not self._live and not self._live_waiting.turns:
            return min(background_count, self.max_rows)
        if not background_count or self.priming_share == 0.0 or self._credit < self._turn_price():
            return 0
        # One dense row at a time: a live row then waits for the rest of a single step.
        return min(1, self.max_rows - len(self._live))

    def _turn_price(self) -> int:
        """Return the computed tokens of the background row whose turn is next; 0: there is none."""
        if self._background:
            return next(iter(self._background.values())).active_tokens
        return next((ticket.active_tokens for ticket in self._background_waiting), 0)

    def _admit(self, queue: TicketQueue, rows: dict[str, Ticket], count: int) -> tuple[Ticket, ...]:
        if count <= 0 or not queue.turns:
            return ()
        admitted = tuple(queue.admit(count, alone=not rows))
        rows.update((ticket.request_id, ticket) for ticket in admitted)
        return admitted

    def _update_credit(self, live: tuple[Ticket, ...], background: tuple[Ticket, ...]) -> None:
        if not live:
            # Priming had the step to itself, or its turn was paid for by earlier steps.
            self._credit = 0.0
            return
        earned = self.priming_share * sum(ticket.active_tokens for ticket in live)
        spent = sum(ticket.active_tokens for ticket in background)
        price = self._turn_price() if self._background or self._background_waiting.turns else 0
        self._credit = min(self._credit - spent, price) + earned

    def _remove(self, request_id: str) -> Ticket:
        number, ticket = self._tickets.pop(request_id)
        del self._ids[number]
        rows = self._background if ticket.background else self._live
        queue = self._queue_of(ticket)
        if not ticket.background:
            self._fair_steps.leave(ticket)
        if rows.pop(request_id, None) is None:
            queue.discard(request_id)
        else:
            queue.free(ticket)
        return ticket

    def check_integrity(self) -> None:
        """Compare every structure with every other; for tests and idle moments.

        Raises:
            RuntimeError: naming the invariant that does not hold.
        """
        waiting = [t.request_id for t in (*self._live_waiting, *self._background_waiting)]
        deadlines = {number for _, number in self._deadlines}
        checks = {
            "a ticket is in one place": sorted([*waiting, *self._live, *self._background])
            == sorted(self._tickets),
            "numbers name the tickets": {
                number: request_id for request_id, (number, _) in self._tickets.items()
            }
            == self._ids,
            "queues are in order": self._live_waiting.check_integrity()
            and self._background_waiting.check_integrity(),
            "classes are apart": all(self._tickets[r][1].background for r in self._background)
            and not any(self._tickets[r][1].background for r in self._live),
            "rows fit": len(self._live) <= self.max_rows and len(self._background) <= self.max_rows,
            "queues are bounded": len(self._live_waiting.turns) <= self.max_waiting
            and len(self._background_waiting.turns) <= self.max_waiting,
            "each deadline is watched": all(
                number in deadlines
                for number, ticket in self._tickets.values()
                if ticket.deadline is not None and ticket.deadline < math.inf
            ),
            "no debts": self._credit >= 0.0,
            "work left is that of live tickets": self._fair_steps.check_integrity(
                ticket for _, ticket in self._tickets.values() if not ticket.background
            ),
        }
        broken = [name for name, holds in checks.items() if not holds]
        if broken:
            raise RuntimeError(f"scheduler: broken: {'; '.join(broken)}")
