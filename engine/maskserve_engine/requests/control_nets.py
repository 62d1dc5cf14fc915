"""The ControlNets of edits on the device, and what they compute in an edit's steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from maskserve_core.contracts.request import ResolvedControl
from maskserve_core.contracts.settings import acting, scale_at
from maskserve_core.errors import MaskserveError
from maskserve_core.models.facts import ModelFacts
from maskserve_core.models.registry import control_work
from maskserve_core.planning.flops import Totals
from maskserve_core.worker.holdings import Holdings
from maskserve_core.worker.loading import Loaded, Source
from maskserve_core.worker.observations import Observations
from maskserve_core.worker.residency import Residency, Resource
from maskserve_engine.adapters.control_net_loader import CONTROL_NETS
from maskserve_engine.base.job import EditJob
from maskserve_engine.batch.own_anchors import OwnPlan


class ControlNetSource(Source[ResolvedControl], Protocol):
    """What brings ControlNets to the executor: `ControlNetLoader`."""

    def device_bytes(self, control: ResolvedControl) -> int: ...

    def config(self, control: ResolvedControl) -> Mapping[str, Any]: ...

    def holds(self, control: ResolvedControl) -> bool: ...


@dataclass(frozen=True, slots=True)
class ControlWork:
    """What the ControlNets of an edit compute in its steps."""

    controls: tuple[ResolvedControl, ...]
    flops: tuple[tuple[float, float], ...]
    """Of each, of a step that computes all tokens and of one that computes the active ones."""
    steps: int
    anchors: frozenset[int]
    """Steps at which a net beside a cached row computes all tokens."""
    own: OwnPlan | None = None
    """Of the row's own anchors, which take their place."""

    @classmethod
    def of(
        cls,
        job: EditJob,
        facts: ModelFacts,
        counted: Totals,
        steps: int,
        nets: ControlNetSource,
        anchors: frozenset[int],
    ) -> ControlWork:
        """Of an edit.

        Args:
            job: the edit.
            facts: of the model.
            counted: what one step of it costs beside others.
            steps: that it takes.
            nets: knows the ControlNets.
            anchors: steps at which they compute all tokens.

        Raises:
            MaskserveError: one of them is not served, or no longer.
        """
        controls = acting(job.request.controls, steps)
        flops = []
        for control in controls:
            work = control_work(facts, nets.config(control), *job.moments.shape[1:])
            # A net convolves the whole picture, also where its base has a tile.
            convolved = tuple([float(counted.rows * tokens) for tokens in work.tokens])
            counted = replace(counted, convolved=convolved)
            kinds = ("kv",) * len(work.blocks)
            flops.append(
                (work.batch_flops(None, (), counted), work.batch_flops(counted, kinds, None))
            )
        return cls(controls, tuple(flops), steps, anchors)

    def with_own(self, plan: OwnPlan) -> ControlWork:
        """The same of an edit with anchors of its own."""
        return replace(self, anchors=plan.dense, own=plan)

    def at(self, step: int, *, cached: bool, foresaw: bool = False) -> float:
        """FLOPs of one step, the first being 0.

        Args:
            step: its number.
            cached: whether the base reads something in it.
            foresaw: whether the row computes its next anchor beside it.
        """
        ahead = self.own.behind(step) if self.own is not None and foresaw else None
        total = 0.0
        for control, (dense, active) in zip(self.controls, self.flops, strict=True):
            if ahead is not None and scale_at(control, ahead, self.steps):
                total += dense
            if not scale_at(control, step, self.steps):
                continue
            first = not any(scale_at(control, n, self.steps) for n in range(step))
            total += dense if first or step in self.anchors or not cached else active
        return total

    def mean(self, *, cached: bool) -> float:
        """FLOPs of its steps, on average."""
        ahead = frozenset[int]()
        if cached and self.own is not None:
            ahead = self.own.computed_at - self.own.dense
        each = (self.at(n, cached=cached, foresaw=n in ahead) for n in range(self.steps))
        return sum(each) / self.steps


class EditControlNets(Holdings[ResolvedControl]):
    """The ControlNets of a worker's edits, or of a service's denoisers. An edit waits until they
    are here, and no step of others waits for it.

    Args:
        residency: keeps the budget of kind `controlnet`.
        loader: of folders.
        came: see `Holdings`.
        observations: of the worker.
    """

    def __init__(
        self,
        residency: Residency,
        loader: ControlNetSource,
        came: Callable[[ResolvedControl, Loaded | MaskserveError], None],
        observations: Observations,
    ) -> None:
        super().__init__(CONTROL_NETS, residency, loader, came, observations)
        self._loader = loader
        self._typical_bytes = loader.typical_bytes()

    def typical_bytes(self) -> float:
        """On the device, of one of those that lay in the folder at the start, on average."""
        return self._typical_bytes

    def _bytes(self, wanted: ResolvedControl) -> tuple[int, int]:
        nbytes = self._loader.device_bytes(wanted)
        return nbytes, nbytes

    def _bring(self, resource: Resource, wanted: ResolvedControl) -> None:
        if not self._loader.holds(wanted):  # it went with the service that held it
            self._residency.drop(resource)
        super()._bring(resource, wanted)
