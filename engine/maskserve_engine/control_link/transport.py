"""Messages between a denoiser and a ControlNet service, and their transport on one host.

Messages are small. They go through a Unix socket that keeps their bounds (SOCK_SEQPACKET), where a
reader sleeps until one arrives and notices at once when the other process ends. Tensors lie in
shared memory (`slots`), residuals sometimes in device memory (`device_memory`); a message says
where. `network` carries messages and tensors to another host.
"""

from __future__ import annotations

import select
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import msgspec
import torch

from maskserve_common.files.sockets import short_path
from maskserve_engine.control_link.device_memory import Lent, OpenedBlock, opened_block
from maskserve_engine.control_link.slots import RowSlots

MOST_BYTES = 2**20
"""Most bytes of a message, without tensors."""
_SEND_S = 1.0
"""Seconds after which a denoiser that reads nothing counts as lost, since it delays all others."""


class Attached(msgspec.Struct, frozen=True):
    """A service's answer to a denoiser that opens a session."""

    session: str
    socket: str
    """Socket path on the service's host; the slots lie beside it."""
    port: int
    """Port for denoisers of other hosts; 0: they cannot connect."""
    key: str
    """Secret by which both ends prove that they belong to the session."""
    lent: Lent | None = None
    """Device memory for its residuals."""


class RequestedRow(msgspec.Struct, array_like=True, frozen=True):
    """A row of a step; its tensor lies in its slot."""

    row: str
    step: int
    computed: int
    """Tokens that the base computes; for FLUX these are the first ones."""
    slot: int
    shape: tuple[int, ...]
    dtype: str
    lookahead: int | None = None
    """Refresh step whose lookahead pass has these tokens; None: they belong to the row's step."""


class ResidualsRequest(msgspec.Struct, array_like=True, frozen=True):
    """Request for the residuals of rows that begin a step together; nets run over all at once."""

    number: int
    """One more than the number of the request before."""
    batch: int
    """Number of the batch, which is the same as long as the batch has the same rows."""
    rows: tuple[RequestedRow, ...]
    lent: bool = False
    """Whether residuals may lie in the memory that the service lends."""


class AddedPart(msgspec.Struct, array_like=True, frozen=True):
    """A row's residual, which the base adds at some places."""

    row: str
    first: int
    last: int
    """Last place of the base at which it is added."""
    slot: int
    offset: int
    """Offset in the row's slot, or in the lent memory."""
    shape: tuple[int, ...]
    dtype: str
    lent: bool = False
    """Whether the offset is one in the lent memory."""


class Answered(msgspec.Struct, array_like=True, frozen=True):
    """A part of the answer to a request."""

    number: int
    parts: tuple[AddedPart, ...] = ()
    ended: bool = False
    error: str = ""
    """Reason of an error, after which no part follows; empty: there is no error."""


class Lost(Exception):
    """The other end sends nothing any more; the message says why."""


class Messages(Protocol):
    """A denoiser's end of a transport."""

    @property
    def lent(self) -> OpenedBlock | None:
        """Device memory for residuals, beside the slots."""
        ...

    def slots(self, row: str) -> RowSlots:
        """Return a row's slots: input is written before the request, residuals are complete when a
        message announces them.
        """
        ...

    def request(self, request: ResidualsRequest) -> None:
        """Send a request.

        Raises:
            Lost: the service has ended.
        """
        ...

    def next(self, patience_s: float) -> Answered:
        """Return the next answer.

        Raises:
            Lost: the service has ended, or sent nothing for `patience_s` seconds.
        """
        ...

    def has_next(self) -> bool:
        """Whether `next` would return at once."""
        ...

    def ended(self) -> bool:
        """Whether the other end has ended, without waiting; may be called from any thread."""
        ...

    def close(self) -> None: ...


class SocketMessages:
    """See `Messages`.

    Args:
        attached: the service's answer when the denoiser attached.
        device: device of the residuals; None: lent memory is not opened.
    """

    def __init__(self, attached: Attached, device: torch.device | None = None) -> None:
        path = Path(attached.socket)
        self._folder = path.parent
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._socket.settimeout(_SEND_S)
            with short_path(self._folder) as short:
                self._socket.connect(f"{short}/{path.name}")
            self._socket.send(attached.session.encode())
        except OSError as error:
            self._socket.close()
            raise Lost(f"its socket does not answer ({error.strerror or error})") from error
        self._answers = msgspec.msgpack.Decoder(Answered)
        self.lent = None if device is None else opened_block(attached.lent, device)

    def slots(self, row: str) -> RowSlots:
        return RowSlots.shared(self._folder, row)

    def request(self, request: ResidualsRequest) -> None:
        try:
            self._socket.settimeout(_SEND_S)
            self._socket.send(msgspec.msgpack.encode(request))
        except OSError as error:
            raise Lost("it has ended or reads nothing") from error

    def next(self, patience_s: float | None) -> Answered:
        """See `Messages.next`; None: wait without limit."""
        try:
            self._socket.settimeout(None if patience_s is None else max(patience_s, 1e-3))
            message = self._socket.recv(MOST_BYTES)
        except TimeoutError:
            raise Lost("it has not answered in time") from None
        except OSError:
            message = b""
        if not message:
            raise Lost("it has ended")
        return self._answers.decode(message)

    def has_next(self) -> bool:
        poller = select.poll()
        poller.register(self._socket, select.POLLIN)
        return bool(poller.poll(0))

    def ended(self) -> bool:
        number = self._socket.fileno()
        if number < 0:
            return True
        poller = select.poll()
        # POLLHUP is always reported, and before unread messages.
        poller.register(number, 0)
        return bool(poller.poll(0))

    def end(self) -> None:
        """Wake a thread that waits in `next`, as if the service had ended; may be called from any
        thread.
        """
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()


class Connection:
    """The service's end of one denoiser."""

    def __init__(self, connected: socket.socket) -> None:
        self.session = ""
        """Name of the session, known with its first message."""
        self._socket = connected
        self._socket.setblocking(False)
        self._requests = msgspec.msgpack.Decoder(ResidualsRequest)

    def fileno(self) -> int:
        return self._socket.fileno()

    def read(self) -> ResidualsRequest | None:
        """Read one message; None: it was the session's name.

        Raises:
            Lost: the denoiser has ended.
        """
        try:
            message = self._socket.recv(MOST_BYTES)
        except OSError:
            message = b""
        if not message:
            raise Lost("the denoiser has ended")
        if not self.session:
            self.session = message.decode()
            return None
        return self._requests.decode(message)

    def send(self, answered: Answered) -> None:
        """Send an answer.

        Raises:
            Lost: the denoiser has ended, or has read nothing for long.
        """
        message, end = msgspec.msgpack.encode(answered), time.monotonic() + _SEND_S
        while True:
            try:
                self._socket.send(message)
                return
            except BlockingIOError:
                remaining_s = end - time.monotonic()
                if remaining_s <= 0:
                    raise Lost("the denoiser reads nothing") from None
                select.select([], [self._socket], [], remaining_s)
            except OSError as error:
                raise Lost("the denoiser has ended") from error

    def close(self) -> None:
        self._socket.close()
