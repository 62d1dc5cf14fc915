"""The state of a service: denoisers, their rows, and the ControlNets that these name.

KServe calls open and close rows and load ControlNets, in any thread.
"""

from __future__ import annotations

import itertools
import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from maskserve_common.config import Config
from maskserve_common.contracts.request import ResolvedControl
from maskserve_common.errors import EngineFailed, InvalidRequest, MaskserveError
from maskserve_common.observations import Observations
from maskserve_common.resources.loading import Done, Loaded
from maskserve_common.resources.resource_states import Resource, ResourceStates
from maskserve_engine.adapters.control_net_loader import (
    CONTROL_NETS,
    ControlNetLoader,
    NetFolder,
)
from maskserve_engine.control_link.device_memory import LentBlock
from maskserve_engine.control_link.opening import Opening
from maskserve_engine.control_link.slots import RowSlots
from maskserve_engine.control_link.transport import Attached
from maskserve_engine.families.adapter import Adapter
from maskserve_engine.families.control import NetBatch
from maskserve_engine.requests.control_nets import EditControlNets
from maskserve_engine.spec.control_nets import KnownControlNet, content_of
from maskserve_engine.stages.loader import device_of, dtype_of

_CONNECT_S = 60.0
"""Seconds in which an attached denoiser must connect, or its session is forgotten."""
_MOST_WAITING = 10_000
"""Most loads that denoisers wait for; each has one thread."""
_ROW_NAME = re.compile(r"[\w-]{1,200}")


class ServiceNetLoader(ControlNetLoader):
    """Loader of nets that workers name; workers may have other folders."""

    def _check(self, net: KnownControlNet, item: ResolvedControl) -> None:
        """Compare the contents of the files: times of files on another host differ."""
        if content_of(net.path) != item.version:
            raise EngineFailed(
                f"{CONTROL_NETS.setting}: the ControlNet service's host {socket.gethostname()} has "
                f"another version of ControlNet {net.name} than the worker's host"
            )


@dataclass(slots=True, eq=False)
class OpenRow:
    family_row: Any
    slots: RowSlots
    nets: tuple[str, ...]


@dataclass(slots=True, eq=False)
class DenoiserSession:
    name: str
    opened: float
    key: str
    """Secret of the session (`transport.Attached.key`)."""
    rows: dict[str, OpenRow] = field(default_factory=dict)
    versions: set[str] = field(default_factory=set)
    """Versions of the ControlNets that the session uses."""
    batch: tuple[int, NetBatch] | None = None
    """Number of the last request's batch, and the state kept of it."""
    connected: bool = False


class DenoiserSessions:
    """Rows of several denoisers, and the ControlNets on the device.

    Args:
        config: configuration of the service; `[model] device` is the nets' device.
        folder: folder of the rows' slots.
        socket: socket in that folder for denoisers of this host.
        port: port for denoisers of other hosts; 0: none may connect.
        loader: loads ControlNets from `[controls] folder`.
        lent: device memory lent to denoisers, for residuals.
    """

    def __init__(
        self,
        config: Config,
        folder: Path,
        socket: str,
        port: int,
        loader: Callable[..., ControlNetLoader],
        adapter: Adapter,
        lent: LentBlock | None = None,
    ) -> None:
        self._folder, self._socket, self._port = folder, socket, port
        self._adapter, self._lent = adapter, lent
        self._device, self._dtype = device_of(config), dtype_of(config)
        self._loader = loader(config, adapter.spec, self._load_now)
        self._lock = threading.Lock()
        """Guards sessions and nets."""
        self._sessions: dict[str, DenoiserSession] = {}
        self.family_nets: dict[str, Any] = {}
        """ControlNets on the device, by version, in the family's form."""
        self.resource_states = ResourceStates(
            _MOST_WAITING, {CONTROL_NETS.name: config.controls.device_bytes}, self._dropped
        )
        self._nets = EditControlNets(
            self.resource_states, self._loader, self._on_loaded, Observations()
        )
        self._waiting: dict[str, Done] = {}
        """Callbacks of pending loads, by ticket."""
        self._names = itertools.count()

    def close(self) -> None:
        self._loader.close()

    def attach(self, dtype: str) -> Attached:
        """Return a new session for a denoiser.

        Raises:
            InvalidRequest: its data type is another one.
        """
        dtype_name = str(self._dtype).removeprefix("torch.")
        if dtype != dtype_name:
            raise InvalidRequest(
                "OP.dtype", f"is {dtype}, and ControlNets run in {dtype_name} here", dtype_name
            )
        with self._lock:
            self._forget_unconnected()
            name = f"{os.getpid()}-{next(self._names)}"
            self._sessions[name] = DenoiserSession(name, time.monotonic(), secrets.token_hex())
        return self.attached(name)

    def attached(self, name: str) -> Attached:
        """Return the data that the session's denoiser was given.

        Raises:
            EngineFailed: there is no such session.
        """
        lent = None if self._lent is None else self._lent.lent
        with self._lock:
            return Attached(name, self._socket, self._port, self._session(name).key, lent)

    def load(self, session: str, control: ResolvedControl, done: Done) -> None:
        """Hold a ControlNet for a denoiser, until the denoiser drops it or ends; `done` is called
        in any thread.

        Raises:
            MaskserveError: there is no such session, or no room.
        """
        with self._lock:
            denoiser, owner = self._session(session), _owner(session, control.version)
            resources = self._nets.hold(owner, [control])
            denoiser.versions.add(control.version)
            ticket = f"{owner} {next(self._names)}"
            if self.resource_states.wait(ticket, resources):
                self._waiting[ticket] = done
                return
            loaded = self._nets.loaded(control)
        done(loaded)

    def drop(self, session: str, version: str) -> None:
        """Release a denoiser's ControlNet; it stays loaded until its room is needed."""
        with self._lock:
            self._session(session).versions.discard(version)
            self._nets.release(_owner(session, version))

    def open(self, session: str, row: str, opening: Opening) -> None:
        """Open a row.

        Raises:
            MaskserveError: its name is invalid, there is no such session, or it names a ControlNet
                that the service does not hold for it.
        """
        if not _ROW_NAME.fullmatch(row):  # files are named by it
            raise InvalidRequest("OP.row", "is not the name of a row", "letters, digits, - and _")
        with self._lock:
            nets = {}
            for control in opening.spec.controls:
                if control.net not in self.family_nets:
                    raise EngineFailed(f"the ControlNet service does not hold {control.net}")
                nets[control.net] = self.family_nets[control.net]
            denoiser = self._session(session)
        arrays = {
            # Copied, because products of unaligned tensors round differently on CPUs.
            name: x.to(self._device, x.dtype if name == "cis" else self._dtype, copy=True)
            if x.is_floating_point()
            else x
            for name, x in opening.arrays.items()
        }
        with torch.inference_mode():
            net_row = self._adapter.net_row(Opening(opening.spec, arrays), nets)
        if self._lent is not None:
            self._lent.open(row)
        denoiser.rows[row] = OpenRow(net_row, RowSlots.shared(self._folder, row), tuple(nets))

    def close_row(self, session: str, row: str) -> None:
        with self._lock:
            closed = self._session(session).rows.pop(row, None)
        if closed is not None:
            self._remove(row, closed, read=True)

    def counts(self) -> dict[str, Any]:
        """Return the numbers of sessions, rows and nets, for `health`."""
        with self._lock:
            self._forget_unconnected()
            sessions = list(self._sessions.values())
            rows = sum(len(session.rows) for session in sessions)
            return {"sessions": len(sessions), "rows": rows, "nets": len(self.family_nets)}

    def connected(self, name: str) -> bool:
        """Note that a denoiser has connected; return False if its session is not known."""
        with self._lock:
            session = self._sessions.get(name)
            if session is not None:
                session.connected = True
            return session is not None

    def rows(self, name: str, rows: Sequence[str]) -> tuple[DenoiserSession, dict[str, OpenRow]]:
        """Return a session, and these rows of it.

        Raises:
            EngineFailed: there is no such session, or such a row is not open.
        """
        with self._lock:
            session = self._session(name)
            try:
                return session, {row: session.rows[row] for row in rows}
            except KeyError:
                raise EngineFailed("a row was asked for that is not open") from None

    def end(self, name: str) -> None:
        """End the session of a denoiser that has left, with its rows."""
        with self._lock:
            session = self._forget(name)
        for name, row in () if session is None else session.rows.items():
            self._remove(name, row, read=False)

    def _remove(self, name: str, row: OpenRow, *, read: bool) -> None:
        """Free the row's slots and lent memory; `read`: whether its denoiser has said that it reads
        no more of it.
        """
        row.slots.remove()
        if self._lent is not None:
            self._lent.close(name, read=read)

    def _forget_unconnected(self) -> None:
        """Forget sessions that no denoiser has connected to: over a broken link a denoiser may
        never learn its name.
        """
        last = time.monotonic() - _CONNECT_S
        for session in list(self._sessions.values()):
            if not session.connected and session.opened < last:
                self._forget(session.name)

    def _forget(self, name: str) -> DenoiserSession | None:
        session = self._sessions.pop(name, None)
        for version in () if session is None else session.versions:
            self._nets.release(_owner(name, version))
        return session

    def _session(self, name: str) -> DenoiserSession:
        session = self._sessions.get(name)
        if session is None:
            raise EngineFailed("the ControlNet service does not know this session any more")
        return session

    def _load_now(self, version: str, folder: NetFolder) -> None:
        """Put a loaded ControlNet on the device; called in the loader's thread."""
        with torch.inference_mode():
            device_net = self._adapter.control_net(folder.read().to(self._device))
        with self._lock:
            self.family_nets[version] = device_net

    def _on_loaded(self, control: ResolvedControl, outcome: Loaded | MaskserveError) -> None:
        """Account for a load that has ended; called in the loader's thread."""
        with self._lock:
            if isinstance(outcome, Loaded):
                tickets = self._nets.record_arrival(control, outcome)
            else:
                self.family_nets.pop(control.version, None)
                tickets = self._nets.record_failure(control, outcome)
                for session in self._sessions.values():
                    if control.version in session.versions:
                        session.versions.discard(control.version)
                        self._nets.release(_owner(session.name, control.version))
            waiting = [self._waiting.pop(ticket) for ticket in tickets]
        for on_loaded in waiting:
            on_loaded(outcome)

    def _dropped(self, resource: Resource) -> None:
        """Remove a ControlNet that was evicted to make room."""
        self._nets.record_eviction(resource)
        self.family_nets.pop(resource.name, None)


def _owner(session: str, version: str) -> str:
    """Return the owner's name under which `ResourceCache` keeps a net for a session."""
    return f"{session} {version}"
