"""How rows of several keys share the steps of one device."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

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

    def __init__(self, tickets: list[Ticket]) -> None:
        self.scheduler, self.now = StepScheduler(8, 64), 0.0
        self.left = {t.request_id: t.steps for t in tickets}
        for new_ticket in tickets:
            self.scheduler.submit(new_ticket)

    def step(self) -> tuple[Ticket, ...]:
        rows = self.scheduler.schedule(self.now).running
        self.now += step_seconds(rows)
        for row in rows:
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
    clock = Clock([*greedy, ticket("modest!one", 10)])
    assert clock.end_of("modest!one") <= 2 * 10 * SLOW
    steps = {200 - clock.left[t.request_id] for t in greedy}
    assert steps == {1, 2}, "the greedy key's rows take turns, too"


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
        clock.left[name] = 10
        clock.scheduler.submit(ticket(name, 10))
        assert clock.end_of(name) - began <= (10 + 1) * SLOW
        for _ in range(60):
            clock.step()


def test_a_key_that_comes_later_has_at_most_half_in_the_end():
    """It goes first for a while, and that while is bounded by what is remembered."""
    first, second = ticket("first!one", 600), ticket("second!one", 600)
    clock = Clock([replace(first, batch_key=1)])
    for _ in range(200):
        clock.step()
    clock.left["second!one"] = second.steps
    clock.scheduler.submit(replace(second, batch_key=2))
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
