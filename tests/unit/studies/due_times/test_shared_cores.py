"""Edits, stages and steps on the cores of one machine, in virtual time."""

from __future__ import annotations

import numpy as np
import pytest

from maskserve_engine.scheduling.gangs.batching import Batching
from maskserve_engine.scheduling.gangs.deadline import Deadline
from maskserve_engine.scheduling.gangs.fixed import Fixed
from maskserve_engine.scheduling.gangs.scheduler import GangScheduler
from maskserve_engine.scheduling.gangs.work import GangPolicy
from maskserve_engine.scheduling.step_scheduler import Ticket
from maskserve_studies.deadlines.gangs import simulate
from maskserve_studies.due_times.shared_cores import Machine, StagedEdit
from tests.support.draws import fresh_rng


def tickets(count: int, steps: int = 5) -> list[Ticket]:
    rng = fresh_rng()
    at = np.cumsum(rng.exponential(0.4, count))
    ticket_list = []
    for number, arrival in enumerate(at):
        step_s = float(rng.uniform(0.1, 0.4))
        seconds = (step_s, 0.6 * step_s)
        due_s = float(arrival + rng.uniform(1.0, 6.0) * step_s * steps)
        ticket_list.append(
            Ticket(
                str(number), steps, 64, 64, float(arrival), due=due_s, seconds=seconds, shared=0.02
            )
        )
    return ticket_list


@pytest.mark.parametrize("policy", ["deadline", "fixed 1", "fixed 2"])
def test_with_nothing_beside_steps_it_is_the_simulator(policy: str) -> None:
    def make() -> GangPolicy:
        return {
            "deadline": lambda: Batching(Deadline(2), 8),
            "fixed 1": lambda: Fixed(2, 1),
            "fixed 2": lambda: Fixed(2, 2),
        }[policy]()

    drawn = tickets(40)
    expected = simulate(make(), drawn, 2).ended
    scheduler = GangScheduler(make(), 2, 64, 64)
    ends = Machine(scheduler, 2).run([StagedEdit(ticket, 0.0, 0.0) for ticket in drawn])
    assert ends == pytest.approx(expected)


def test_stages_take_their_turn_and_cores_from_steps() -> None:
    """Two edits of one step on a device each: the second waits for the encoder, and its decoding
    goes on beside nothing.
    """
    two_tickets = [Ticket(n, 1, 64, 64, 0.0, due=9.0, seconds=(1.0, 1.0)) for n in "ab"]
    edits = [StagedEdit(ticket, 0.5, 0.25) for ticket in two_tickets]
    free = Machine(GangScheduler(Fixed(2, 1), 2, 8, 8), 2).run(list(edits))
    assert free == pytest.approx({"a": 0.5 + 1.0 + 0.25, "b": 1.0 + 1.0 + 0.25})
    # On one core: a encodes (0.5), b encodes beside a's step (until 1.5), both step at half speed
    # (a's half step until 2.5), a is decoded beside b's step (until 3.0), which has 0.25 left.
    ends = Machine(GangScheduler(Fixed(2, 1), 2, 8, 8), 2, 1.0).run(list(edits))
    assert ends == pytest.approx({"a": 3.0, "b": 3.5})
