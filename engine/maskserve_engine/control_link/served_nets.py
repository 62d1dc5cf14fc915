"""Loads of ControlNets into services, for a denoiser."""

from __future__ import annotations

from maskserve_common.config import Config
from maskserve_common.contracts.request import ResolvedControl
from maskserve_common.contracts.status_record import NodeStatus
from maskserve_engine.adapters.control_net_loader import ControlNetLoader, Place
from maskserve_engine.control_link.services import ControlServices
from maskserve_engine.spec.control_nets import KnownControlNet, content_of
from maskserve_engine.spec.model_spec import ModelSpec

_LOAD_TIMEOUT_S = 300.0


class ServedNetLoader(ControlNetLoader):
    """Lets services load ControlNets. They read the same folder, or copies of it."""

    def __init__(
        self, config: Config, spec: ModelSpec, load: Place, services: ControlServices
    ) -> None:
        super().__init__(config, spec, load)
        self._services = services

    def holds(self, control: ResolvedControl) -> bool:
        return self._services.holds(control.version)

    def services(self) -> tuple[NodeStatus, ...]:
        return self._services.statuses()

    def _loaded(self, net: KnownControlNet, item: ResolvedControl) -> str:
        content = content_of(net.path)
        return str(self._services.load(net.name, item.version, content, _LOAD_TIMEOUT_S)["digest"])
