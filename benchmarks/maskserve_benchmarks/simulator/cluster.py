"""The events of a run, from arrival to answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from maskserve_benchmarks.simulator.events import Events
from maskserve_benchmarks.simulator.hardware import CONTROL, Hardware
from maskserve_benchmarks.simulator.job import Job
from maskserve_benchmarks.simulator.residency import Host
from maskserve_benchmarks.simulator.scenario import Scenario, Tiers
from maskserve_benchmarks.simulator.worker import Worker
from maskserve_benchmarks.simulator.workload import Request
from maskserve_common.errors import Overloaded
from maskserve_common.routing import Edit, NoWorkerAvailable, make_policy, predicted_seconds
from maskserve_engine.scheduling.step_scheduler import MakePolicy, StepScheduler


class Cluster:
    """Workers, a routing policy and a step policy."""

    def __init__(
        self,
        scenario: Scenario,
        hardware: Hardware,
        seed: int = 0,
        step_policy: MakePolicy = StepScheduler,
    ) -> None:
        self.scenario = scenario
        self.hardware = hardware
        self.policy = make_policy(scenario.policy)
        self._events = Events()
        self.hosts = _hosts(scenario, hardware, lambda: self._events.now)
        per_host = scenario.tiers.workers_per_host if scenario.tiers else 1
        self.workers = {
            worker.name: worker
            for worker in (
                Worker(
                    f"w{i:03d}",
                    hardware,
                    scenario,
                    self.hosts[i // per_host] if self.hosts else None,
                    self._events.at,
                    self._count_answer,
                    seed * 1000 + i,
                    step_policy,
                )
                for i in range(scenario.workers)
            )
        }
        self.jobs: list[Job] = []
        self.refused: list[Request] = []
        self.answers = 0

    def run(self, requests: Sequence[Request]) -> None:
        """Serve all of `requests`."""
        for request in requests:
            self._events.at(request.arrival, self._arrive, request)
        self._events.run()
        for worker in self.workers.values():
            worker.check_empty()

    def _arrive(self, now: float, request: object) -> None:
        assert isinstance(request, Request)
        cacheable = self.hardware.cacheable(request.active)
        refresh_count = len(self.hardware.refresh_steps(request.steps)) if cacheable else 0
        edit = Edit(
            request.steps,
            request.active,
            self.hardware.tokens,
            request.template,
            cache=cacheable,
            refresh_steps=refresh_count,
            always_refreshes=refresh_count > 0 and self.hardware.spec.refresh.over_template,
            inner_tokens=request.masked,
            ring_tokens=self.hardware.ring_tokens(request.masked),
            adapters=request.loras,
            controls=CONTROL if request.controlled and self.scenario.controls_priced else (),
        )
        views = [worker.view() for worker in self.workers.values()]
        try:
            worker_name = self.policy.choose(edit, views, now)
            view = next(view for view in views if view.worker == worker_name)
            predicted = predicted_seconds(edit, view, now)
            self.jobs.append(self.workers[worker_name].send(request, edit, predicted, now))
        except (NoWorkerAvailable, Overloaded):
            self.refused.append(request)

    def _count_answer(self, job: Job, when: float) -> None:
        self.answers += 1


def _hosts(scenario: Scenario, hardware: Hardware, clock: Callable[[], float]) -> list[Host]:
    tiers = scenario.tiers
    if tiers is None:
        return []
    hosts = [
        Host(f"h{i}", hardware, tiers.host_templates, tiers.disk_templates, clock)
        for i in range(-(-scenario.workers // tiers.workers_per_host))
    ]
    if tiers.warm:
        _warm(hosts, tiers, scenario.workload.templates)
    return hosts


def _warm(hosts: list[Host], tiers: Tiers, templates: int) -> None:
    """Fill the tiers. Half of each memory holds the most popular templates. The other half holds a
    share of the remaining templates, dealt out in turn. Disks hold the most popular templates that
    fit.
    """
    half = tiers.host_templates // 2
    for i, host in enumerate(hosts):
        dealt = range(half + i, templates, len(hosts))[: tiers.host_templates - half]
        warm_templates = [*range(min(half, templates)), *dealt]
        # t00000 is the most popular; the last one put in is the most recently used.
        for t in reversed(range(min(templates, tiers.disk_templates))):
            host.keep(f"t{t:05d}", host.disk)
        for t in reversed(warm_templates):
            host.keep(f"t{t:05d}", host.memory)
