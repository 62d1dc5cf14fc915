"""A ControlNet service: nets beside rows whose bases are in other processes (Katz §5).

Opens, closes and loads come by KServe calls, in any thread; asks come through the transport, and
one thread answers them, one after the other. Rows of one ask are packed together, just as their
denoiser would pack them, and never with another's: so residuals are the same bytes as in-process.
"""

from __future__ import annotations

import itertools
import logging
import os
import re
import selectors
import shutil
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace

from maskserve_core.config import Config
from maskserve_core.contracts.request import ResolvedControl
from maskserve_core.errors import EngineFailed, InvalidRequest, MaskserveError
from maskserve_core.files.sockets import short_path
from maskserve_core.worker.loading import Done, Loaded
from maskserve_core.worker.observations import Observations
from maskserve_core.worker.residency import Residency, Resource
from maskserve_engine.adapters.control_net_loader import (
    CONTROL_NETS,
    ControlNetLoader,
    NetFolder,
)
from maskserve_engine.control_link.opening import Opening
from maskserve_engine.control_link.slots import RowSlots, aligned
from maskserve_engine.control_link.transport import AddedPart, Answered, Ask, Connection, Lost
from maskserve_engine.families.adapter import Adapter
from maskserve_engine.families.control import NetBatch, NetStep, Residual
from maskserve_engine.families.registry import load_adapter
from maskserve_engine.requests.control_nets import EditControlNets
from maskserve_engine.stages.cpu_threads import limit_threads
from maskserve_engine.stages.loader import device_of, dtype_of

_log = logging.getLogger(__name__)
_LOOK_S = 0.2
_CONNECT_S = 60.0
"""In which a denoiser that attached connects, or its session is forgotten."""
_MOST_WAITING = 10_000
"""Loads that denoisers wait for; each has its own in one thread."""
_ROW_NAME = re.compile(r"[\w-]{1,200}")


@dataclass(slots=True, eq=False)
class _Row:
    own: Any
    """The family's."""
    slots: RowSlots
    nets: tuple[str, ...]


@dataclass(slots=True, eq=False)
class _Session:
    """Of one denoiser."""

    name: str
    opened: float
    rows: dict[str, _Row] = field(default_factory=dict)
    held: set[str] = field(default_factory=set)
    """Versions of ControlNets; each is held for `_owner` of it."""
    batch: tuple[int, NetBatch] | None = None
    """The number of the last ask's batch, and what was kept of it."""
    connected: bool = False


class ControlNetService:
    """Rows of several denoisers, and the ControlNets that they name.

    Args:
        config: of the service: `[model] device` is that of the nets.
        folder: for the socket and the slots; best in memory. Made anew.
        loader: brings ControlNets from `[controls] folder`.
        adapter: of the base's family; None: as the configuration says.
        connection: of a denoiser; a bench's is as slow as some network.
        ended: called where nobody can be answered any more; by itself it ends the process, which
            the supervisor notices.
    """

    def __init__(
        self,
        config: Config,
        folder: Path,
        loader: Callable[..., ControlNetLoader] = ControlNetLoader,
        adapter: Adapter | None = None,
        connection: Callable[[socket.socket], Connection] = Connection,
        ended: Callable[[], object] = lambda: os._exit(1),
    ) -> None:
        self._config, self._folder, self._connection = config, folder, connection
        self._device, self._dtype = device_of(config), dtype_of(config)
        self._adapter: Adapter = adapter or load_adapter(_shape_of(config))
        self._loader = loader(config, self._adapter.facts, self._brought)
        self._door = threading.Lock()
        """Before sessions and nets."""
        self._sessions: dict[str, _Session] = {}
        self._own: dict[str, Any] = {}
        """Version → a ControlNet on the device, as the family's rows take it."""
        self._residency = Residency(
            _MOST_WAITING, {CONTROL_NETS.name: config.controls.device_bytes}, self._dropped
        )
        self._nets = EditControlNets(self._residency, self._loader, self._came, Observations())
        self._waiting: dict[str, Done] = {}
        """By ticket, those whose ControlNet is being loaded."""
        self._names = itertools.count()
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True, mode=0o700)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._path = str(folder / "socket")
        with short_path(folder) as short:
            self._listener.bind(f"{short}/socket")
        self._listener.listen(64)
        self._stop = threading.Event()
        self._ended = ended
        self._turn_at = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="controlnets", daemon=True)
        self._thread.start()
        threading.Thread(target=self._watch, name="controlnets-watch", daemon=True).start()

    @property
    def problem(self) -> str:
        """Why nobody is answered any more; empty: all is well. One that is busy with a step for
        `[engine] stuck_timeout_s` does not come back.
        """
        if not self._thread.is_alive():
            return "its thread has ended"
        silent_s = time.monotonic() - self._turn_at
        if silent_s > self._config.engine.stuck_timeout_s:
            return f"its thread has been busy for {silent_s:.0f} s"
        return ""

    def close(self) -> None:
        self._stop.set()
        self._thread.join(10.0)
        self._loader.close()
        self._listener.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    # Called from any thread.

    def attach(self, dtype: str) -> dict[str, str]:
        """A session for a denoiser: its name, the socket to connect to, and the slots' folder.

        Raises:
            InvalidRequest: its numbers are of another type.
        """
        own = str(self._dtype).removeprefix("torch.")
        if dtype != own:
            raise InvalidRequest("OP.dtype", f"is {dtype}, and ControlNets run in {own} here", own)
        with self._door:
            now = time.monotonic()
            for each in list(self._sessions.values()):
                if not each.connected and now - each.opened > _CONNECT_S:
                    self._forget(each.name)
            name = f"{os.getpid()}-{next(self._names)}"
            self._sessions[name] = _Session(name, now)
        return {"session": name, "socket": self._path, "folder": str(self._folder)}

    def load(self, session: str, control: ResolvedControl, done: Done) -> None:
        """Hold a ControlNet for a denoiser, until it drops it or ends; `done` is told in any
        thread.

        Raises:
            MaskserveError: there is no such session, or no room.
        """
        with self._door:
            own, owner = self._session(session), _owner(session, control.version)
            wanted = self._nets.hold(owner, [control])
            own.held.add(control.version)
            ticket = f"{owner} {next(self._names)}"
            if self._residency.wait(ticket, wanted):
                self._waiting[ticket] = done
                return
            loaded = self._nets.loaded(control)
        done(loaded)

    def drop(self, session: str, version: str) -> None:
        """A denoiser needs a ControlNet no more; it stays until its room is wanted."""
        with self._door:
            self._session(session).held.discard(version)
            self._nets.let_go(_owner(session, version))

    def open(self, session: str, row: str, opening: Opening) -> None:
        """Take a row.

        Raises:
            MaskserveError: its name is none, there is no such session, or a ControlNet of it is not
                held.
        """
        if not _ROW_NAME.fullmatch(row):  # files have it
            raise InvalidRequest("OP.row", "is no name of a row", "letters, digits, - and _")
        with self._door:
            nets = {}
            for control in opening.facts.controls:
                if control.net not in self._own:
                    raise EngineFailed(f"the ControlNet service does not hold {control.net}")
                nets[control.net] = self._own[control.net]
            own = self._session(session)
        kept = {"cis", *[name for name, x in opening.arrays.items() if not x.is_floating_point()]}
        arrays = {
            # Copied: products of what lies at odd addresses round differently on CPUs.
            name: x.to(self._device, x.dtype if name in kept else self._dtype, copy=True)
            for name, x in opening.arrays.items()
        }
        with torch.inference_mode():
            made = self._adapter.net_row(Opening(opening.facts, arrays), nets)
        own.rows[row] = _Row(made, RowSlots(self._folder, row), tuple(nets))

    def close_row(self, session: str, row: str) -> None:
        with self._door:
            closed = self._session(session).rows.pop(row, None)
        if closed is not None:
            closed.slots.remove()

    def counts(self) -> dict[str, Any]:
        """What `health` says."""
        with self._door:
            sessions = list(self._sessions.values())
            rows = sum(len(each.rows) for each in sessions)
            return {"sessions": len(sessions), "rows": rows, "nets": len(self._own)}

    def _forget(self, name: str) -> _Session | None:
        """A session is over, and what it held may make room."""
        session = self._sessions.pop(name, None)
        for version in () if session is None else session.held:
            self._nets.let_go(_owner(name, version))
        return session

    def _session(self, name: str) -> _Session:
        found = self._sessions.get(name)
        if found is None:
            raise EngineFailed("the ControlNet service does not know this session any more")
        return found

    def _brought(self, version: str, folder: NetFolder) -> None:
        """In the loader's thread."""
        with torch.inference_mode():
            own = self._adapter.control_net(folder.read().to(self._device))
        with self._door:
            self._own[version] = own

    def _came(self, control: ResolvedControl, outcome: Loaded | MaskserveError) -> None:
        """Likewise."""
        with self._door:
            if isinstance(outcome, Loaded):
                tickets = self._nets.arrived(control, outcome)
            else:
                self._own.pop(control.version, None)
                tickets = self._nets.failed(control, outcome)
                for session in self._sessions.values():
                    if control.version in session.held:
                        session.held.discard(control.version)
                        self._nets.let_go(_owner(session.name, control.version))
            waiting = [self._waiting.pop(ticket) for ticket in tickets]
        for done in waiting:
            done(outcome)

    def _dropped(self, resource: Resource) -> None:
        """It has made room for another."""
        self._nets.dropped(resource)
        self._own.pop(resource.name, None)

    # The service's own thread

    def _run(self) -> None:
        limit_threads(self._config)
        selector = selectors.DefaultSelector()
        selector.register(self._listener, selectors.EVENT_READ)
        cuda = self._device.type == "cuda"
        there = torch.cuda.device(self._device) if cuda else nullcontext()
        with torch.inference_mode(), there:
            while not self._stop.is_set():
                for key, _ in selector.select(_LOOK_S):
                    self._turn_at = time.monotonic()
                    if key.fileobj is self._listener:
                        self._accept(selector)
                        continue
                    connection = key.fileobj
                    assert isinstance(connection, Connection)
                    try:
                        self._serve(connection)
                    except Exception as error:
                        known = isinstance(error, Lost)
                        _log.info("a session is over: %s", error, exc_info=not known)
                        selector.unregister(connection)
                        self._end(connection)
                self._turn_at = time.monotonic()
        for key in list(selector.get_map().values()):
            if isinstance(key.fileobj, Connection):
                key.fileobj.close()
        selector.close()

    def _accept(self, selector: selectors.BaseSelector) -> None:
        try:
            accepted = self._connection(self._listener.accept()[0])
        except OSError as error:  # it has gone away, or there are too many files
            _log.warning("a denoiser could not be let in: %s", error)
            self._stop.wait(_LOOK_S)
            return
        selector.register(accepted, selectors.EVENT_READ)

    def _watch(self) -> None:
        """In a thread of its own: a service that answers nobody ends, and is started again."""
        while not self._stop.wait(_LOOK_S):
            problem = self.problem
            if problem and not self._stop.is_set():
                _log.critical("the ControlNet service ends: %s", problem)
                self._ended()
                return

    def _end(self, connection: Connection) -> None:
        connection.close()
        with self._door:
            session = self._forget(connection.session)
        for row in () if session is None else session.rows.values():
            row.slots.remove()

    def _serve(self, connection: Connection) -> None:
        """Read one message, and answer it."""
        ask = connection.read()
        if ask is None:
            with self._door:
                session = self._sessions.get(connection.session)
                if session is None:
                    raise Lost("its session is not known")
                session.connected = True
            return
        try:
            self._answer(connection, ask)
        except Lost:
            raise
        except Exception as error:
            _log.exception("a step of %d rows failed", len(ask.rows))
            what = error.message if isinstance(error, MaskserveError) else type(error).__name__
            connection.send(Answered(ask.number, ended=True, error=what))

    def _answer(self, connection: Connection, ask: Ask) -> None:
        with self._door:
            session = self._session(connection.session)
            rows = {each.row: session.rows.get(each.row) for each in ask.rows}
        ends = dict.fromkeys(rows, 0)
        slots = {each.row: each.slot for each in ask.rows}
        steps = []
        for each in ask.rows:
            row = rows[each.row]
            if row is None:
                raise EngineFailed("a row was asked for that is not open")
            dtype = getattr(torch, each.dtype)
            sample = row.slots.ask(each.slot).read(0, each.shape, dtype).to(self._device)
            steps.append(NetStep(each.row, row.own, each.step, sample, each.computed))

        def send(residuals: Sequence[Residual]) -> None:
            parts = []
            for name, first, last, added in residuals:
                row, offset = rows[name], ends[name]
                assert row is not None
                row.slots.answer(slots[name]).write(offset, added)
                ends[name] = aligned(offset + added.nbytes)
                dtype = str(added.dtype).removeprefix("torch.")
                parts.append(AddedPart(name, first, last, offset, tuple(added.shape), dtype))
            connection.send(Answered(ask.number, tuple(parts)))

        if session.batch is None or session.batch[0] != ask.batch:
            session.batch = ask.batch, self._adapter.net_batch()
        session.batch[1].run(steps, send)
        connection.send(Answered(ask.number, ended=True))


def _owner(session: str, version: str) -> str:
    """Of what `Holdings` keeps for a session."""
    return f"{session} {version}"


def _shape_of(config: Config) -> Config:
    """Of the base: its shape alone, for nets are made to fit it."""
    model = replace(
        config.model,
        device="meta",
        dtype=str(dtype_of(config)).removeprefix("torch."),
        weights="bf16",
        gguf="",
        fuse_loras=(),
    )
    return replace(config, model=model)
