"""A ControlNet service in this process or in another one. KServe's calls reach it directly or
through a pipe; steps use its socket and slots, as in production.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from socket import socket
from typing import Any, Protocol

import msgspec
import torch
from msgspec.structs import replace

from maskserve_common.config import Config
from maskserve_common.contracts.request import ResolvedControl
from maskserve_common.errors import MaskserveError, Overloaded
from maskserve_common.resources.loading import Loaded
from maskserve_engine.control_link.opening import Opening
from maskserve_engine.control_link.services import ControlService, ControlServices
from maskserve_engine.control_link.transport import Connection as DenoiserConnection
from maskserve_engine.control_service.service import ControlNetService
from maskserve_engine.control_service.sessions import ServiceNetLoader
from maskserve_engine.families.specs import load_spec
from maskserve_engine.spec.control_nets import ControlNets, content_of
from maskserve_engine.stages.loader import dtype_of

PATIENCE_S = 120.0


class DirectCalls:
    """`control_link.served.ServiceCalls` to a service in this process."""

    def __init__(self, service: ControlNetService) -> None:
        self._service = service

    def call(self, op: dict[str, Any], arrays: bytes, limit_s: float) -> dict[str, Any]:
        sessions = self._service.sessions
        match op:
            case {"op": "attach"}:
                attached: dict[str, Any] = msgspec.to_builtins(sessions.attach(op["dtype"]))
                return attached
            case {"op": "load"}:
                outcomes: list[Loaded | MaskserveError] = []
                loaded_event = threading.Event()

                def done(outcome: Loaded | MaskserveError) -> None:
                    outcomes.append(outcome)
                    loaded_event.set()

                control = ResolvedControl(name=op["name"], version=op["version"])
                sessions.load(op["session"], control, done)
                loaded_event.wait(limit_s)
                [loaded] = outcomes
                if isinstance(loaded, MaskserveError):
                    raise loaded
                return {"digest": loaded.digest}
            case {"op": "open"}:
                sessions.open(op["session"], op["row"], Opening.unpacked(op["opening"], arrays))
            case {"op": "health"}:
                return sessions.counts()
            case {"op": "drop"}:
                sessions.drop(op["session"], op["version"])
            case {"op": "close"}:
                sessions.close_row(op["session"], op["row"])
        return {}

    def close(self) -> None:
        """Do nothing: the service belongs to its owner."""


class Family(Protocol):
    """The part of a family (`families.adapter.Adapter`) that the service needs, and the ControlNets
    that it loads. It is made in another process.
    """

    spec: Any

    def read(self) -> Any: ...

    def control_net(self, model: Any) -> Any: ...

    def net_row(self, opening: Opening, nets: Mapping[str, Any]) -> Any: ...

    def net_batch(self) -> Any: ...


class _Loader:
    """Makes the ControlNet instead of reading it (replaces `ControlNetLoader`)."""

    def __init__(self, family: Family, config: Config, spec: object, place: Any) -> None:
        self._family, self._place = family, place

    def device_bytes(self, control: ResolvedControl) -> int:
        return 0

    def typical_bytes(self) -> float:
        return 0.0

    def holds(self, control: ResolvedControl) -> bool:
        return True

    def load(self, control: ResolvedControl, done: Any) -> None:
        def load() -> None:
            self._place(control.version, self._family)
            done(Loaded("", 0, 0.0))

        threading.Thread(target=load).start()

    def close(self) -> None:
        """Do nothing: no file is open."""


def _serve(
    pipe: Connection,
    core: int | None,
    folder: str,
    family: Any,
    connection: Callable[[socket], DenoiserConnection],
    config: Config,
) -> None:
    """Run the process of a service until the pipe closes."""
    if core is not None:
        alone_on(core)
    loader: Any = ServiceNetLoader if family is None else partial(_Loader, family)
    service = ControlNetService(config, Path(folder), loader, family, connection)
    calls = DirectCalls(service)
    while True:
        try:
            op, arrays = pipe.recv()
        except (EOFError, ConnectionResetError):
            break
        pipe.send(calls.call(op, arrays, PATIENCE_S))
    service.close()


class PipeCalls:
    """`ServiceCalls` through a pipe, to the process `pid`."""

    def __init__(self, pipe: Connection, pid: int) -> None:
        self._pipe, self.pid, self._lock = pipe, pid, threading.Lock()

    def call(self, op: dict[str, Any], arrays: bytes, limit_s: float) -> dict[str, Any]:
        with self._lock:
            try:
                self._pipe.send((op, arrays))
                reply: dict[str, Any] = self._pipe.recv()
            except (EOFError, OSError) as error:
                raise Overloaded("the ControlNet service does not answer") from error
            return reply

    def close(self) -> None:
        self._pipe.close()


@contextmanager
def service_process(
    family: Family | None,
    core: int | None = None,
    connection: Callable[[socket], DenoiserConnection] = DenoiserConnection,
    config: Config = Config(),  # noqa: B008
) -> Iterator[PipeCalls]:
    """Run a process with a service while the context lasts.

    Args:
        family: family of its ControlNets; None: that of the configured model, with the nets in
            `[controls] folder`.
        core: core of its own for the process; None: any core.
        connection: class of a denoiser's connection.
        config: configuration of the service.
    """
    parent_pipe, child_pipe = multiprocessing.Pipe()
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        arguments = child_pipe, core, folder, family, connection, config
        spawned = multiprocessing.get_context("spawn").Process(
            target=_serve, args=arguments, daemon=True
        )
        spawned.start()
        child_pipe.close()
        assert spawned.pid is not None
        calls = PipeCalls(parent_pipe, spawned.pid)
        try:
            yield calls
        finally:
            calls.close()
            spawned.join(30)


def alone_on(core: int) -> None:
    """Make this process compute with one thread, on this core."""
    os.sched_setaffinity(0, {core})
    torch.set_num_threads(1)


class LocalService:
    """A service of one ControlNet in this process.

    Args:
        config: configuration of the base model's worker.
        net: the ControlNet's folder.
    """

    def __init__(self, config: Config, net: Path) -> None:
        controls = replace(config.controls, folder=str(net.parent))
        self._config = replace(config, controls=controls)
        self._name = net.name
        self._folder = tempfile.TemporaryDirectory(dir="/dev/shm")
        self._service = ControlNetService(self._config, Path(self._folder.name) / "controls")
        spec = load_spec(config.model.path)
        self.version = ControlNets(self._config, spec).find(net.name, "").version
        self._content = content_of(net)

    def denoiser(self) -> ControlServices:
        """Return a denoiser's end of the service, with the ControlNet loaded."""
        dtype = str(dtype_of(self._config)).removeprefix("torch.")
        calls, device = DirectCalls(self._service), torch.device("cpu")
        service = ControlService(calls, device, dtype, PATIENCE_S)
        services = ControlServices.of(service)
        services.load(self._name, self.version, self._content, PATIENCE_S)
        return services

    def close(self) -> None:
        self._service.close()
        self._folder.cleanup()
