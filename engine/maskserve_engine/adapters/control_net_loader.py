"""Loads ControlNets by name into the executor, off the engine's thread."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from maskserve_common.config import Config
from maskserve_common.contracts.request import ResolvedControl
from maskserve_common.contracts.status_record import LoadCost, NodeStatus
from maskserve_common.errors import InvalidRequest, MaskserveError, Overloaded
from maskserve_common.files.weight_files import weight_files
from maskserve_common.resources.loading import Kind, Loaded, ResourceLoader
from maskserve_engine.spec.control_nets import ControlNets, KnownControlNet, version_of
from maskserve_engine.spec.model_spec import ModelSpec
from maskserve_engine.stages.cpu_threads import one_cpu_thread
from maskserve_engine.stages.loader import dtype_of

_log = logging.getLogger(__name__)


CONTROL_NETS = Kind(
    "controlnet",
    "ControlNet",
    "SETTINGS.controls",
    "[controls] device_bytes",
    "controlnet",
    # Reading a folder of the host, and a copy to the device.
    MappingProxyType({"storage": LoadCost(0.5, 1e-9)}),
)


class NetFolder(NamedTuple):
    """A ControlNet in a folder; processes exchange this description."""

    name: str
    kind: str
    path: Path
    version: str
    dtype: torch.dtype

    def read(self) -> Any:
        """Load diffusers' model, in eval mode, in host memory.

        Raises:
            Overloaded: the folder contains another net by now.
        """
        if version_of(self.path) != self.version:
            raise _replaced(self.name)
        return self._class.from_pretrained(
            self.path,
            torch_dtype=self.dtype,
            variant=weight_files(self.path).variant or None,
            use_safetensors=True,
            local_files_only=True,
        ).eval()

    def shape(self) -> Any:
        with torch.device("meta"):
            return self._class.from_config(self._class.load_config(self.path)).eval()

    @property
    def _class(self) -> Any:
        import diffusers  # a process first excludes libraries that it does not use

        return getattr(diffusers, self.kind)


Place = Callable[[str, NetFolder], None]


class ControlNetLoader(ResourceLoader[ResolvedControl]):
    """Makes the executor read folders, one at a time.

    Args:
        config: configuration of the worker.
        spec: spec of the served model.
        place: reads a net, by the requested version; thread-safe.
    """

    def __init__(self, config: Config, spec: ModelSpec, place: Place) -> None:
        super().__init__(CONTROL_NETS)
        self._config, self._spec, self._place = config, spec, place
        self._nets = ControlNets(config, spec)

    def device_bytes(self, control: ResolvedControl) -> int:
        """Return the net's bytes on the device.

        Raises:
            MaskserveError: it is not served, or no longer.
        """
        return self._device_bytes(self._nets.find(control.name, CONTROL_NETS.setting))

    def typical_bytes(self) -> float:
        """Return the average device memory, in bytes, of the folder's ControlNets; 0: it has
        none.
        """
        sizes = [self._device_bytes(net) for net in self._nets.all() if not net.problem]
        return sum(sizes) / len(sizes) if sizes else 0.0

    def config(self, control: ResolvedControl) -> Mapping[str, Any]:
        """Return its config.json. Thread-safe.

        Raises:
            MaskserveError: it is not served, or no longer.
        """
        return self._nets.find(control.name, CONTROL_NETS.setting).config

    def holds(self, control: ResolvedControl) -> bool:
        """Return whether a loaded net is still there: always."""
        return True

    def services(self) -> tuple[NodeStatus, ...]:
        """Return the services that run the nets: none."""
        return ()

    def _load_now(self, item: ResolvedControl, begin: float) -> Loaded:
        net = self._nets.find(item.name, CONTROL_NETS.setting)
        self._check(net, item)
        try:
            digest = self._loaded(net, item)
        except ValueError as error:  # in a sentence of its own
            raise InvalidRequest(CONTROL_NETS.setting, f"ControlNet {net.name}: {error}") from error
        nbytes = self._device_bytes(net)
        return Loaded(digest, nbytes, time.monotonic() - begin, nbytes)

    def _check(self, net: KnownControlNet, item: ResolvedControl) -> None:
        """Raise MaskserveError if the folder's net is not the one that the edit named."""
        if net.version != item.version:
            raise _replaced(net.name)

    def _device_bytes(self, net: KnownControlNet) -> int:
        return net.numbers * dtype_of(self._config).itemsize

    def _loaded(self, net: KnownControlNet, item: ResolvedControl) -> str:
        takes = self._spec.control
        assert takes is not None, "the net would have been refused"
        kind, dtype = takes.net, dtype_of(self._config)
        with one_cpu_thread():
            self._place(item.version, NetFolder(net.name, kind, net.path, net.version, dtype))
        return _digest(net.path)


def _replaced(name: str) -> MaskserveError:
    return Overloaded(
        f"{CONTROL_NETS.setting}: ControlNet {name} has just been replaced; send the edit again"
    )


def _digest(folder: Path) -> str:
    digest = hashlib.sha256()
    for file in weight_files(folder).files:
        with file.open("rb") as handle:
            while piece := handle.read(2**20):
                digest.update(piece)
    return digest.hexdigest()
