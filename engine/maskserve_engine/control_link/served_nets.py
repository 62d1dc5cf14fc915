"""ControlNets that a service holds for a denoiser."""

from __future__ import annotations

from maskserve_common.config import Config
from maskserve_common.contracts.request import ResolvedControl
from maskserve_engine.adapters.control_net_loader import ControlNetLoader, Place
from maskserve_engine.control_link.served import ControlService
from maskserve_engine.spec.control_nets import KnownControlNet, content_of
from maskserve_engine.spec.model_spec import ModelSpec

_LOAD_S = 300.0
"""Seconds in which a service loads a ControlNet."""


class ServedNetLoader(ControlNetLoader):
    """Lets a service load ControlNets; the service sees the same folder or has copies."""

    def __init__(
        self, config: Config, spec: ModelSpec, load: Place, service: ControlService
    ) -> None:
        super().__init__(config, spec, load)
        self._service = service

    def holds(self, control: ResolvedControl) -> bool:
        return self._service.holds(control.version)

    def _loaded(self, net: KnownControlNet, item: ResolvedControl) -> str:
        content = content_of(net.path)
        return str(self._service.load(net.name, item.version, content, _LOAD_S)["digest"])
