"""Items of several keys that wait for places, beside a rule that is worked out anew each time."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from maskserve_common.fair_queue import FairQueue, Turn
from maskserve_common.shares import Full
from tests.support.examples import examples

KEYS = st.sampled_from(["", "a", "b", "c", "d"])
LINES = st.sampled_from([None, None, None, "own", "other"])


@dataclass(frozen=True)
class Item:
    number: int
    urgency: float
    key: str
    line: str | None


class Rule:
    """The rule of turns without an index: everybody is ranked anew for each place."""

    def __init__(self) -> None:
        self.waiting: list[Item] = []
        self.places: Counter[str] = Counter()
        self.served: dict[str, int] = {}
        self.turns = 0

    def next(self, passed_over: frozenset[tuple[str, str | None]] = frozenset()) -> Item | None:
        """The item that gets the next place, if none of these lines may have it."""
        open_items = [item for item in self.waiting if (item.key, item.line) not in passed_over]
        return min(
            open_items,
            key=lambda item: (
                self.places[item.key],
                self.served.get(item.key, 0),
                item.urgency,
                item.number,
            ),
            default=None,
        )

    def take(self, item: Item) -> None:
        self.waiting.remove(item)
        self.turns += 1
        self.places[item.key] += 1
        self.served[item.key] = self.turns

    def order(self) -> list[Item]:
        """The items in the order in which they get places if none is given back."""
        rest = Rule()
        rest.waiting, rest.places = list(self.waiting), Counter(self.places)
        rest.served, rest.turns = dict(self.served), self.turns
        order = []
        while (item := rest.next()) is not None:
            order.append(item)
            rest.take(item)
        return order


class Machine(RuleBasedStateMachine):
    """A queue and the rule, which are told the same."""

    def __init__(self) -> None:
        super().__init__()
        self.queue: FairQueue[Item] = FairQueue()
        self.rule = Rule()
        self.turns: dict[int, Turn[Item]] = {}

    @rule(key=KEYS, line=LINES, urgencies=st.lists(st.integers(0, 3), min_size=1, max_size=5))
    def put(self, key: str, line: str | None, urgencies: list[int]) -> None:
        for urgency in urgencies:
            item = Item(len(self.turns), float(urgency), key, line)
            self.turns[item.number] = self.queue.put(key, item, item.urgency, line)
            self.rule.waiting.append(item)

    @precondition(lambda self: self.turns)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        turn = self.turns[data.draw(st.sampled_from(sorted(self.turns)))]
        waits = turn.item in self.rule.waiting
        assert self.queue.cancel(turn) == waits
        if waits:
            self.rule.waiting.remove(turn.item)

    @rule(places=st.integers(0, 6), closed=st.frozensets(st.tuples(KEYS, LINES), max_size=4))
    def hand_out(self, places: int, closed: frozenset[tuple[str, str | None]]) -> None:
        """Give so many places to items, but none to these lines."""
        passed_over: frozenset[tuple[str, str | None]] = frozenset()
        for turn in self.queue.offers():
            assert turn.item == self.rule.next(passed_over)
            if (turn.item.key, turn.item.line) in closed:
                passed_over |= {(turn.item.key, turn.item.line)}
            elif places:
                places -= 1
                self.queue.take(turn)
                self.rule.take(turn.item)
            else:
                return
        assert self.rule.next(passed_over) is None

    @rule()
    def give_up(self) -> None:
        """The wait of every second item ends as its turn comes."""
        for count, turn in enumerate(self.queue.offers()):
            assert turn.item == self.rule.next()
            if count % 2:
                self.queue.take(turn)
                self.rule.take(turn.item)
            else:
                self.queue.cancel(turn)
                self.rule.waiting.remove(turn.item)

    @precondition(lambda self: self.rule.places.total())
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.rule.places.elements())))
        self.queue.give_back(key)
        self.rule.places[key] -= 1

    @invariant()
    def agrees(self) -> None:
        assert self.queue.check_integrity()
        assert [turn.item for turn in self.queue.order()] == self.rule.order()
        assert len(self.queue) == len(self.rule.waiting)
        for key, count in self.rule.places.items():
            assert self.queue.places.in_use(key) == count


Machine.TestCase.settings = examples(150, stateful_step_count=40)
TestFairQueue = Machine.TestCase


def test_a_key_that_asks_for_much_waits_behind_itself_alone():
    queue: FairQueue[str] = FairQueue()
    for _ in range(6):
        queue.take(queue.put("greedy", "runs"))
    for number in range(40):
        queue.put("greedy", f"greedy {number}")
    for number in range(2):
        queue.put("modest", f"modest {number}", urgency=1.0)
    assert [turn.item for turn in queue.order()][:2] == ["modest 0", "modest 1"]


def test_keys_that_hold_as_much_take_turns():
    """With one place, the one that has just had it holds nothing when the next turn is decided."""
    queue: FairQueue[str] = FairQueue()
    served = []
    for key in ("greedy",) * 12 + ("modest",) * 6:
        queue.put(key, key)
    for _ in range(6):
        turn = next(queue.offers())
        queue.take(turn)
        served.append(turn.item)
        queue.give_back(turn.key)
    assert served == ["greedy", "modest"] * 3


def test_a_key_may_not_fill_the_queue():
    queue: FairQueue[int] = FairQueue(most_waiting=4)
    for number in range(2):
        queue.waiting.check("greedy")
        queue.put("greedy", number)
    with pytest.raises(Full):
        queue.waiting.check("greedy")
    queue.waiting.check("modest")
    queue.take(next(queue.offers()))
    queue.waiting.check("greedy")


def test_a_key_with_two_lines_takes_one_turn():
    queue: FairQueue[str] = FairQueue()
    for line in ("own", "other"):
        queue.put("greedy", line, line=line)
    queue.put("modest", "modest")
    served = []
    for turn in queue.offers():
        queue.take(turn)
        served.append(turn.item)
    assert served == ["own", "modest", "other"]


def test_a_dispatch_looks_at_one_item_of_each_key():
    queue: FairQueue[int] = FairQueue()
    for number in range(2000):
        queue.put(number % 20, number)
    assert sorted(turn.item for turn in queue.offers()) == list(range(20))
