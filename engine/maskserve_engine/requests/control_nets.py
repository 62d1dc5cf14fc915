"""The ControlNets of edits on the device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from maskserve_common.contracts.request import ResolvedControl
from maskserve_common.contracts.status_record import NodeStatus
from maskserve_common.errors import MaskserveError
from maskserve_common.observations import Observations
from maskserve_common.resources.loading import Loaded, Source
from maskserve_common.resources.resource_cache import ResourceCache
from maskserve_common.resources.resource_states import Resource, ResourceStates
from maskserve_engine.adapters.control_net_loader import CONTROL_NETS


class ControlNetSource(Source[ResolvedControl], Protocol):
    """Loads ControlNets for the executor; implemented by `ControlNetLoader`."""

    def device_bytes(self, control: ResolvedControl) -> int: ...

    def config(self, control: ResolvedControl) -> Mapping[str, Any]: ...

    def holds(self, control: ResolvedControl) -> bool: ...

    def services(self) -> tuple[NodeStatus, ...]: ...


class EditControlNets(ResourceCache[ResolvedControl]):
    """The ControlNets of a worker's edits, or of a service's denoisers. An edit waits until its
    nets are loaded, and no step of other edits waits for them.
    """

    def __init__(
        self,
        resource_states: ResourceStates,
        loader: ControlNetSource,
        on_loaded: Callable[[ResolvedControl, Loaded | MaskserveError], None],
        observations: Observations,
    ) -> None:
        super().__init__(CONTROL_NETS, resource_states, loader, on_loaded, observations)
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
            self._resource_states.evict(resource)
        super()._request(resource, item)
