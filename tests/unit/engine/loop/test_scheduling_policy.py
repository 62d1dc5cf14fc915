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
        self._queue: deque[Ticket] = deque()
        self._runs = False
        self.tickets: list[Ticket] = []

    @property
    def running(self) -> tuple[Ticket, ...]:
        return (self._queue[0],) if self._runs else ()

    @property
    def waiting(self) -> tuple[Ticket, ...]:
        return tuple(self._queue)[self._runs :]

    def __len__(self) -> int:
        return len(self._queue)

    def submit(self, ticket: Ticket) -> None:
        if any(other.request_id == ticket.request_id for other in self._queue):
            raise InvalidRequest("SETTINGS.request_id", "is still being served", "a new id")
        self._queue.append(ticket)
        self.tickets.append(ticket)

    def cancel(self, request_id: str) -> Ticket | None:
        for n, ticket in enumerate(self._queue):
            if ticket.request_id == request_id:
                del self._queue[n]
                self._runs = self._runs and n > 0
                return ticket
        return None

    def finish(self, request_id: str) -> None:
        if not self._runs or self._queue[0].request_id != request_id:
            raise KeyError(request_id)
        self.cancel(request_id)

    def reprice(self, ticket: Ticket, fewer: int = 0) -> None:
        """Prices decide nothing."""

    def schedule(self, now: float, devices: Devices = ALL_FREE) -> Decision:
        if not self._queue:
            return Decision((), (), ())
        admitted = () if self._runs else (self._queue[0],)
        self._runs = True
        return Decision(admitted, (Run((self._queue[0],), steps=self.STEPS),), ())

    def check_integrity(self) -> None:
        assert self._queue or not self._runs


def recording(policies: list[OneByOne]) -> MakePolicy:
    def make(max_rows: int, max_waiting: int, priming_share: float) -> SchedulingPolicy:
        policies.append(OneByOne(max_rows, max_waiting, priming_share))
        return policies[-1]

    return make


@pytest.mark.parametrize("steps", [2, 7])
def test_the_engine_runs_another_policy(tiny_fill: Path, steps: int) -> None:
    config = config_of(tiny_fill, engine={"warm_up": False})
    encoder, policies = load_encoder(config), list[OneByOne]()
    engines = [
        assemble(config, load_adapter(config), lambda: None, policy=policy)
        for policy in (StepScheduler, recording(policies))
    ]
    finals = []
    for engine in engines:
        sinks = [Sink() for _ in range(3)]
        for number, sink in enumerate(sinks):
            edit_job = job(encoder, number, str(number), num_inference_steps=steps, cache="off")
            engine.submit(edit_job, sink)
        engine.start()
        finals.append([sink.final() for sink in sinks])
        engine.close(5.0)
        engine.manager.scheduler.check_integrity()
    for plain, one_by_one in zip(*finals, strict=True):
        assert abs(plain.latents - one_by_one.latents).max() < 1e-4
        assert one_by_one.meta["batch_mean"] == 1.0
        assert one_by_one.meta["steps"] == steps
    assert [ticket.request_id for ticket in policies[0].tickets] == ["0", "1", "2"]
    assert all(ticket.cost > 0.0 for ticket in policies[0].tickets)


def test_the_simulator_runs_it_too() -> None:
    policies = list[OneByOne]()
    workload = Workload(60, 0.5)
    scenario, hardware = Scenario(workload, workers=2), Hardware()
    cluster = Cluster(scenario, hardware, 5, recording(policies))
    cluster.run(draw(workload, hardware.tokens, 5))
    assert len(policies) == 2
    assert len(cluster.jobs) == 60
    assert {edit_job.outcome for edit_job in cluster.jobs} == {"done"}
    assert all(ticket.cost > 0.0 for policy in policies for ticket in policy.tickets)
    starts = sorted(
        (edit_job.worker, edit_job.started, edit_job.denoised) for edit_job in cluster.jobs
    )
    for (worker, _, ended), (then, started, _) in pairwise(starts):
        assert worker != then or started >= ended - 1e-9
