"""The thread of a ControlNet service: it answers the denoisers' requests one after the other.

It packs the rows of a request as their denoiser would pack them, and never together with rows of
another request. So residuals have the same bytes as if the denoiser ran the nets itself.
"""

from __future__ import annotations

import logging
import os
import selectors
import shutil
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path

import torch
from msgspec.structs import replace

from maskserve_common.config import Config, ConfigError
from maskserve_common.errors import MaskserveError
from maskserve_common.files.sockets import short_path
from maskserve_engine.adapters.control_net_loader import ControlNetLoader
from maskserve_engine.control_link.device_memory import lent_block
from maskserve_engine.control_link.slots import aligned
from maskserve_engine.control_link.transport import (
    AddedPart,
    Answered,
    Connection,
    Lost,
    ResidualsRequest,
)
from maskserve_engine.control_service.remote import RemoteDenoisers
from maskserve_engine.control_service.sessions import DenoiserSessions, ServiceNetLoader
from maskserve_engine.families.adapter import Adapter
from maskserve_engine.families.control import NetStep, Residual
from maskserve_engine.families.registry import load_adapter
from maskserve_engine.stages.cpu_threads import limit_threads
from maskserve_engine.stages.loader import device_of, dtype_of

_log = logging.getLogger(__name__)
_POLL_S = 0.2


class ControlNetService:
    """Answers requests of several denoisers; `sessions` has their state.

    Args:
        config: configuration of the service; `[model] device` is the nets' device.
        folder: folder of the socket and the slots, best in memory; emptied at start.
        loader: loads ControlNets from `[controls] folder`.
        adapter: adapter of the base's family; None: the configured one.
        connection: makes the connection of a denoiser; benchmarks make one as slow as a network.
        ended: called when the service cannot answer any more; by default it ends the process, which
            the supervisor then restarts.

    Raises:
        ConfigError: it cannot listen at the configured address.
    """

    def __init__(
        self,
        config: Config,
        folder: Path,
        loader: Callable[..., ControlNetLoader] = ServiceNetLoader,
        adapter: Adapter | None = None,
        connection: Callable[[socket.socket], Connection] = Connection,
        ended: Callable[[], object] = lambda: os._exit(1),
    ) -> None:
        self._config, self._folder, self._connection = config, folder, connection
        self._device = device_of(config)
        self._adapter: Adapter = adapter or load_adapter(_shapes_config(config))
        remote = _listener(config.controls.listen)
        port = 0 if remote is None else remote.getsockname()[1]
        self._lent = lent_block(config.controls.ipc_bytes, self._device)
        self.sessions = DenoiserSessions(
            config, folder, str(folder / "socket"), port, loader, self._adapter, self._lent
        )
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True, mode=0o700)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with short_path(folder) as short:
            self._listener.bind(f"{short}/socket")
        self._listener.listen(64)
        self._stop = threading.Event()
        self._ended = ended
        self._turn_began_at = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="controlnets", daemon=True)
        self._thread.start()
        self.remote = None if remote is None else RemoteDenoisers(remote, self.sessions)
        threading.Thread(target=self._watch, name="controlnets-watch", daemon=True).start()

    @property
    def problem(self) -> str:
        """Reason why the service answers no more; empty: it answers. If a step has taken `[engine]
        stuck_timeout_s`, the service will not recover.
        """
        if not self._thread.is_alive():
            return "its thread has ended"
        silent_s = time.monotonic() - self._turn_began_at
        if silent_s > self._config.engine.stuck_timeout_s:
            return f"its thread has been busy for {silent_s:.0f} s"
        return ""

    def close(self) -> None:
        self._stop.set()
        if self.remote is not None:
            self.remote.close()
        self._thread.join(10.0)
        self.sessions.close()
        self._listener.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _run(self) -> None:
        limit_threads(self._config)
        selector = selectors.DefaultSelector()
        selector.register(self._listener, selectors.EVENT_READ)
        cuda = self._device.type == "cuda"
        device_context = torch.cuda.device(self._device) if cuda else nullcontext()
        with torch.inference_mode(), device_context:
            while not self._stop.is_set():
                for key, _ in selector.select(_POLL_S):
                    self._turn_began_at = time.monotonic()
                    if key.fileobj is self._listener:
                        self._accept(selector)
                        continue
                    connection = key.fileobj
                    assert isinstance(connection, Connection)
                    try:
                        self._serve(connection)
                    except Exception as error:
                        is_lost = isinstance(error, Lost)
                        _log.info("a session is over: %s", error, exc_info=not is_lost)
                        selector.unregister(connection)
                        self._end(connection)
                self._turn_began_at = time.monotonic()
        for key in list(selector.get_map().values()):
            if isinstance(key.fileobj, Connection):
                key.fileobj.close()
        selector.close()

    def _accept(self, selector: selectors.BaseSelector) -> None:
        try:
            accepted = self._connection(self._listener.accept()[0])
        except OSError as error:  # the denoiser has left, or there are too many files
            _log.warning("a denoiser could not be let in: %s", error)
            self._stop.wait(_POLL_S)
            return
        selector.register(accepted, selectors.EVENT_READ)

    def _watch(self) -> None:
        """End a service that answers no more, so that it is restarted; has a thread of its own."""
        while not self._stop.wait(_POLL_S):
            problem = self.problem
            if problem and not self._stop.is_set():
                _log.critical("the ControlNet service ends: %s", problem)
                self._ended()
                return

    def _end(self, connection: Connection) -> None:
        connection.close()
        self.sessions.end(connection.session)

    def _serve(self, connection: Connection) -> None:
        request = connection.read()
        if request is None:
            if not self.sessions.connected(connection.session):
                raise Lost("its session is not known")
            return
        try:
            self._answer(connection, request)
        except Lost:
            raise
        except Exception as error:
            _log.exception("a step of %d rows failed", len(request.rows))
            message = error.message if isinstance(error, MaskserveError) else type(error).__name__
            connection.send(Answered(request.number, ended=True, error=message))

    def _answer(self, connection: Connection, request: ResidualsRequest) -> None:
        session, rows = self.sessions.rows(
            connection.session, [requested.row for requested in request.rows]
        )
        block = self._lent if request.lent else None
        targets = [(requested.row, requested.slot) for requested in request.rows]
        ends = [0] * len(request.rows)
        steps = []
        for requested in request.rows:
            row = rows[requested.row]
            dtype = getattr(torch, requested.dtype)
            sample = (
                row.slots.request(requested.slot).read(0, requested.shape, dtype).to(self._device)
            )
            steps.append(
                NetStep(
                    row.family_row, requested.step, sample, requested.computed, requested.lookahead
                )
            )
            if block is not None:
                block.clear(requested.row, requested.slot)

        def send(residuals: Sequence[Residual]) -> None:
            parts = []
            for number, first, last, added in residuals:
                name, slot = targets[number]
                place = None if block is None else block.put(name, slot, added)
                offset = ends[number] if place is None else place
                if place is None:
                    rows[name].slots.answer(slot).write(offset, added)
                    ends[number] = aligned(offset + added.nbytes)
                dtype, lent = str(added.dtype).removeprefix("torch."), place is not None
                shape = tuple(added.shape)
                parts.append(AddedPart(name, first, last, slot, offset, shape, dtype, lent))
            if block is not None:
                block.flush()
            connection.send(Answered(request.number, tuple(parts)))

        if session.batch is None or session.batch[0] != request.batch:
            session.batch = request.batch, self._adapter.net_batch()
        session.batch[1].run(steps, send)
        connection.send(Answered(request.number, ended=True))


def _listener(address: str) -> socket.socket | None:
    """Listen for denoisers of other hosts at HOST:PORT; None: no address is configured.

    Raises:
        ConfigError: the address cannot be used.
    """
    if not address:
        return None
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, int(port)), family=family, backlog=64)
    except (OSError, ValueError, OverflowError) as error:
        raise ConfigError(f"[controls] listen: {address!r} cannot be used: {error}") from None


def _shapes_config(config: Config) -> Config:
    """Return the configuration of the base model without weights (device `meta`): the nets must fit
    its shapes.
    """
    model = replace(
        config.model,
        device="meta",
        dtype=str(dtype_of(config)).removeprefix("torch."),
        weights="bf16",
        gguf="",
        fuse_loras=(),
    )
    return replace(config, model=model)
