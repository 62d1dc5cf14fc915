"""A ControlNet service in this process, whose calls go to it directly; steps go as they are served,
through its socket and slots.
"""

from __future__ import annotations

import tempfile
import threading
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace

from maskserve_core.config import Config, FastControl
from maskserve_core.contracts.request import ResolvedControl
from maskserve_core.errors import MaskserveError
from maskserve_core.models.control_nets import ControlNets
from maskserve_core.models.registry import load_facts
from maskserve_engine.adapters.control_net_loader import LoadedNet
from maskserve_engine.control_link.opening import Opening
from maskserve_engine.control_link.served import ControlService
from maskserve_engine.control_service import ControlNetService
from maskserve_engine.stages.loader import dtype_of

_PATIENCE_S = 120.0


class DirectCalls:
    """`control_link.served.ServiceCalls` of a service in this process."""

    def __init__(self, service: ControlNetService) -> None:
        self._service = service

    def call(self, op: dict[str, Any], arrays: bytes, limit_s: float) -> dict[str, Any]:
        service = self._service
        match op:
            case {"op": "attach"}:
                return dict(service.attach(op["dtype"]))
            case {"op": "load"}:
                found: list[LoadedNet | MaskserveError] = []
                came = threading.Event()

                def done(outcome: LoadedNet | MaskserveError) -> None:
                    found.append(outcome)
                    came.set()

                control = ResolvedControl(name=op["name"], version=op["version"])
                service.load(op["session"], control, done)
                came.wait(limit_s)
                [loaded] = found
                if isinstance(loaded, MaskserveError):
                    raise loaded
                return {"digest": loaded.digest}
            case {"op": "open"}:
                service.open(op["session"], op["row"], Opening.unpacked(op["opening"], arrays))
            case {"op": "close"}:
                service.close_row(op["session"], op["row"])
        return {}

    def close(self) -> None:
        """The service is its owner's."""


class ServiceHere:
    """A service of one ControlNet in this process.

    Args:
        config: of the base.
        net: the ControlNet's folder.
    """

    def __init__(self, config: Config, net: Path) -> None:
        controls = replace(config.controls, folder=str(net.parent))
        self._config = replace(config, controls=controls)
        self._name = net.name
        self._folder = tempfile.TemporaryDirectory(dir="/dev/shm")
        self._service = ControlNetService(self._config, Path(self._folder.name) / "controls")
        facts = load_facts(config.model.path)
        self.version = ControlNets(self._config, facts).find(net.name, "").version

    def denoiser(self, fast: FastControl) -> ControlService:
        """A denoiser's end of it, which has had the ControlNet loaded.

        Args:
            fast: `[controls] fast`.
        """
        dtype = str(dtype_of(self._config)).removeprefix("torch.")
        calls, device = DirectCalls(self._service), torch.device("cpu")
        own = ControlService(calls, device, dtype, _PATIENCE_S, fast=fast)
        own.load(self._name, self.version, _PATIENCE_S)
        return own

    def close(self) -> None:
        self._service.close()
        self._folder.cleanup()
