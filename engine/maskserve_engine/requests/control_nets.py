"""Which ControlNets are on the device, and which edits need them.

An edit holds its ControlNets from when it is accepted until it ends; it waits until they are here,
and no step of others waits for it. Used by the engine thread only; loading goes on in another
(`ControlNetLoader`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Protocol

from maskserve_core.contracts.request import ResolvedControl
from maskserve_core.contracts.settings import acting, scale_at
from maskserve_core.contracts.status_record import AdapterStatus, AdapterTier, LoadCost
from maskserve_core.errors import MaskserveError, Overloaded
from maskserve_core.models.facts import ModelFacts
from maskserve_core.models.registry import control_work
from maskserve_core.planning.flops import Totals
from maskserve_core.worker.observations import Observations
from maskserve_engine.adapters.control_net_loader import LoadedNet
from maskserve_engine.base.job import EditJob
from maskserve_engine.requests.load_costs import LoadCosts
from maskserve_engine.requests.popularity import Popularity
from maskserve_engine.requests.residency import Residency, Resource

KIND = "controlnet"
_SOURCE = "storage"
ESTIMATES: Mapping[str, LoadCost] = MappingProxyType({_SOURCE: LoadCost(0.5, 1e-9)})
"""Of loads before any was measured: reading a folder of the host, and a copy to the device."""


class ControlNetSource(Protocol):
    """What brings ControlNets to the executor: `ControlNetLoader`."""

    def device_bytes(self, control: ResolvedControl) -> int: ...

    def typical_bytes(self) -> float: ...

    def config(self, control: ResolvedControl) -> Mapping[str, Any]: ...

    def holds(self, control: ResolvedControl) -> bool: ...

    def load(
        self, control: ResolvedControl, done: Callable[[LoadedNet | MaskserveError], None]
    ) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class ControlWork:
    """What the ControlNets of an edit compute in its steps."""

    controls: tuple[ResolvedControl, ...]
    flops: tuple[tuple[float, float], ...]
    """Of each, of a step that computes all tokens and of one that computes the active ones."""
    steps: int
    refresh: int
    """Steps from one at which a net beside a cached row computes all tokens to the next."""

    @classmethod
    def of(
        cls,
        job: EditJob,
        facts: ModelFacts,
        counted: Totals,
        steps: int,
        nets: ControlNetSource,
        refresh: int,
    ) -> ControlWork:
        """Of an edit.

        Args:
            job: the edit.
            facts: of the model.
            counted: what one step of it costs beside others.
            steps: that it takes.
            nets: knows the ControlNets.
            refresh: `[controls] refresh`.

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
        return cls(controls, tuple(flops), steps, refresh)

    def at(self, step: int, *, cached: bool) -> float:
        """FLOPs of one step, the first being 0."""
        total = 0.0
        for control, (dense, active) in zip(self.controls, self.flops, strict=True):
            if not scale_at(control, step, self.steps):
                continue
            since = step - next(n for n in range(self.steps) if scale_at(control, n, self.steps))
            total += active if cached and since % self.refresh else dense
        return total

    def mean(self, *, cached: bool) -> float:
        """FLOPs of its steps, on average."""
        return sum(self.at(step, cached=cached) for step in range(self.steps)) / self.steps


def new_counters() -> dict[str, int]:
    """Totals since the worker's start, by metric."""
    return {"controlnet_load_failures_total": 0, "controlnet_evictions_total": 0}


Came = Callable[[ResolvedControl, LoadedNet | MaskserveError], None]
"""Told, in any thread, what became of a ControlNet that was asked for."""


class EditControlNets:
    """The ControlNets of a worker's edits.

    Args:
        residency: keeps the budget of kind `controlnet`.
        loader: of folders.
        came: hands its news to the engine's thread, which passes them to `arrived` or `failed`.
        observations: of the worker.
    """

    def __init__(
        self, residency: Residency, loader: ControlNetSource, came: Came, observations: Observations
    ) -> None:
        self._residency, self._loader, self._came = residency, loader, came
        self._observations = observations
        self._popularity = Popularity()
        self._loaded: dict[str, LoadedNet] = {}
        """By version."""
        self._coming: dict[str, str] = {}
        """Version → name of what is on its way."""
        self.costs = LoadCosts(ESTIMATES)
        self.counters = new_counters()
        self.typical_bytes = loader.typical_bytes()
        """On the device, of one of those that lay in the folder at the start, on average."""
        self._listed: tuple[AdapterStatus, ...] | None = None
        self._owners: dict[str, tuple[Resource, ...]] = {}
        """What each edit holds."""

    def hold(self, owner: str, controls: Sequence[ResolvedControl]) -> tuple[Resource, ...]:
        """Keep these for an edit, and have brought what is not here; the latter.

        Raises:
            MaskserveError: one of them cannot be had; nothing is kept then.
        """
        by_name = {Resource(KIND, control.version): control for control in controls}
        if owner not in self._owners:
            self._owners[owner] = tuple(by_name)
            for resource in by_name:
                self._residency.pin(resource)
                self._popularity.used(resource.name)
        try:
            for resource, control in by_name.items():
                self._bring(resource, control)
        except MaskserveError:
            self.let_go(owner)
            raise
        return tuple([each for each in by_name if self._residency.state(each) != "here"])

    def let_go(self, owner: str) -> None:
        """It has ended."""
        for resource in self._owners.pop(owner, ()):
            self._residency.unpin(resource)

    def arrived(self, control: ResolvedControl, loaded: LoadedNet) -> list[str]:
        """It can be used; the edits that wait for nothing more."""
        resource = Resource(KIND, control.version)
        self._observations.add("controlnet_load_seconds", loaded.seconds)
        self.costs.add(_SOURCE, self._residency.nbytes_of(resource), loaded.seconds)
        self._coming.pop(control.version, None)
        self._loaded[control.version], self._listed = loaded, None
        return self._residency.arrived(resource)

    def failed(self, control: ResolvedControl, error: MaskserveError) -> list[str]:
        """It will not come; the edits that waited for it."""
        self.counters["controlnet_load_failures_total"] += 1
        self._coming.pop(control.version, None)
        self._listed = None
        return self._residency.failed(Resource(KIND, control.version), error)

    def dropped(self, resource: Resource) -> None:
        """It has made room for another, or went with the service that held it."""
        self.counters["controlnet_evictions_total"] += 1
        self._loaded.pop(resource.name, None)
        self._listed = None

    def waited(self, seconds: float) -> None:
        """An edit has gone on after so long a wait for its ControlNets."""
        self._observations.add("controlnet_wait_seconds", seconds)

    def digest(self, control: ResolvedControl) -> str:
        """sha256 of the weights of one that is here."""
        return self._loaded[control.version].digest

    def names(self) -> tuple[str, ...]:
        """Of those on the device."""
        return tuple(sorted({loaded.name for loaded in self._loaded.values()}))

    def listed(self) -> tuple[AdapterStatus, ...]:
        """What routers are told of; the same object for as long as nothing changes."""
        if self._listed is None:

            def about(version: str, name: str, tier: AdapterTier, digest: str) -> AdapterStatus:
                nbytes = self._residency.nbytes_of(Resource(KIND, version))
                return AdapterStatus(name, tier, nbytes, digest)

            coming = [about(each, name, "coming", "") for each, name in self._coming.items()]
            here = [
                about(version, net.name, "device", net.digest)
                for version, net in self._loaded.items()
            ]
            self._listed = (*coming, *here)
        return self._listed

    def _bring(self, resource: Resource, control: ResolvedControl) -> None:
        if not self._loader.holds(control):  # it went with the service that held it
            self._residency.drop(resource)
        if self._residency.state(resource) not in ("here", "coming"):
            nbytes = self._loader.device_bytes(control)
            # It is asked for now, so all that nobody holds may go for it, whatever its worth.
            if not self._residency.coming(resource, nbytes, float("inf")):
                raise Overloaded(
                    f"SETTINGS.controls: there is no room for ControlNet {control.name} beside "
                    "those of the edits under way ([controls] device_bytes); try again later"
                )
            self._coming[control.version], self._listed = control.name, None
            self._loader.load(control, lambda outcome: self._came(control, outcome))
        worth = self._popularity.worth(resource.name, self._residency.nbytes_of(resource))
        self._residency.touch(resource, worth)
