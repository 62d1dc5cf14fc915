"""Denoisers of other hosts. Threads forward messages between each network link
(`control_link.network`) and the service, which sees only denoisers of its own host.

So a slow link delays only its own denoiser, and the service needs only one transport.
"""

from __future__ import annotations

import logging
import socket
import threading
from contextlib import suppress

import msgspec
import torch
from msgspec.structs import replace

from maskserve_common.errors import EngineFailed
from maskserve_engine.control_link.network import Wire, room_for
from maskserve_engine.control_link.slots import RowSlots
from maskserve_engine.control_link.transport import Lost, ResidualsRequest, SocketMessages
from maskserve_engine.control_service.sessions import DenoiserSessions

_log = logging.getLogger(__name__)
_MOST_LINKS = 256
"""Most links. A further one displaces the oldest link that has not proved its session's key, of
unknown hosts first. If all links have proved their keys, the new link is refused.
"""
_PROOF_S = 2.0
"""Seconds in which a denoiser must prove that it knows its session's key."""
_MOST_HOSTS = 1024
_RETRY_S = 0.2


class RemoteDenoisers:
    """Accepts connections of denoisers; each belongs to one session.

    Args:
        listener: socket that accepts them.
    """

    def __init__(self, listener: socket.socket, sessions: DenoiserSessions) -> None:
        self._listener, self._sessions = listener, sessions
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self.links: dict[Wire, threading.Thread] = {}
        self.unproven: dict[Wire, str] = {}
        """Hosts of links that have not proved their key, the oldest first."""
        self._hosts: dict[str, None] = {}
        """Hosts of denoisers."""
        self._thread = threading.Thread(target=self._accept, name="other hosts", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()
        with self._lock:
            links = dict(self.links)
        for wire in links:
            wire.end()
        for thread in links.values():
            thread.join()

    def _accept(self) -> None:
        while not self._stop.is_set():
            try:
                connected, address = self._listener.accept()
                wire = Wire(connected)
            except OSError as error:  # the denoiser has left, or there are too many files
                if not self._stop.is_set():
                    _log.warning("a denoiser could not be let in: %s", error)
                self._stop.wait(_RETRY_S)
                continue
            with self._lock:
                if len(self.links) >= _MOST_LINKS and not self._displace(address[0]):
                    wire.close()
                    continue
                thread = threading.Thread(target=self._serve, args=(wire,), daemon=True)
                self.links[wire], self.unproven[wire] = thread, address[0]
            thread.start()

    def _displace(self, host: str) -> bool:
        """End an unproven link to make room for one from `host`; return False if there is none that
        may be ended.
        """
        strangers = [
            wire for wire, other_host in self.unproven.items() if other_host not in self._hosts
        ]
        unproven = list(self.unproven) if host in self._hosts else []
        for wire in (*strangers, *unproven)[:1]:
            del self.unproven[wire], self.links[wire]
            wire.end()
            return True
        return False

    def _welcome(self, wire: Wire) -> str:
        """Return the session of a denoiser that has proved its key.

        Raises:
            Lost: there is no such session, or the proof has taken too long.
        """
        limit = threading.Timer(_PROOF_S, wire.end)
        limit.daemon = True
        limit.start()
        try:
            session = wire.welcome(lambda name: self._sessions.attached(name).key)
        finally:
            limit.cancel()
        with self._lock:
            host = self.unproven.pop(wire, None)
            if host is None:
                raise Lost("it has given way to another")
            self._hosts.pop(host, None)
            self._hosts[host] = None
            while len(self._hosts) > _MOST_HOSTS:
                del self._hosts[next(iter(self._hosts))]
        return session

    def _serve(self, wire: Wire) -> None:
        try:
            session = self._welcome(wire)
            messages = SocketMessages(self._sessions.attached(session))
            answers = threading.Thread(
                target=self._forward_answers, args=(wire, messages, session), daemon=True
            )
            answers.start()
            try:
                self._forward_requests(wire, messages, session)
            finally:
                messages.end()
                wire.end()
                answers.join()
                messages.close()
        except Exception as error:
            is_lost = isinstance(error, Lost)
            _log.info("a denoiser's link is over: %s", error, exc_info=not is_lost)
        finally:
            with self._lock:
                self.links.pop(wire, None)
                self.unproven.pop(wire, None)
            wire.close()

    def _forward_requests(self, wire: Wire, local: SocketMessages, session: str) -> None:
        decoder = msgspec.msgpack.Decoder(ResidualsRequest)
        while True:
            request = decoder.decode(wire.receive())
            for row in request.rows:
                wire.fill(room_for(row, self._slots(session, row.row)))
            local.request(request)

    def _forward_answers(self, wire: Wire, local: SocketMessages, session: str) -> None:
        try:
            while True:
                answered = local.next(None)
                parts, added = [], []
                for part in answered.parts:
                    slots = self._slots(session, part.row)
                    if slots is not None:
                        slot = slots.answer(part.slot)
                        added.append(slot.read(part.offset, part.shape, getattr(torch, part.dtype)))
                        parts.append(part)
                wire.send(msgspec.msgpack.encode(replace(answered, parts=tuple(parts))), added)
        except Exception as error:
            is_lost = isinstance(error, Lost)
            _log.info("a denoiser gets no more answers: %s", error, exc_info=not is_lost)
        finally:
            wire.end()

    def _slots(self, session: str, row: str) -> RowSlots | None:
        """Return a row's slots; None: the row is closed."""
        try:
            return self._sessions.rows(session, [row])[1][row].slots
        except EngineFailed:
            return None
