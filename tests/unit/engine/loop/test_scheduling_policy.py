"""Another policy than the product's, in the engine and in the simulator."""

from __future__ import annotations

from collections import deque
from itertools import pairwise
from pathlib import Path

import pytest

from maskserve_benchmarks.simulator.cluster import Cluster
from maskserve_benchmarks.simulator.hardware import Hardware
from maskserve_benchmarks.simulator.scenario import Scenario
from maskserve_benchmarks.simulator.workload import Workload, draw
from maskserve_common.errors import InvalidRequest
from maskserve_engine.families.registry import load_adapter, load_encoder
from maskserve_engine.scheduling.step_scheduler import (
    ALL_FREE,
    Decision,
    Devices,
    MakePolicy,
    Run,
    SchedulingPolicy,
    StepScheduler,
    Ticket,
)
from maskserve_engine.start.assembly import assemble
from tests.fakes.jobs import config_of
from tests.support.engines import job
from tests.support.sink import Sink


class OneByOne:
    """One ticket at a time, first come first served, `STEPS` steps per decision."""

    STEPS = 3

    def __init__(self, max_rows: int, max_waiting: int, priming_share: float) -> None:
        self._held: deque[Ticket] = deque()
        self._runs = False
        self.seen: list[Ticket] = []

    @property
    def running(self) -> tuple[Ticket, ...]:
        return (self._held[0],) if self._runs else ()

    @property
    def waiting(self) -> tuple[Ticket, ...]:
        return tuple(self._held)[self._runs :]

    def __len__(self) -> int:
        return len(self._held)

    def submit(self, ticket: Ticket) -> None:
        if any(held.request_id == ticket.request_id for held in self._held):
            raise InvalidRequest("SETTINGS.request_id", "is still being served", "a new id")
        self._held.append(ticket)
        self.seen.append(ticket)

    def cancel(self, request_id: str) -> Ticket | None:
        for n, ticket in enumerate(self._held):
            if ticket.request_id == request_id:
                del self._held[n]
                self._runs = self._runs and n > 0
                return ticket
        return None

    def finish(self, request_id: str) -> None:
        if not self._runs or self._held[0].request_id != request_id:
            raise KeyError(request_id)
        self.cancel(request_id)

    def drain(self) -> None:
        """Nothing is refused."""

    def schedule(self, now: float, devices: Devices = ALL_FREE) -> Decision:
        if not self._held:
            return Decision((), (), ())
        admitted = () if self._runs else (self._held[0],)
        self._runs = True
        return Decision(admitted, (Run((self._held[0],), steps=self.STEPS),), ())

    def check_integrity(self) -> None:
        assert self._held or not self._runs


def kept(made: list[OneByOne]) -> MakePolicy:
    def make(max_rows: int, max_waiting: int, priming_share: float) -> SchedulingPolicy:
        made.append(OneByOne(max_rows, max_waiting, priming_share))
        return made[-1]

    return make


@pytest.mark.parametrize("steps", [2, 7])
def test_the_engine_runs_another_policy(tiny_fill: Path, steps: int) -> None:
    config = config_of(tiny_fill, engine={"warm_up": False})
    encoder, made = load_encoder(config), list[OneByOne]()
    engines = [
        assemble(config, load_adapter(config), lambda: None, policy=policy)
        for policy in (StepScheduler, kept(made))
    ]
    found = []
    for engine in engines:
        sinks = [Sink() for _ in range(3)]
        for number, sink in enumerate(sinks):
            each = job(encoder, number, str(number), num_inference_steps=steps, cache="off")
            engine.submit(each, sink)
        engine.start()
        found.append([sink.final() for sink in sinks])
        engine.close(5.0)
        engine.manager.scheduler.check_integrity()
    for ours, theirs in zip(*found, strict=True):
        assert abs(ours.latents - theirs.latents).max() < 1e-4
        assert theirs.meta["batch_mean"] == 1.0
        assert theirs.meta["steps"] == steps
    assert [ticket.request_id for ticket in made[0].seen] == ["0", "1", "2"]
    assert all(ticket.cost > 0.0 for ticket in made[0].seen)


def test_the_simulator_runs_it_too() -> None:
    made = list[OneByOne]()
    workload = Workload(60, 0.5)
    scenario, hardware = Scenario(workload, workers=2), Hardware()
    cluster = Cluster(scenario, hardware, 5, kept(made))
    cluster.run(draw(workload, hardware.tokens, 5))
    assert len(made) == 2
    assert len(cluster.jobs) == 60
    assert {each.outcome for each in cluster.jobs} == {"done"}
    assert all(ticket.cost > 0.0 for policy in made for ticket in policy.seen)
    starts = sorted((each.worker, each.started, each.denoised) for each in cluster.jobs)
    for (worker, _, ended), (then, started, _) in pairwise(starts):
        assert worker != then or started >= ended - 1e-9
