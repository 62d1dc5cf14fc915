"""How rows of several keys share the steps of one device."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from maskserve_engine.scheduling import step_scheduler
from maskserve_engine.scheduling.step_scheduler import StepScheduler, Ticket
from tests.support.examples import examples

SLOW, QUICK = 1.0, 0.02
"""Seconds that a row adds to a step of a device with and without much to spare."""


def ticket(name: str, steps: int, row_s: float = SLOW, shared: float = 0.0) -> Ticket:
    return Ticket(name, steps, 64, 8, 0.0, seconds=(row_s + shared,), shared=shared)


def step_seconds(rows: tuple[Ticket, ...]) -> float:
    """Seconds of a step."""
    return max(t.shared for t in rows) + sum(t.seconds[0] - t.shared for t in rows)


class Clock:
    """Runs a scheduler's steps and counts their seconds."""

    def __init__(self, tickets: list[Ticket], rows: int = 8) -> None:
        self.scheduler, self.now = StepScheduler(rows, 64), 0.0
        self.left: dict[str, int] = {}
        self.seconds = Counter[str]()
        """Seconds of row work by key."""
        for new_ticket in tickets:
            self.submit(new_ticket)

    def submit(self, new_ticket: Ticket) -> None:
        self.left[new_ticket.request_id] = new_ticket.steps
        self.scheduler.submit(replace(new_ticket, arrival=self.now))

    def step(self) -> tuple[Ticket, ...]:
        rows = self.scheduler.schedule(self.now).running
        self.now += step_seconds(rows)
        for row in rows:
            self.seconds[row.key] += row.work
            self.left[row.request_id] -= 1
            if not self.left[row.request_id]:
                self.scheduler.finish(row.request_id)
        return rows

    def end_of(self, name: str) -> float:
        while self.left[name]:
            self.step()
        return self.now


def test_seven_rows_of_one_key_slow_another_keys_row_by_half():
    """Each step took as long as all eight rows: the modest key's edit took eight times as long."""
    greedy = [ticket(f"greedy!{n}", 200) for n in range(7)]
    clock = Clock([*greedy, ticket("modest!one", 400)])
    assert clock.end_of("modest!one") <= 2 * 400 * SLOW
    steps = {200 - clock.left[t.request_id] for t in greedy}
    assert max(steps) - min(steps) == 1, "the greedy key's rows take turns, too"


def test_rows_that_cannot_share_a_step_take_no_more():
    """A reproducible edit has steps of its own; the batch of the others took four times that."""
    greedy = [replace(ticket(f"greedy!{n}", 200), batch_key="all") for n in range(4)]
    tickets = [replace(ticket(f"greedy!own {n}", 200), batch_key=f"own {n}") for n in range(3)]
    modest = replace(ticket("modest!one", 10), batch_key="its own")
    clock = Clock([*greedy, *tickets, modest])
    assert clock.end_of("modest!one") <= (2 * 10 + 1) * SLOW
    while len(clock.scheduler):
        clock.step()


def test_where_more_rows_cost_little_all_of_them_step():
    """A batch is what makes a large device fast: keys are apart only where it helps them."""
    rows = [ticket(f"greedy!{n}", 50, QUICK, SLOW) for n in range(7)]
    clock = Clock([*rows, ticket("modest!one", 10, QUICK, SLOW)])
    assert len(clock.step()) == 8


def test_rows_of_one_key_all_step():
    clock = Clock([ticket(f"one!{n}", 5) for n in range(8)])
    assert len(clock.step()) == 8


def test_a_key_that_edits_now_and_then_goes_first():
    """Beside one that always has seven rows its edit took twice the time that it takes alone."""
    greedy = [ticket(f"greedy!{n}", 500) for n in range(7)]
    clock = Clock(greedy)
    for _ in range(60):
        clock.step()
    for visit in range(3):
        began, name = clock.now, f"modest!{visit}"
        clock.submit(ticket(name, 10))
        assert clock.end_of(name) - began <= (10 + 1) * SLOW
        for _ in range(60):
            clock.step()


def test_a_key_that_comes_later_has_at_most_half_in_the_end():
    """It goes first for a while, and that while is bounded by what is remembered."""
    first, second = ticket("first!one", 600), ticket("second!one", 600)
    clock = Clock([replace(first, batch_key=1)])
    for _ in range(200):
        clock.step()
    clock.submit(replace(second, batch_key=2))
    for _ in range(200):
        clock.step()
    taken_by_second = 600 - clock.left["second!one"]
    assert 110 <= taken_by_second <= 150
    for _ in range(100):
        clock.step()
    assert abs(600 - clock.left["second!one"] - taken_by_second - 50) <= 2, "every other step"


def test_keys_that_always_have_rows_get_equal_parts():
    clock = Clock([ticket("a!1", 10_000), *(ticket(f"b!{n}", 10_000) for n in range(3))])
    for _ in range(1000):
        clock.step()
    count = 10_000 - clock.left["a!1"]
    total = sum(10_000 - clock.left[f"b!{n}"] for n in range(3))
    assert abs(count - total) <= 20


AHEAD = 32
"""Steps of work by which a key may be ahead."""


def slowest_beside_bursts(arrivals: list[tuple[int, float]]) -> float:
    """Return the most seconds of a reproducible edit of four steps while four keys send ten edits
    of two steps each, two at a time, again and again. Between these bursts its key, and four
    guests, send edits one at a time, so that its key has received more than theirs.

    Args:
        arrivals: for each of the edits, the number of a burst, and the seconds after its start.
    """
    due = [(300.0 * burst + after, f"modest!{burst}", 4) for burst, after in arrivals]
    for began in (0.0, 300.0, 600.0, 900.0):
        due += [(began, f"burst {n % 4}!{began} 0 {n}", 2) for n in range(8)]
        due += [(began + 100.0 + 40.0 * n, f"modest!{began} {n}", 6) for n in range(4)]
        due += [(began + 120.0 + 40.0 * n, f"guest {n}!{began}", 16) for n in range(4)]
    due.sort(reverse=True)
    clock, arrival_s, slowest = Clock([]), dict[str, float](), 0.0
    while due or len(clock.scheduler):
        if not len(clock.scheduler):
            clock.now = max(clock.now, due[-1][0])
        while due and due[-1][0] <= clock.now:
            arrived_at, name, steps = due.pop()
            own_key = name if name.startswith("modest") else None
            clock.submit(replace(ticket(name, steps), batch_key=own_key))
            arrival_s[name] = arrived_at
        for row in clock.step():
            if clock.left[row.request_id]:
                continue
            if row.key == "modest":
                slowest = max(slowest, clock.now - arrival_s[row.request_id])
            elif row.key.startswith("burst"):
                began_text, number, place = row.request_id.rpartition("!")[2].split()
                if int(number) < 4:
                    clock.submit(ticket(f"{row.key}!{began_text} {int(number) + 1} {place}", 2))
    return slowest


@examples(60)
@given(
    st.lists(
        st.tuples(st.integers(1, 3), st.floats(0.0, 60.0)),
        min_size=1,
        unique_by=lambda arrival: arrival[0],
    )
)
def test_a_small_edit_does_not_wait_for_the_bursts_of_four_keys(
    arrivals: list[tuple[int, float]],
):
    """It waits until two steps of eight rows free a row; then it had each fifth step, or none."""
    assert slowest_beside_bursts(arrivals) <= (2 * 8 + 4) * SLOW + 1e-6


def test_turns_by_received_work_alone_let_it_wait(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(step_scheduler, "_LEAD_STEPS", 0.01)
    assert slowest_beside_bursts([(1, 1.0)]) > 30 * SLOW


def test_pauses_between_small_edits_win_no_more_than_an_equal_part():
    """Each edit is a small burst, and the other key's rows waited for all of them."""
    clock = Clock([ticket("busy!one", 10_000)])
    for number in range(100):
        clock.submit(ticket(f"pausing!{number}", 8))
        clock.end_of(f"pausing!{number}")
        for _ in range(2):
            clock.step()
    assert clock.seconds["busy"] >= clock.seconds["pausing"] - AHEAD * SLOW


@examples(60)
@given(
    st.lists(st.integers(1, 30), min_size=1, max_size=5),
    st.lists(st.integers(1, 30), min_size=1, max_size=5),
    st.booleans(),
    st.sampled_from([0.0, 0.5]),
)
def test_keys_that_always_have_work_receive_as_much(
    first: list[int], second: list[int], own_steps: bool, shared: float
):
    """Each key has as many rows as `first` or `second` has numbers, and replaces an edit of so many
    steps as soon as it ends.
    """
    steps_of = {
        f"{key}!{n}": steps
        for key, all_steps in zip("ab", (first, second), strict=True)
        for n, steps in enumerate(all_steps)
    }

    def new(name: str) -> Ticket:
        new_ticket = ticket(name, steps_of[name], shared=shared)
        return replace(new_ticket, batch_key=name) if own_steps else new_ticket

    clock = Clock([new(name) for name in steps_of], rows=10)
    longest = 0.0
    for _ in range(1500):
        began = clock.now
        for row in clock.step():
            if not clock.left[row.request_id]:
                clock.submit(new(row.request_id))
        longest = max(longest, clock.now - began)
        ahead = abs(clock.seconds["a"] - clock.seconds["b"])
        assert ahead <= AHEAD * (SLOW + shared) + longest


@examples(60)
@given(
    st.lists(
        st.tuples(
            st.sampled_from("abc"),
            st.integers(1, 6),
            st.floats(0.1, 5.0),
            st.sampled_from([None, 1, 2]),
        ),
        min_size=1,
        max_size=12,
    ),
    st.sampled_from([0.0, 0.5, 20.0]),
)
def test_no_step_of_a_batch_takes_longer_than_keys_times_the_least_one(
    edits: list[tuple[str, int, float, int | None]], shared: float
):
    """By brute force over all keys; and every edit ends with all its steps taken."""
    tickets = [
        replace(ticket(f"{key}!{n}", steps, row_s, shared), batch_key=batch)
        for n, (key, steps, row_s, batch) in enumerate(edits)
    ]
    clock = Clock(tickets)
    while len(clock.scheduler):
        rows = clock.step()
        live = [*clock.scheduler.running, *(t for t in rows if not clock.left[t.request_id])]
        of = {key: [t for t in live if t.request_id[0] == key] for key in "abc"}
        present = [tuple(key_rows) for key_rows in of.values() if key_rows]
        stepping = {t.request_id[0] for t in rows}
        least = min(map(step_seconds, present))
        # One row of a key always fits, or a key of large rows would never step.
        larger = sum(max(least, *(t.seconds[0] for t in of[key])) for key in stepping)
        bound = max(len(present) * least, larger)
        assert len(present) == 1 or step_seconds(rows) <= bound * 1.0001
    assert not any(clock.left.values())
