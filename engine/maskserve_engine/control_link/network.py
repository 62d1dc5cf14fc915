"""The same messages over TCP, and the bytes of tensors behind them (docs/adr/0035).

A `Wire` is one connection. Messages are those of the standard library's `multiprocessing`, as
bytes: they have bounds, and both ends show that they know the session's key. A tensor's bytes are
sent from its memory and received into it. The kernel reports a peer that answers no more, however
the link is cut, and a peer that stops in the middle of a tensor.

At the denoiser a thread receives answers, so that residuals cross the link while the base computes.
At the service `control_service.remote` forwards requests to the socket and slots of its host.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import queue
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from math import prod
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from weakref import WeakValueDictionary

import msgspec
import torch
from torch import Tensor

from maskserve_engine.control_link.slots import SLOTS, RowSlots
from maskserve_engine.control_link.transport import (
    MOST_BYTES,
    AddedPart,
    Answered,
    Attached,
    Lost,
    Messages,
    RequestedRow,
    ResidualsRequest,
    SocketMessages,
)

_log = logging.getLogger(__name__)

_CONNECT_S = 5.0
_SILENT_S = 8
"""Seconds after which a peer is lost that acknowledges nothing, or stops in the middle of a
message.
"""
_MOST_NAME = 200
_MOST_SAMPLE, _MOST_ADDED = 2**26, 2**31
"""Most bytes of one row's tensor in a request, and of one residual: hundreds of times FLUX's at
1024x1024, and eighty times.
"""
_STALL = struct.pack("ll", _SILENT_S, 0)
_OPTIONS = (
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 2),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * _SILENT_S),
    (socket.SOL_SOCKET, socket.SO_RCVTIMEO, _STALL),
    (socket.SOL_SOCKET, socket.SO_SNDTIMEO, _STALL),
)


class Wire:
    """One end of a connection. One thread may send while another receives.

    Args:
        connected: connected socket, which the wire owns from now on.
    """

    def __init__(self, connected: socket.socket) -> None:
        connected.settimeout(None)  # the kernel has the limits, also for `multiprocessing`
        for level, option, value in _OPTIONS:
            connected.setsockopt(level, option, value)
        self._socket = connected
        self._messages = Connection(os.dup(connected.fileno()))

    def introduce(self, session: str, key: str) -> None:
        """Open the connection as the denoiser of a session; both ends prove that they know `key`.

        Raises:
            Lost: the other end is not the service that named the session.
        """
        try:
            self._messages.send_bytes(session.encode())
            answer_challenge(self._messages, key.encode())
            deliver_challenge(self._messages, key.encode())
        except Exception as error:  # it may say anything
            raise Lost(f"it does not know this session ({error})") from error

    def welcome(self, key_of: Callable[[str], str]) -> str:
        """Return the session of the denoiser at the other end, once it has proved its key.

        Args:
            key_of: returns a session's key; raises for an unknown session.

        Raises:
            Lost: the other end has no such session.
        """
        try:
            session = self._messages.recv_bytes(_MOST_NAME).decode()
            key = key_of(session).encode()
            deliver_challenge(self._messages, key)
            answer_challenge(self._messages, key)
        except Exception as error:  # it may say anything
            raise Lost(f"whoever connected has no session here ({error})") from error
        return session

    def send(self, message: bytes, tensors: Sequence[Tensor] = ()) -> None:
        """Send a message and the bytes of its tensors.

        Raises:
            Lost: the other end has ended, or takes nothing.
        """
        try:
            self._messages.send_bytes(message)
            for tensor in tensors:
                self._socket.sendall(_bytes(tensor.cpu().contiguous()))
        except OSError as error:
            raise Lost(f"it has ended or reads nothing ({error.strerror or error})") from error

    def receive(self) -> bytes:
        """Return the next message; wait without limit.

        Raises:
            Lost: the other end has ended, or sends no valid message.
        """
        try:
            self._messages.poll(None)
            return self._messages.recv_bytes(MOST_BYTES)
        except (OSError, EOFError) as error:
            raise Lost(f"it has ended ({error})" if str(error) else "it has ended") from error

    def fill(self, x: Tensor) -> None:
        """Fill `x` with the bytes behind a message.

        Raises:
            Lost: they do not arrive.
        """
        remaining = _bytes(x)
        while remaining:
            try:
                count = self._socket.recv_into(remaining)
            except OSError as error:
                raise Lost(f"it has ended ({error.strerror or error})") from error
            if not count:
                raise Lost("it has ended")
            remaining = remaining[count:]

    def end(self) -> None:
        """End the connection and wake threads that wait at either end; may be called on any
        thread.
        """
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._messages.close()
        self._socket.close()


def _bytes(x: Tensor) -> memoryview:
    return x.reshape(-1).view(torch.uint8).numpy().data if x.numel() else memoryview(b"")


def room_for(part: RequestedRow | AddedPart, slots: RowSlots | None) -> Tensor:
    """Return memory for the tensor that a message announces for a row.

    Args:
        part: the row's part of the message.
        slots: the row's slots; None: the row is closed and the tensor is not read.

    Raises:
        Lost: the part describes no tensor, or one that is too large.
        OSError: there is no room.
    """
    dtype, is_sample = getattr(torch, part.dtype, None), isinstance(part, RequestedRow)
    if not isinstance(dtype, torch.dtype) or any(n < 0 for n in part.shape):
        raise Lost(f"it sends {part.dtype} {part.shape}, which is no tensor")
    nbytes = prod(part.shape) * dtype.itemsize
    if nbytes > (_MOST_SAMPLE if is_sample else _MOST_ADDED):
        raise Lost(f"it sends {nbytes} bytes of one row")
    if part.slot not in range(SLOTS):
        raise Lost(f"it names a slot {part.slot}")
    if slots is None:
        return torch.empty(part.shape, dtype=dtype)
    if isinstance(part, RequestedRow):
        return slots.request(part.slot).room(0, part.shape, dtype)
    return slots.answer(part.slot).room(part.offset, part.shape, dtype)


class NetworkMessages:
    """A denoiser's end (`transport.Messages`).

    Args:
        attached: the service's answer when the denoiser attached.

    Raises:
        Lost: it does not answer there, or does not know the session.
    """

    def __init__(self, host: str, attached: Attached) -> None:
        if not attached.port:
            raise Lost("it takes no denoisers of other hosts ([controls] listen)")
        try:
            connected = socket.create_connection((host, attached.port), _CONNECT_S)
        except OSError as error:
            reason = f"{host}:{attached.port} does not answer ({error.strerror or error})"
            raise Lost(reason) from error
        self.lent = None
        self._wire = Wire(connected)
        try:
            self._wire.introduce(attached.session, attached.key)
        except Lost:
            self._wire.close()
            raise
        self._slots: WeakValueDictionary[str, RowSlots] = WeakValueDictionary()
        """Slots of the open rows, by name."""
        self._answers: queue.SimpleQueue[Answered | None] = queue.SimpleQueue()
        """Answers received; None: nothing follows."""
        self._over = threading.Event()
        self._receiver = threading.Thread(target=self._receive, name="controlnets", daemon=True)
        self._receiver.start()

    def slots(self, row: str) -> RowSlots:
        row_slots = self._slots[row] = RowSlots.local()
        return row_slots

    def request(self, request: ResidualsRequest) -> None:
        samples = [
            self._slots[row.row].request(row.slot).read(0, row.shape, getattr(torch, row.dtype))
            for row in request.rows
        ]
        self._wire.send(msgspec.msgpack.encode(request), samples)

    def next(self, patience_s: float) -> Answered:
        try:
            answered = self._answers.get(timeout=max(patience_s, 1e-3))
        except queue.Empty:
            raise Lost("it has not answered in time") from None
        if answered is None:
            self._answers.put(None)
            raise Lost("it has ended")
        return answered

    def has_next(self) -> bool:
        return not self._answers.empty()

    def ended(self) -> bool:
        return self._over.is_set()

    def close(self) -> None:
        self._wire.end()
        self._receiver.join()
        self._wire.close()

    def _receive(self) -> None:
        answers = msgspec.msgpack.Decoder(Answered)
        try:
            while True:
                answered = answers.decode(self._wire.receive())
                for part in answered.parts:
                    self._wire.fill(room_for(part, self._slots.get(part.row)))
                self._answers.put(answered)
        except Exception as error:
            _log.info("a ControlNet service's link is over: %s", error)
            self._wire.end()
        finally:
            self._over.set()
            self._answers.put(None)


def connection_to(service: str, device: torch.device) -> Callable[[Attached], Messages]:
    """Return the function that connects a denoiser to a service: through memory on one host,
    otherwise over TCP.

    Args:
        service: `[controls] service`, HOST:PORT.
        device: device of the base.
    """
    host = service.rpartition(":")[0].strip("[]")
    if _is_local(host):
        return partial(SocketMessages, device=device)
    return partial(NetworkMessages, host)


def _is_local(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
