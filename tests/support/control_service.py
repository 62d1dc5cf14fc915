"""A ControlNet service in this process, called through its Triton front and its socket."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from msgspec.structs import replace

from maskserve_common.config import Config
from maskserve_common.errors import EngineFailed, MaskserveError, Overloaded, split_code
from maskserve_engine.control_link.network import NetworkMessages
from maskserve_engine.control_link.services import ControlService, ControlServices
from maskserve_engine.control_link.transport import Attached, Messages, SocketMessages
from maskserve_engine.families.specs import load_spec
from maskserve_engine.spec.control_nets import ControlNets, content_of
from maskserve_triton.controlnet import ControlNetFrontend
from tests.fakes.jobs import config_of
from tests.fakes.pb_utils import FakeTriton


class DirectCalls:
    """`ServiceCalls` of a front in this process."""

    def __init__(self, front: ControlNetFrontend, triton: FakeTriton) -> None:
        self._front, self._triton = front, triton
        self.ops: list[str] = []

    def call(self, op: dict[str, Any], arrays: bytes, limit_s: float) -> dict[str, Any]:
        self.ops.append(op["op"])
        tensors: dict[str, Any] = {"OP": json.dumps(op).encode()}
        if arrays:
            tensors["ARRAYS"] = np.frombuffer(arrays, np.uint8)
        request = self._triton.request("", **tensors)
        self._front.execute([request])
        answer = request.sender.wait(limit_s)
        if answer.has_error():
            code, message = split_code(answer.error().message())  # type: ignore[union-attr]
            kind: Callable[[str], MaskserveError] = (
                Overloaded if code == Overloaded.code else EngineFailed
            )
            raise kind(message)
        document: dict[str, Any] = json.loads(answer.text("RESULT"))
        return document

    def close(self) -> None:
        """Close nothing: there are no resources."""


def over_tcp(attached: Attached) -> Messages:
    """Connect like a denoiser on another host."""
    return NetworkMessages("127.0.0.1", attached)


class Service:
    """Random ControlNets in a folder, and a service for them.

    Args:
        model: folder of the base.
        folder: an empty folder for ControlNets and slots.
        nets: by name.
    """

    def __init__(self, model: Path, folder: Path, nets: dict[str, Any], **controls: Any) -> None:
        for name, net in nets.items():
            net.save_pretrained(folder / "nets" / name)
        options = {"folder": str(folder / "nets"), "listen": "127.0.0.1:0", **controls}
        config = config_of(model, controls=options)
        self.folder = folder / "run"
        self.config: Config = replace(config, runtime_dir=str(self.folder))
        self.triton = FakeTriton()
        self.front = ControlNetFrontend(self.triton, self.config)
        control_nets = ControlNets(self.config, load_spec(str(model)))
        finds = [control_nets.find(name, "x") for name in nets]
        self.versions = {find.name: find.version for find in finds}
        self.contents = {find.name: content_of(find.path) for find in finds}

    def denoiser(
        self,
        patience_s: float = 10.0,
        connect: Callable[[Attached], Messages] = SocketMessages,
    ) -> ControlServices:
        """A new denoiser's session that has loaded all ControlNets."""
        calls = DirectCalls(self.front, self.triton)
        device = torch.device("cpu")
        service = ControlService(calls, device, "float32", patience_s, connect)
        services = ControlServices.of(service)
        for name in self.versions:
            self.load(services, name)
        return services

    def load(self, denoiser: ControlServices | ControlService, name: str) -> None:
        denoiser.load(name, self.versions[name], self.contents[name], 60.0)

    def close(self) -> None:
        self.front.close()
        assert not self.triton.violations
