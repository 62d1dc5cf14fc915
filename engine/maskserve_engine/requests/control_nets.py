"""The ControlNets of edits on the device, and their work in an edit's steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from maskserve_common.contracts.request import ResolvedControl
from maskserve_common.contracts.settings import acting, scale_at
from maskserve_common.contracts.status_record import NodeStatus
from maskserve_common.errors import MaskserveError
from maskserve_common.observations import Observations
from maskserve_common.resources.loading import Loaded, Source
from maskserve_common.resources.residency import Residency, Resource
from maskserve_common.resources.resource_cache import ResourceCache
from maskserve_engine.adapters.control_net_loader import CONTROL_NETS
from maskserve_engine.base.job import EditJob
from maskserve_engine.batch.step_cache import RefreshSchedule
from maskserve_engine.families.specs import control_work
from maskserve_engine.planning.flops import ModelWork, Totals
from maskserve_engine.spec.model_spec import ModelSpec


class ControlNetSource(Source[ResolvedControl], Protocol):
    """Loads ControlNets for the executor; implemented by `ControlNetLoader`."""

    def device_bytes(self, control: ResolvedControl) -> int: ...

    def config(self, control: ResolvedControl) -> Mapping[str, Any]: ...

    def holds(self, control: ResolvedControl) -> bool: ...

    def services(self) -> tuple[NodeStatus, ...]: ...


@dataclass(frozen=True, slots=True)
class ControlWork:
    """Counted work of an edit's ControlNets in its steps."""

    controls: tuple[ResolvedControl, ...]
    flops: tuple[tuple[float, float], ...]
    """FLOPs of each net in a step that computes all tokens, and in one with cached tokens."""
    steps: int
    schedule: RefreshSchedule
    """Refresh steps of the nets, which are the row's if it reads no template."""
    works: tuple[ModelWork, ...]
    """Work of each net in one pass."""
    with_template: bool = True

    @classmethod
    def of(
        cls,
        job: EditJob,
        spec: ModelSpec,
        counted: Totals,
        steps: int,
        nets: ControlNetSource,
        schedule: RefreshSchedule,
    ) -> ControlWork:
        """Count the ControlNets of an edit.

        Args:
            job: the edit.
            spec: spec of the model.
            counted: sums of one step of the edit.
            steps: number of its steps.
            nets: source of the ControlNets' configurations.
            schedule: schedule of the nets beside a template (`Adapter.net_schedule`).

        Raises:
            MaskserveError: one of them is not served (any more).
        """
        controls, size = acting(job.request.controls, steps), job.moments.shape[1:]
        works = tuple([control_work(spec, nets.config(control), *size) for control in controls])
        flops = tuple([(_dense(work, counted), _active(work, counted)) for work in works])
        return cls(controls, flops, steps, schedule, works)

    def with_schedule(self, plan: RefreshSchedule, between: Totals) -> ControlWork:
        """Return the work of an edit with refresh steps that reads no template.

        Args:
            plan: schedule of the refresh steps.
            between: sums of a step between them.
        """
        active = [_active(work, between) for work in self.works]
        flops = [
            (dense, cached_flops)
            for (dense, _), cached_flops in zip(self.flops, active, strict=True)
        ]
        return replace(self, flops=tuple(flops), schedule=plan, with_template=False)

    def at(self, step: int, *, cached: bool, foresaw: bool = False) -> float:
        """Return the FLOPs of the nets in one step of a row.

        Args:
            step: number of the step, from 0.
            cached: whether the base model reads cached tokens in this step.
            foresaw: whether the row computes a lookahead in this step.
        """
        looks_ahead = foresaw or (
            self.with_template and cached and step in self.schedule.lookahead_steps
        )
        ahead = self.schedule.next_refresh(step) if looks_ahead else None
        total = 0.0
        for control, (dense, active) in zip(self.controls, self.flops, strict=True):
            if ahead is not None and scale_at(control, ahead, self.steps):
                total += dense
            if not scale_at(control, step, self.steps):
                continue
            first = not any(scale_at(control, n, self.steps) for n in range(step))
            total += active if cached and not first else dense
        return total

    def mean(self, *, cached: bool) -> float:
        ahead = self.schedule.lookahead_steps if cached and not self.with_template else ()
        step_flops = (self.at(n, cached=cached, foresaw=n in ahead) for n in range(self.steps))
        return sum(step_flops) / self.steps


def _dense(work: ModelWork, counted: Totals) -> float:
    return work.batch_flops(None, (), _convolving_all(work, counted))


def _active(work: ModelWork, counted: Totals) -> float:
    kinds = ("kv",) * len(work.blocks)
    return work.batch_flops(_convolving_all(work, counted), kinds, None)


def _convolving_all(work: ModelWork, counted: Totals) -> Totals:
    """Return the sums with all positions convolved: a net convolves the whole picture even if its
    base has a tile.
    """
    convolved = tuple([float(counted.rows * tokens) for tokens in work.tokens])
    return replace(counted, convolved=convolved)


class EditControlNets(ResourceCache[ResolvedControl]):
    """The ControlNets of a worker's edits, or of a service's denoisers. An edit waits until its
    nets are loaded, and no step of other edits waits for them.
    """

    def __init__(
        self,
        residency: Residency,
        loader: ControlNetSource,
        on_loaded: Callable[[ResolvedControl, Loaded | MaskserveError], None],
        observations: Observations,
    ) -> None:
        super().__init__(CONTROL_NETS, residency, loader, on_loaded, observations)
        self._loader = loader
        self._typical_bytes = loader.typical_bytes()

    def typical_bytes(self) -> float:
        """Return the mean device bytes of the ControlNets found in the folder at startup."""
        return self._typical_bytes

    def services(self) -> tuple[NodeStatus, ...]:
        """Return the services that run the nets, as a status record lists them."""
        return self._loader.services()

    def _bytes(self, item: ResolvedControl) -> tuple[int, int]:
        nbytes = self._loader.device_bytes(item)
        return nbytes, nbytes

    def _request(self, resource: Resource, item: ResolvedControl) -> None:
        if not self._loader.holds(item):  # the service that had it has ended
            self._residency.drop(resource)
        super()._request(resource, item)
