"""Which ControlNets are on the device, and which edits need them.

An edit holds its ControlNets from when it is accepted until it ends; it waits until they are here,
and no step of others waits for it. Used by the engine thread only; loading goes on in another
(`ControlNetLoader`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from maskserve_core.contracts.request import ResolvedControl
from maskserve_core.errors import MaskserveError, Overloaded
from maskserve_core.worker.observations import Observations
from maskserve_engine.adapters.control_net_loader import LoadedNet
from maskserve_engine.requests.popularity import Popularity
from maskserve_engine.requests.residency import Residency, Resource

KIND = "controlnet"


class ControlNetSource(Protocol):
    """What brings ControlNets to the executor: `ControlNetLoader`."""

    def device_bytes(self, control: ResolvedControl) -> int: ...

    def load(
        self, control: ResolvedControl, done: Callable[[LoadedNet | MaskserveError], None]
    ) -> None: ...

    def close(self) -> None: ...


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
        self._observations.add("controlnet_load_seconds", loaded.seconds)
        self._loaded[control.version] = loaded
        return self._residency.arrived(Resource(KIND, control.version))

    def failed(self, control: ResolvedControl, error: MaskserveError) -> list[str]:
        """It will not come; the edits that waited for it."""
        return self._residency.failed(Resource(KIND, control.version), error)

    def dropped(self, resource: Resource) -> None:
        """It has made room for another."""
        self._loaded.pop(resource.name, None)

    def waited(self, seconds: float) -> None:
        """An edit has gone on after so long a wait for its ControlNets."""
        self._observations.add("controlnet_wait_seconds", seconds)

    def digest(self, control: ResolvedControl) -> str:
        """sha256 of the weights of one that is here."""
        return self._loaded[control.version].digest

    def names(self) -> tuple[str, ...]:
        """Of those on the device."""
        return tuple(sorted({loaded.name for loaded in self._loaded.values()}))

    def _bring(self, resource: Resource, control: ResolvedControl) -> None:
        if self._residency.state(resource) not in ("here", "coming"):
            nbytes = self._loader.device_bytes(control)
            # It is asked for now, so all that nobody holds may go for it, whatever its worth.
            if not self._residency.coming(resource, nbytes, float("inf")):
                raise Overloaded(
                    f"SETTINGS.controls: there is no room for ControlNet {control.name} beside "
                    "those of the edits under way ([controls] device_bytes); try again later"
                )
            self._loader.load(control, lambda outcome: self._came(control, outcome))
        worth = self._popularity.worth(resource.name, self._residency.nbytes_of(resource))
        self._residency.touch(resource, worth)
