"""Denoisers of other hosts: for the service each is one of its own host, which sits here and passes
on what comes and goes over the link (`control_link.network`).

So a slow link holds up nobody but its denoiser, and the service knows of one way alone.
"""

from __future__ import annotations

import logging
import socket
import threading
from contextlib import suppress

import msgspec
import torch
from msgspec.structs import replace

from maskserve_core.errors import EngineFailed
from maskserve_engine.control_link.network import Wire, room_for
from maskserve_engine.control_link.slots import RowSlots
from maskserve_engine.control_link.transport import Ask, Lost, SocketMessages
from maskserve_engine.control_service.sessions import DenoiserSessions

_log = logging.getLogger(__name__)
_MOST_LINKS = 256
"""Whoever comes when there are so many is turned away."""
_AGAIN_S = 0.2


class RemoteDenoisers:
    """Takes connections, each of a session of its own.

    Args:
        listener: where they come.
        sessions: of the service.
    """

    def __init__(self, listener: socket.socket, sessions: DenoiserSessions) -> None:
        self._listener, self._sessions = listener, sessions
        self._stop = threading.Event()
        self._door = threading.Lock()
        self._links: dict[Wire, threading.Thread] = {}
        self._thread = threading.Thread(target=self._accept, name="other hosts", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()
        with self._door:
            links = dict(self._links)
        for wire in links:
            wire.end()
        for thread in links.values():
            thread.join()

    def _accept(self) -> None:
        while not self._stop.is_set():
            try:
                wire = Wire(self._listener.accept()[0])
            except OSError as error:  # it has gone away, or there are too many files
                if not self._stop.is_set():
                    _log.warning("a denoiser could not be let in: %s", error)
                self._stop.wait(_AGAIN_S)
                continue
            with self._door:
                if len(self._links) >= _MOST_LINKS:
                    wire.close()
                    continue
                thread = threading.Thread(target=self._serve, args=(wire,), daemon=True)
                self._links[wire] = thread
            thread.start()

    def _serve(self, wire: Wire) -> None:
        """One denoiser, until it or the service ends."""
        try:
            session = wire.welcome(lambda name: self._sessions.attached(name).key)
            here = SocketMessages(self._sessions.attached(session))
            back = threading.Thread(target=self._answer, args=(wire, here, session), daemon=True)
            back.start()
            try:
                self._ask(wire, here, session)
            finally:
                here.end()
                wire.end()
                back.join()
                here.close()
        except Exception as error:
            known = isinstance(error, Lost)
            _log.info("a denoiser's link is over: %s", error, exc_info=not known)
        finally:
            with self._door:
                del self._links[wire]
            wire.close()

    def _ask(self, wire: Wire, here: SocketMessages, session: str) -> None:
        asks = msgspec.msgpack.Decoder(Ask)
        while True:
            ask = asks.decode(wire.receive())
            for each in ask.rows:
                wire.fill(room_for(each, self._slots(session, each.row)))
            here.ask(ask)

    def _answer(self, wire: Wire, here: SocketMessages, session: str) -> None:
        try:
            while True:
                answered = here.next(None)
                parts, added = [], []
                for part in answered.parts:
                    slots = self._slots(session, part.row)
                    if slots is not None:
                        slot = slots.answer(part.slot)
                        added.append(slot.read(part.offset, part.shape, getattr(torch, part.dtype)))
                        parts.append(part)
                wire.send(msgspec.msgpack.encode(replace(answered, parts=tuple(parts))), added)
        except Exception as error:
            known = isinstance(error, Lost)
            _log.info("a denoiser is told nothing more: %s", error, exc_info=not known)
        finally:
            wire.end()

    def _slots(self, session: str, row: str) -> RowSlots | None:
        """None: it is closed."""
        try:
            return self._sessions.rows(session, [row])[1][row].slots
        except EngineFailed:
            return None
