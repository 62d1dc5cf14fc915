"""From a ControlNet's name to the executor that runs it, off the engine's thread."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch

from maskserve_core.config import Config
from maskserve_core.contracts.request import ResolvedControl
from maskserve_core.errors import EngineFailed, InvalidRequest, MaskserveError, Overloaded
from maskserve_core.models.control_nets import ControlNets, KnownControlNet, version_of
from maskserve_core.models.facts import ModelFacts
from maskserve_engine.stages.cpu_threads import one_cpu_thread
from maskserve_engine.stages.loader import dtype_of

_log = logging.getLogger(__name__)
_FIELD = "SETTINGS.controls"


class LoadedNet(NamedTuple):
    """A ControlNet that rows can be stepped with."""

    name: str
    digest: str
    """sha256 of its files of weights, one after the other."""
    seconds: float
    """From when it was asked for."""


class NetFolder(NamedTuple):
    """A ControlNet as it lies in a folder: what processes tell one another of it."""

    name: str
    kind: str
    """Its class in diffusers."""
    path: Path
    version: str
    """As `KnownControlNet.version`."""
    dtype: torch.dtype
    """Of the served model."""

    def read(self) -> Any:
        """Diffusers' own model, in eval mode, in host memory.

        Raises:
            Overloaded: the folder has another net now.
        """
        if version_of(self.path) != self.version:
            raise Overloaded(
                f"{_FIELD}: ControlNet {self.name} has just been replaced; send the edit again"
            )
        return self._class.from_pretrained(
            self.path, torch_dtype=self.dtype, use_safetensors=True, local_files_only=True
        ).eval()

    def shape(self) -> Any:
        """The same without weights."""
        with torch.device("meta"):
            return self._class.from_config(self._class.load_config(self.path)).eval()

    @property
    def _class(self) -> Any:
        import diffusers  # here: a process first says which libraries it has no use for

        return getattr(diffusers, self.kind)


Bring = Callable[[str, NetFolder], None]
"""`Executor.bring_net`."""


class ControlNetLoader:
    """Has the executor read folders, one at a time.

    Args:
        config: of the worker.
        facts: of the served model.
        bring: reads a net, whose name is its version; from any thread.
    """

    def __init__(self, config: Config, facts: ModelFacts, bring: Bring) -> None:
        self._config, self._facts, self._bring = config, facts, bring
        self._nets = ControlNets(config, facts)
        self._pool = ThreadPoolExecutor(1, "controlnets")

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def device_bytes(self, control: ResolvedControl) -> int:
        """That it takes on the device.

        Raises:
            MaskserveError: it is not served, or no longer.
        """
        net = self._nets.find(control.name, _FIELD)
        return net.numbers * dtype_of(self._config).itemsize

    def typical_bytes(self) -> float:
        """On the device, of one of the folder, on average; 0: it has none."""
        itemsize = dtype_of(self._config).itemsize
        sizes = [net.numbers * itemsize for net in self._nets.all() if not net.problem]
        return sum(sizes) / len(sizes) if sizes else 0.0

    def config(self, control: ResolvedControl) -> Mapping[str, Any]:
        """Its config.json. From any thread.

        Raises:
            MaskserveError: it is not served, or no longer.
        """
        return self._nets.find(control.name, _FIELD).config

    def holds(self, control: ResolvedControl) -> bool:
        """Whether what was loaded is there still."""
        return True

    def load(
        self, control: ResolvedControl, done: Callable[[LoadedNet | MaskserveError], None]
    ) -> None:
        """Have it loaded; `done` is told in another thread what became of it."""
        self._pool.submit(self._load, control, done, time.monotonic())

    def _load(
        self,
        control: ResolvedControl,
        done: Callable[[LoadedNet | MaskserveError], None],
        begin: float,
    ) -> None:
        try:
            net = self._nets.find(control.name, _FIELD)
            if net.version != control.version:
                raise Overloaded(
                    f"{_FIELD}: ControlNet {control.name} has just been replaced; "
                    "send the edit again"
                )
            digest = self._loaded(net)
            done(LoadedNet(net.name, digest, time.monotonic() - begin))
        except MaskserveError as error:
            done(error)
        except ValueError as error:
            done(InvalidRequest(_FIELD, f"ControlNet {control.name}: {error}"))
        except MemoryError as error:
            _log.warning("ControlNet %s could not be loaded: %s", control.name, error)
            done(Overloaded(f"{_FIELD}: there is no memory for ControlNet {control.name} now"))
        except Exception:
            _log.exception("ControlNet %s could not be loaded", control.name)
            done(EngineFailed(f"{_FIELD}: ControlNet {control.name} could not be loaded"))

    def _loaded(self, net: KnownControlNet) -> str:
        """Have it brought; its digest."""
        kind, dtype = self._facts.control.net, dtype_of(self._config)
        with one_cpu_thread():
            self._bring(net.version, NetFolder(net.name, kind, net.path, net.version, dtype))
        return _digest(net.path)


def _digest(folder: Path) -> str:
    digest = hashlib.sha256()
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb") as opened:
            while piece := opened.read(2**20):
                digest.update(piece)
    return digest.hexdigest()
