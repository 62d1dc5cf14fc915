"""The best list of a few edits, against every list there is."""

from __future__ import annotations

import itertools
import random

from maskserve_engine.scheduling.gangs.few_edits import FewEdits
from maskserve_engine.scheduling.gangs.work import Work
from maskserve_engine.scheduling.step_scheduler import Ticket
from tests.support.draws import fresh_random

DEVICES = 4


def edit(rng: random.Random, name: str) -> Work:
    one = rng.uniform(0.5, 2.0)
    seconds = tuple(one / degree**0.8 for degree in (1, 2, 4))
    steps = rng.randint(1, 4)
    due = steps * seconds[-1] * rng.uniform(0.8, 3.0)
    return Work(Ticket(name, steps, 1, 1, 0.0, due=due, seconds=seconds), steps, 0.0)


def running(rng: random.Random, name: str, gang: int) -> Work:
    work = edit(rng, name)
    work.gang, work.until, work.running_steps = gang, rng.uniform(0.1, 1.0), 1
    return work


def most_in_time(works: list[Work], gangs: dict[str, tuple[int, float]]) -> int:
    """By trying all orders, all degrees and all that could be left out."""
    best = 0
    for order in itertools.permutations(works):
        for degrees in itertools.product((0, 1, 2, 4), repeat=len(works)):
            free = [0.0] * DEVICES
            for gang, until in gangs.values():
                for device in range(DEVICES):
                    if gang >> device & 1:
                        free[device] = until
            count = 0
            for work, degree in zip(order, degrees, strict=True):
                if not degree:
                    continue
                free.sort()
                ready = 0.0 if work.until is None else work.until
                seconds = work.ticket.seconds[degree.bit_length() - 1]
                begin = max(free[degree - 1], ready)
                end = begin + (work.remaining - work.running_steps) * seconds
                assert work.ticket.due is not None
                if end > work.ticket.due:
                    break
                free[:degree] = [end] * degree
                count += work.remaining > work.running_steps
            else:
                best = max(best, count)
    return best


def test_of_few_edits_the_best_list_is_found() -> None:
    """Not at every draw: a search ends after so many places, mostly with the best one."""
    rng, missed = fresh_random(), 0
    for _ in range(25):
        works = [edit(rng, str(number)) for number in range(3)]
        if rng.random() < 0.5:
            works.append(running(rng, "running", rng.choice((0b1, 0b11))))
        gangs = {w.ticket.request_id: (w.gang, w.until) for w in works if w.until is not None}
        few = FewEdits(0.0, works, DEVICES)
        begun = few.starts({})
        assert begun is not None
        assert few.idle == DEVICES - sum(gang.bit_count() for gang, _ in gangs.values())
        for (job, degree), begin in zip(few.chosen, begun, strict=True):
            took = job.steps * job.work.ticket.seconds[degree.bit_length() - 1]
            assert begin + took <= job.due
        missed += len(few.chosen) != most_in_time(works, gangs)
    assert missed <= 1


def test_what_would_make_one_late_is_told() -> None:
    """Two that need all devices one after the other, and a third that would stand between."""

    def work(name: str, due: float) -> Work:
        return Work(Ticket(name, 1, 1, 1, 0.0, due=due, seconds=(4.0, 2.0, 1.0)), 1, 0.0)

    few = FewEdits(0.0, [work("a", 1.0), work("b", 2.0)], DEVICES)
    assert [(job.work.ticket.request_id, degree) for job, degree in few.chosen] == [
        ("a", 4),
        ("b", 4),
    ]
    assert few.starts({}) == [0.0, 1.0]
    assert few.starts({0: 4}) == [1.0, 1.0]
    assert few.starts({0: 4}, [(work("c", 9.0), 1)]) is None
