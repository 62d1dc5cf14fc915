"""The step scheduler: order, capacity, deadlines, and priming beside live rows."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    rule,
)

from maskserve_common.errors import InvalidRequest, Overloaded
from maskserve_engine.scheduling.step_scheduler import StepScheduler, Ticket
from tests.support.cost import lines_run
from tests.support.examples import examples

FULL = 64  # tokens of an image here


def ticket(
    name: str,
    *,
    steps: int = 4,
    active: int = 8,
    arrival: float = 0.0,
    priority: int = 0,
    deadline: float | None = None,
    background: bool = False,
) -> Ticket:
    active = FULL if background else active
    return Ticket(name, steps, FULL, active, arrival, priority, deadline, background)


def names(tickets: tuple[Ticket, ...]) -> list[str]:
    return [t.request_id for t in tickets]


def urgency(t: Ticket) -> float:
    """The order as the design states it, written apart from the scheduler's own: two minutes of
    waiting are as urgent as being due, and five seconds of either weigh a step of priority.
    """
    inf = math.inf if t.deadline is None else t.deadline
    return min(inf, t.arrival + 120.0) - 5.0 * t.priority


class Loop:
    """A step loop as the engine has it: runs what is decided, finishes rows at their last step."""

    def __init__(self, scheduler: StepScheduler) -> None:
        self.scheduler = scheduler
        self.left: dict[str, int] = {}
        self.step = 0

    def run(self) -> tuple[Ticket, ...]:
        decision = self.scheduler.schedule(float(self.step))
        self.step += 1
        self.left |= {t.request_id: t.steps for t in decision.admitted}
        for t in decision.running:
            self.left[t.request_id] -= 1
            if self.left[t.request_id] == 0:
                self.scheduler.finish(t.request_id)
        return decision.running


def test_first_come_first_served_by_arrival_not_by_submission():
    scheduler = StepScheduler(2, 8)
    for name, arrival in (("late", 3.0), ("first", 1.0), ("second", 2.0)):
        scheduler.submit(ticket(name, arrival=arrival))
    assert names(scheduler.schedule(4.0).admitted) == ["first", "second"]
    assert names(scheduler.waiting) == ["late"]


def test_equal_urgency_keeps_the_order_of_submission():
    scheduler = StepScheduler(1, 8)
    for name in "dacb":
        scheduler.submit(ticket(name))
    assert names(scheduler.waiting) == list("dacb")


def test_priority_and_due_times_overtake_and_waiting_catches_up():
    scheduler = StepScheduler(8, 8)
    scheduler.submit(ticket("plain", arrival=0.0))
    scheduler.submit(ticket("later", arrival=1.0, deadline=90.0))
    scheduler.submit(ticket("sooner", arrival=2.0, deadline=80.0))
    scheduler.submit(ticket("low", arrival=0.0, priority=-3, deadline=80.0))
    scheduler.submit(ticket("high", arrival=3.0, priority=10))
    scheduler.submit(ticket("far", arrival=3.0, deadline=9e9))
    expected = ["high", "sooner", "later", "low", "plain", "far"]
    assert names(scheduler.schedule(4.0).admitted) == expected


def test_forty_urgent_edits_of_one_key_do_not_hold_up_another_keys_one():
    """All of priority 100: another key's short edit was not answered for as long as they came."""
    scheduler = StepScheduler(8, 64)
    loop = Loop(scheduler)
    for n in range(32):
        scheduler.submit(ticket(f"greedy!{n}", steps=50, priority=100))
    loop.run()
    scheduler.submit(ticket("modest!one", arrival=1.0))
    while "modest!one" not in names(loop.run()):
        assert loop.step <= 51, "it waits for more than the first row that is free"
        if len(scheduler) < 38:  # and they go on coming
            name = f"greedy!{100 + loop.step}"
            scheduler.submit(ticket(name, steps=50, arrival=loop.step, priority=100))


def test_a_key_may_not_fill_the_queue_that_all_wait_in():
    scheduler = StepScheduler(1, 8)
    for n in range(4):
        scheduler.submit(ticket(f"greedy!{n}"))
    with pytest.raises(Overloaded, match="4 edits of this key"):
        scheduler.submit(ticket("greedy!4"))
    scheduler.submit(ticket("modest!one"))
    assert names(scheduler.waiting)[:2] == ["greedy!0", "modest!one"]
    scheduler.check_integrity()


def test_priority_of_one_key_starves_none_of_its_own():
    """A stream of urgent edits overtook the plain one for ever."""
    scheduler, now = StepScheduler(1, 8), 0.0
    scheduler.submit(ticket("plain"))
    for n in range(200):
        scheduler.submit(ticket(f"urgent {n}", arrival=now, priority=1))
        (row,) = scheduler.schedule(now).running
        scheduler.finish(row.request_id)
        now += 1.0
        if row.request_id == "plain":
            break
    assert now <= 8.0


def test_rows_join_and_leave_at_any_step_and_are_not_preempted():
    scheduler = StepScheduler(2, 8)
    scheduler.submit(ticket("a"))
    scheduler.submit(ticket("b"))
    assert names(scheduler.schedule(0.0).running) == ["a", "b"]
    scheduler.submit(ticket("urgent", priority=100))
    assert names(scheduler.schedule(1.0).running) == ["a", "b"]
    scheduler.finish("a")
    decision = scheduler.schedule(2.0)
    assert names(decision.running) == ["b", "urgent"]
    assert names(decision.admitted) == ["urgent"]


def test_a_large_row_takes_several_places_and_none_overtakes_it():
    scheduler = StepScheduler(4, 8)
    sizes = {"a": 1, "large": 3, "b": 2, "larger": 9, "c": 1}
    for arrival, (name, rows) in enumerate(sizes.items()):
        scheduler.submit(replace(ticket(name, arrival=float(arrival)), rows=rows))
    assert names(scheduler.schedule(0.0).running) == ["a", "large"]
    scheduler.finish("a")
    assert names(scheduler.schedule(1.0).running) == ["large"]
    scheduler.finish("large")
    assert names(scheduler.schedule(2.0).running) == ["b"]
    scheduler.finish("b")
    assert names(scheduler.schedule(3.0).running) == ["larger"]  # it fits alone
    scheduler.finish("larger")
    assert names(scheduler.schedule(4.0).running) == ["c"]
    scheduler.check_integrity()


def test_a_deadline_that_passes_removes_waiting_and_running_tickets_once():
    scheduler = StepScheduler(1, 8)
    scheduler.submit(ticket("runs", deadline=5.0))
    scheduler.submit(ticket("waits", deadline=6.0))
    scheduler.submit(ticket("patient"))
    assert names(scheduler.schedule(0.0).running) == ["runs"]
    decision = scheduler.schedule(6.0)
    assert names(decision.expired) == ["runs", "waits"]
    assert names(decision.running) == ["patient"]
    assert scheduler.schedule(7.0).expired == ()


def test_a_deadline_of_an_ended_ticket_does_not_touch_a_later_one_of_the_same_id():
    scheduler = StepScheduler(1, 8)
    scheduler.submit(ticket("a", deadline=5.0))
    scheduler.schedule(0.0)
    scheduler.finish("a")
    scheduler.submit(ticket("a", deadline=50.0))
    decision = scheduler.schedule(6.0)
    assert decision.expired == ()
    assert names(decision.running) == ["a"]


def test_a_full_queue_refuses_and_a_held_id_is_invalid():
    scheduler = StepScheduler(1, 2)
    scheduler.submit(ticket("a"))
    scheduler.submit(ticket("b"))
    with pytest.raises(Overloaded, match="2 edits are waiting"):
        scheduler.submit(ticket("c"))
    with pytest.raises(InvalidRequest, match="request_id"):
        scheduler.submit(ticket("a"))
    scheduler.submit(ticket("prime", background=True))  # a queue of its own
    scheduler.schedule(0.0)
    assert names(scheduler.waiting) == ["b", "prime"]


def test_cancel_and_finish_of_what_is_not_there():
    scheduler = StepScheduler(1, 2)
    assert scheduler.cancel("nobody") is None
    scheduler.submit(ticket("waits"))
    with pytest.raises(KeyError):
        scheduler.finish("waits")
    assert scheduler.cancel("waits") == ticket("waits")
    assert len(scheduler) == 0
    with pytest.raises(KeyError):
        scheduler.finish("waits")


@pytest.mark.parametrize(
    "wrong",
    [
        {"steps": 0},
        {"active_tokens": 65},
        {"active_tokens": -1},
        {"arrival": math.nan},
        {"deadline": math.nan},
    ],
)
def test_tickets_without_sense_are_refused(wrong: dict[str, float]):
    values = {"steps": 1, "total_tokens": 64, "active_tokens": 8, "arrival": 0.0} | wrong
    with pytest.raises(ValueError, match="ticket x"):
        Ticket("x", **values)  # type: ignore[arg-type]


def test_priming_alone_runs_at_full_speed():
    scheduler = StepScheduler(4, 16)
    for i in range(8):
        scheduler.submit(ticket(f"p{i}", background=True))
    loop = Loop(scheduler)
    assert [len(loop.run()) for _ in range(8)] == [4] * 8
    assert len(scheduler) == 0


def test_priming_rows_make_way_for_live_ones_at_once():
    scheduler = StepScheduler(4, 16)
    for i in range(4):
        scheduler.submit(ticket(f"p{i}", background=True, steps=100))
    loop = Loop(scheduler)
    loop.run()
    for i in range(4):
        scheduler.submit(ticket(f"live{i}", steps=3))
    running = [names(loop.run()) for _ in range(4)]
    assert running[:3] == [[f"live{i}" for i in range(4)]] * 3
    assert running[3] == [f"p{i}" for i in range(4)]


@given(
    share=st.sampled_from([0.1, 0.25, 0.5, 1.0]),
    active=st.integers(1, FULL),
    live_rows=st.integers(1, 4),
    priming=st.integers(1, 6),
)
def test_priming_beside_live_rows_keeps_to_its_share_and_still_moves(
    share: float, active: int, live_rows: int, priming: int
):
    scheduler = StepScheduler(4, 16, share)
    for i in range(live_rows):
        scheduler.submit(ticket(f"live{i}", steps=10**9, active=active))
    for i in range(priming):
        scheduler.submit(ticket(f"p{i}", steps=10**9, background=True))
    if live_rows == 4:  # priming gets a place only when a live row ends: other tests
        scheduler.cancel("live3")
    work = {False: 0, True: 0}
    steps = 400
    for _ in range(steps):
        decision = scheduler.schedule(0.0)
        for t in decision.running:
            work[t.background] += t.active_tokens
    assert work[True] <= share * work[False]
    # At most one row a step; otherwise the whole share is used, but for what is being saved up.
    assert work[True] >= min(share * work[False], steps * FULL) - 2 * FULL


def test_priming_takes_its_turn_as_soon_as_it_is_paid_for():
    """A quarter of 16 tokens a step: a turn of 64 after sixteen steps, and none late or early."""
    scheduler = StepScheduler(4, 16, 0.25)
    scheduler.submit(ticket("live", steps=10**9, active=16))
    scheduler.submit(ticket("prime", steps=10**9, background=True))
    turns = [
        step for step in range(100) if any(t.background for t in scheduler.schedule(0.0).running)
    ]
    assert turns == [16, 32, 48, 64, 80, 96]


def test_priming_does_not_starve_while_live_tickets_always_wait():
    scheduler = StepScheduler(2, 64)
    scheduler.submit(ticket("prime", steps=5, background=True))
    loop = Loop(scheduler)
    primed = 0
    live = 0
    for i in range(400):
        while len(scheduler.waiting) < 3:
            scheduler.submit(ticket(f"live{live}", steps=7, arrival=float(i)))
            live += 1
        running = loop.run()
        assert any(not t.background for t in running)
        primed += any(t.background for t in running)
    assert primed == 5
    assert "prime" not in names(scheduler.running)


def test_a_share_of_zero_primes_only_when_nothing_is_live():
    scheduler = StepScheduler(2, 8, priming_share=0.0)
    scheduler.submit(ticket("prime", steps=1, background=True))
    scheduler.submit(ticket("live", steps=3))
    loop = Loop(scheduler)
    assert [names(loop.run()) for _ in range(4)] == [["live"]] * 3 + [["prime"]]


@examples(50)
@given(
    st.lists(
        st.tuples(
            st.integers(1, 5),  # steps
            st.integers(-1, 1),  # priority
            st.none() | st.integers(0, 30),  # deadline
            st.integers(0, 20),  # arrives at this step
            st.booleans(),
        ),
        max_size=40,
    ),
    st.integers(1, 4),
)
def test_every_ticket_ends_and_takes_all_its_steps(
    edits: list[tuple[int, int, int | None, int, bool]], max_rows: int
):
    scheduler = StepScheduler(max_rows, 64)
    step_counts = {str(i): 0 for i in range(len(edits))}
    left: dict[str, int] = {}
    ended: list[str] = []
    for step in range(21 + sum(edit[0] for edit in edits) * 40):
        for i, (steps, priority, deadline, arrives, background) in enumerate(edits):
            if arrives == step:
                scheduler.submit(
                    ticket(
                        str(i),
                        steps=steps,
                        arrival=float(step),
                        priority=priority,
                        deadline=deadline,
                        background=background,
                    )
                )
        decision = scheduler.schedule(float(step))
        scheduler.check_integrity()
        ended += names(decision.expired)
        left |= {t.request_id: t.steps for t in decision.admitted}
        for t in decision.running:
            step_counts[t.request_id] += 1
            left[t.request_id] -= 1
            if left[t.request_id] == 0:
                scheduler.finish(t.request_id)
                ended.append(t.request_id)
        if step > 20 and len(scheduler) == 0:
            break
    assert sorted(ended, key=int) == [str(i) for i in range(len(edits))]
    for i, (steps, _, deadline, _, _) in enumerate(edits):
        assert step_counts[str(i)] <= steps
        assert deadline is not None or step_counts[str(i)] == steps


@given(
    st.lists(
        st.tuples(st.integers(1, 4), st.floats(0.0, 20.0), st.booleans()), min_size=1, max_size=12
    ),
    st.integers(1, 3),
)
def test_a_static_batch_runs_to_its_end_and_none_joins(
    edits: list[tuple[int, float, bool]], rows: int
) -> None:
    """Arrivals and lengths are arbitrary; priming goes on beside it, and no edit is left over."""
    scheduler, now, ended = StepScheduler(rows, 64, 0.5, static=True), 0.0, set[str]()
    left: dict[str, int] = {}
    todo = sorted(enumerate(edits), key=lambda edit: edit[1][1])
    while todo or len(scheduler):
        while todo and todo[0][1][1] <= now:
            number, (steps, arrival, background) = todo.pop(0)
            scheduler.submit(
                ticket(str(number), steps=steps, arrival=arrival, background=background)
            )
            left[str(number)] = steps
        request_ids = {t.request_id for t in scheduler.running if not t.background}
        decision = scheduler.schedule(now)
        joined = [t.request_id for t in decision.admitted if not t.background]
        assert not (request_ids and joined), "an edit joined a batch that runs"
        for running_ticket in decision.running:
            left[running_ticket.request_id] -= 1
            if not left[running_ticket.request_id]:
                scheduler.finish(running_ticket.request_id)
                ended.add(running_ticket.request_id)
        scheduler.check_integrity()
        now += 1.0
        assert now < 500.0, "an edit starves"
    assert ended == {str(number) for number in range(len(edits))}


def test_a_static_batch_takes_who_waits_once_the_last_one_has_ended() -> None:
    scheduler = StepScheduler(2, 8, static=True)
    for name in "abc":
        scheduler.submit(ticket(name))
    assert names(scheduler.schedule(0.0).admitted) == ["a", "b"]
    scheduler.finish("a")
    assert names(scheduler.schedule(1.0).running) == ["b"]
    scheduler.submit(ticket("d"))
    scheduler.finish("b")
    assert names(scheduler.schedule(2.0).admitted) == ["c", "d"]


class Machine(RuleBasedStateMachine):
    """Random arrivals, cancels, finishes and steps against a model of sets and sorted()."""

    tickets: Bundle[str] = Bundle("tickets")

    @initialize(rows=st.integers(1, 4), queue=st.integers(1, 6), share=st.sampled_from([0.0, 0.5]))
    def start(self, rows: int, queue: int, share: float) -> None:
        self.rows, self.queue = rows, queue
        self.scheduler = StepScheduler(rows, queue, share)
        self.now = 0.0
        self.number = 0
        self.waiting: dict[str, Ticket] = {}
        self.running: dict[str, Ticket] = {}  # has a row
        self.ended: dict[str, int] = {}

    def end(self, name: str) -> None:
        self.waiting.pop(name, None)
        self.running.pop(name, None)
        self.ended[name] = self.ended.get(name, 0) + 1

    @rule(
        target=tickets,
        priority=st.integers(-2, 2),
        patience=st.none() | st.floats(0.0, 20.0),
        age=st.floats(0.0, 3.0),
        active=st.integers(1, FULL),
        background=st.booleans(),
    )
    def submit(
        self, priority: int, patience: float | None, age: float, active: int, background: bool
    ) -> str:
        name = f"t{self.number}"
        self.number += 1
        new = ticket(
            name,
            active=active,
            arrival=self.now - age,
            priority=priority,
            deadline=None if patience is None else self.now + patience,
            background=background,
        )
        same_class = [t for t in self.waiting.values() if t.background == background]
        if len(same_class) >= self.queue:
            with pytest.raises(Overloaded):
                self.scheduler.submit(new)
        else:
            self.scheduler.submit(new)
            self.waiting[name] = new
            with pytest.raises((InvalidRequest, Overloaded)):
                self.scheduler.submit(new)
        return name

    @rule(name=consumes(tickets))
    def cancel(self, name: str) -> None:
        expected = self.waiting.get(name) or self.running.get(name)
        assert self.scheduler.cancel(name) == expected
        if expected is not None:
            self.end(name)

    @rule(name=tickets)
    def finish(self, name: str) -> None:
        if name in self.running:
            self.scheduler.finish(name)
            self.end(name)
        else:
            with pytest.raises(KeyError):
                self.scheduler.finish(name)

    @rule(name=tickets, active=st.integers(1, FULL), cost=st.floats(0.0, 9.0), fewer=st.booleans())
    def reprice(self, name: str, active: int, cost: float, *, fewer: bool) -> None:
        if name not in self.running:
            with pytest.raises(KeyError):
                self.scheduler.reprice(ticket(name))
            return
        before = self.running[name]
        steps = before.steps - (fewer and before.steps > 1)
        self.running[name] = replace(before, steps=steps, active_tokens=active, cost=cost)
        # Only prices count.
        prices = replace(self.running[name], steps=99, arrival=9e9, deadline=None)
        self.scheduler.reprice(prices, before.steps - steps)

    @rule(passed=st.floats(0.0, 5.0))
    def step(self, passed: float) -> None:
        self.now += passed
        decision = self.scheduler.schedule(self.now)
        late = {
            t.request_id
            for t in (*self.waiting.values(), *self.running.values())
            if t.deadline is not None and t.deadline <= self.now
        }
        assert set(names(decision.expired)) == late
        assert len(decision.expired) == len(late)
        for name in late:
            self.end(name)
        live_before = {n for n, t in self.running.items() if not t.background}
        for t in decision.admitted:
            assert self.waiting.pop(t.request_id) == t
            self.running[t.request_id] = t
        running = names(decision.running)
        assert len(set(running)) == len(running) <= self.rows
        assert set(running) <= set(self.running)
        assert set(names(decision.admitted)) <= set(running)
        # Live rows are never held back.
        assert {n for n, t in self.running.items() if not t.background} <= set(running)
        # Those admitted are the most urgent of their class, in order.
        for background in (False, True):
            mine = [t for t in decision.admitted if t.background == background]
            assert all(urgency(a) <= urgency(b) for a, b in pairwise(mine))
            other_tickets = [t for t in self.waiting.values() if t.background == background]
            assert all(urgency(a) <= urgency(b) for a in mine for b in other_tickets)
        # No place stays empty while a live ticket waits, and priming holds at most one then.
        primed = sum(t.background for t in decision.running)
        live_wait = any(not t.background for t in self.waiting.values())
        if live_wait:
            assert len(running) == self.rows
        if live_wait or live_before or any(not t.background for t in decision.admitted):
            assert primed <= 1
        elif self.waiting or self.running:
            assert len(running) == min(self.rows, len(self.waiting) + len(self.running))

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        self.scheduler.check_integrity()
        assert set(names(self.scheduler.waiting)) == set(self.waiting)
        assert {t.request_id: t for t in self.scheduler.running} == self.running
        assert len(self.scheduler) == len(self.waiting) + len(self.running)
        assert all(times == 1 for times in self.ended.values())


Machine.TestCase.settings = examples(150, stateful_step_count=40)
TestScheduler = Machine.TestCase


def test_cost_does_not_grow_with_the_queue():
    """A step's decision at 2048 waiting costs about what it does at 16: no scan of the queue."""

    def lines_of_steps(waiting: int) -> int:
        scheduler = StepScheduler(8, 4096)
        for i in range(waiting + 8):
            scheduler.submit(ticket(f"w{i}", arrival=float(i), deadline=1e9 + i))
        scheduler.schedule(0.0)

        def steps() -> None:
            for i in range(100):
                scheduler.finish(scheduler.running[0].request_id)
                scheduler.submit(ticket(f"n{i}", arrival=1e6 + i, deadline=2e9))
                scheduler.schedule(0.0)

        return lines_run(steps)

    # A scan of the queue in each step runs thirty times as many lines at 2048 as at 16.
    assert lines_of_steps(2048) < 2 * lines_of_steps(16)


def test_rows_that_cannot_share_a_step_take_turns() -> None:
    loop = Loop(StepScheduler(max_rows=4, max_waiting=8))
    wide = [replace(ticket(f"wide-{i}", steps=6), batch_key="wide") for i in range(2)]
    tall = replace(ticket("tall", steps=6), batch_key="tall")
    for wide_ticket in (*wide, tall):
        loop.scheduler.submit(wide_ticket)
    ran = [names(loop.run()) for _ in range(6)]
    assert ran == [["wide-0", "wide-1"], ["tall"]] * 3


def test_priming_of_another_shape_takes_its_turn_apart() -> None:
    loop = Loop(StepScheduler(max_rows=4, max_waiting=8, priming_share=1.0))
    loop.scheduler.submit(replace(ticket("live", steps=40, active=FULL), batch_key="wide"))
    loop.scheduler.submit(replace(ticket("prime", background=True), batch_key="tall"))
    ran = [names(loop.run()) for _ in range(12)]
    assert all(len(step) == 1 for step in ran)
    assert ["prime"] in ran
    assert ran.count(["live"]) >= 6
