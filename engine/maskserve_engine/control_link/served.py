"""ControlNets of a denoiser's rows that another process runs (docs/adr/0035; Katz §4.2).

The denoiser asks as a step begins and goes on with its own blocks. It waits where a residual is
added, and no longer than until that one is there.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from maskserve_core.errors import EngineFailed, MaskserveError, Overloaded
from maskserve_engine.control_link.opening import Opening
from maskserve_engine.control_link.slots import RowSlots
from maskserve_engine.control_link.transport import (
    AddedPart,
    Answered,
    Ask,
    AskedRow,
    Lost,
    Messages,
    SocketMessages,
)

_log = logging.getLogger(__name__)
_WAITS = 4096
"""Waits that are kept until they are asked for."""


class ServiceCalls(Protocol):
    """KServe calls of the service."""

    def call(self, op: dict[str, Any], arrays: bytes, limit_s: float) -> dict[str, Any]:
        """Raises MaskserveError: what the service says, or Overloaded where it says nothing."""
        ...

    def close(self) -> None: ...


class ControlLost(EngineFailed):
    """The service has ended or is frozen; the edit cannot go on."""


class RowAsk(NamedTuple):
    """A row whose step begins."""

    row: ServedRow
    step: int
    sample: Tensor
    """What nets are given of it, of any device."""
    computed: int = 0
    """As of `transport.AskedRow`."""


class ServedRow:
    """A row at the service; what it adds to the base (`batch.inputs.Residuals`)."""

    def __init__(self, link: Link, name: str, opening: Opening, opened: Future[Any]) -> None:
        self.link, self.name = link, name
        self.slots = RowSlots(link.folder, name)
        self._controls = [each.input for each in opening.facts.controls]
        self._steps = len(opening.facts.timesteps)
        self._opened: Future[Any] | None = opened
        self.asked = 0
        """Number of the ask whose residuals the present step adds; 0: it adds none."""

    def acts(self, step: int) -> bool:
        """Whether any ControlNet adds anything in a step."""
        return any(each.scale_at(step, self._steps) for each in self._controls)

    def await_opened(self) -> None:
        """Raises EngineFailed: the service does not have it."""
        if self._opened is not None:
            try:
                self._opened.result()
            except MaskserveError as error:  # an edit that runs is not to be told to come later
                raise EngineFailed(error.message) from error
            self._opened = None

    def after(self, number: int) -> Tensor | None:
        """What is added at a place of the base; waits for it.

        Raises:
            EngineFailed: it will not come.
        """
        return self.link.find(self.asked, self, number) if self.asked else None

    def close(self) -> None:
        self.link.close_row(self)


_batches = itertools.count(1)


def new_batch() -> int:
    """A number for a batch (`transport.Ask`)."""
    return next(_batches)


def ask_service(asks: Sequence[RowAsk], batch: int) -> None:
    """See `Link.ask`; rows of a session that was lost fail all."""
    for link in dict.fromkeys(each.row.link for each in asks):
        link.ask([each for each in asks if each.row.link is link], batch)


class _Answer:
    """What has come of the answer to one ask."""

    def __init__(self) -> None:
        self._parts: dict[str, list[AddedPart]] = {}
        self.ended = False
        self.error = ""

    def add(self, more: Answered) -> None:
        for part in more.parts:
            self._parts.setdefault(part.row, []).append(part)
        self.ended, self.error = more.ended, more.error

    def at(self, row: str, place: int) -> AddedPart | None:
        for part in self._parts.get(row, ()):
            if part.first <= place <= part.last:
                return part
        return None


class Link:
    """One session with a service; over once the service has ended or was silent for too long.

    Used by the engine's thread only, but for `lost`.

    Args:
        messages: to the service.
        folder: of the slots.
        session: as the service has named it.
        calls: of the service.
        device: of the base.
        patience_s: `[controls] service_timeout_s`.
    """

    def __init__(
        self,
        messages: Messages,
        folder: Path,
        session: str,
        calls: ServiceCalls,
        device: torch.device,
        patience_s: float,
    ) -> None:
        self.folder, self.session = folder, session
        self._messages, self._calls = messages, calls
        self._device, self._patience_s = device, patience_s
        self._names, self._numbers = itertools.count(), itertools.count(1)
        self._answers: dict[int, _Answer] = {}
        self._pool = ThreadPoolExecutor(1, "controlnet calls")
        self.lost = ""
        """Why it is over; empty while it is not."""
        self.waits: list[float] = []
        """Seconds that steps have waited for residuals; whoever books them clears it."""

    def open(self, opening: Opening) -> ServedRow:
        """A row at the service; its first ask waits until it is there.

        Raises:
            ControlLost: the session is over.
        """
        self._check()
        if self._messages.ended():
            raise self._over("it has ended")
        name = f"{self.session}-{next(self._names)}"
        opened = self._pool.submit(self._open, name, opening)
        return ServedRow(self, name, opening, opened)

    def close_row(self, row: ServedRow) -> None:
        self.tell({"op": "close", "session": self.session, "row": row.name})

    def tell(self, op: dict[str, Any]) -> None:
        """Have a call made behind those before it, whose answer nobody waits for."""
        if not self.lost:
            self._pool.submit(self._call, op)

    def ask(self, asks: Sequence[RowAsk], batch: int) -> None:
        """Have residuals of a step computed, for rows that begin it together.

        Raises:
            EngineFailed: they will not be.
        """
        acting = [each for each in asks if each.row.acts(each.step)]
        for each in asks:
            each.row.asked = 0
        if not acting:
            return
        self._check()
        number = next(self._numbers)
        rows = []
        for each in acting:
            each.row.await_opened()
            with self._slots():
                each.row.slots.ask(number).write(0, each.sample)
            dtype = str(each.sample.dtype).removeprefix("torch.")
            shape = tuple(each.sample.shape)
            rows.append(AskedRow(each.row.name, each.step, each.computed, shape, dtype))
        try:
            self._messages.ask(Ask(number, batch, tuple(rows)))
        except Lost as error:
            raise self._over(str(error)) from error
        self._answers = {number: _Answer()}
        for each in acting:
            each.row.asked = number

    def find(self, number: int, row: ServedRow, place: int) -> Tensor | None:
        """What is added to a row at a place; None: nothing.

        Raises:
            EngineFailed: it will not come.
        """
        self._check()
        answer = self._answers[number]
        begin = 0.0
        while True:
            part = answer.at(row.name, place)
            if part is not None or answer.ended:
                break
            begin = begin or time.monotonic()
            try:
                more = self._messages.next(begin + self._patience_s - time.monotonic())
            except Lost as error:
                raise self._over(str(error)) from error
            if more.number == number:
                answer.add(more)
        if begin:
            self.waits = [*self.waits[-_WAITS:], time.monotonic() - begin]
        if answer.error:
            raise EngineFailed(f"the ControlNet service failed: {answer.error}")
        if part is None:
            return None
        slot, dtype = row.slots.answer(number), getattr(torch, part.dtype)
        with self._slots():
            return slot.read(part.offset, part.shape, dtype).to(self._device)

    @property
    def over(self) -> bool:
        """From any thread. A service may have ended with nobody waiting for it: where it was frozen
        as rows were opened, none of them has asked for anything.
        """
        return bool(self.lost) or self._messages.ended()

    def close(self) -> None:
        """It is over, and nobody is to be told."""
        self.lost = self.lost or "it is closed"
        self._messages.close()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _open(self, name: str, opening: Opening) -> None:
        facts, arrays = opening.packed()
        op = {"op": "open", "session": self.session, "row": name, "opening": facts}
        self._calls.call(op, arrays, self._patience_s)

    def _call(self, op: dict[str, Any]) -> None:
        try:
            self._calls.call(op, b"", self._patience_s)
        except MaskserveError as error:
            _log.warning("the ControlNet service does not answer %s: %s", op["op"], error)

    @contextmanager
    def _slots(self) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError as error:
            raise self._over("its slots are gone") from error
        except OSError as error:
            raise EngineFailed(f"ControlNet slots: {error.strerror or error}") from error

    def _check(self) -> None:
        if self.lost:
            raise _lost(self.lost)

    def _over(self, why: str) -> ControlLost:
        _log.error("the ControlNet service is lost: %s", why)
        self.lost = why
        self.close()
        return _lost(why)


def _lost(why: str) -> ControlLost:
    return ControlLost(f"the ControlNet service was lost while the edit ran ({why}); send it again")


class ControlService:
    """A denoiser's service: attached to when it is first needed, and again once it was lost.

    Args:
        calls: of the service.
        device: of the base.
        dtype: of the base; the service's must be the same.
        patience_s: `[controls] service_timeout_s`.
    """

    def __init__(
        self,
        calls: ServiceCalls,
        device: torch.device,
        dtype: str,
        patience_s: float,
        connect: Callable[[str, str], Messages] = SocketMessages,
    ) -> None:
        self._calls, self._device, self._dtype = calls, device, dtype
        self._patience_s, self._connect = patience_s, connect
        self._link: Link | None = None
        self._held: dict[str, Link] = {}
        """The ControlNets that the service was told to hold, and in which session."""

    # Called from the loader's thread.

    def load(self, name: str, version: str, limit_s: float) -> dict[str, Any]:
        """Have the service hold a ControlNet; what it says of it (`digest`).

        Raises:
            MaskserveError: it cannot be had, or the service does not answer.
        """
        link = self._attached()
        op = {"op": "load", "session": link.session, "name": name, "version": version}
        said = self._calls.call(op, b"", limit_s)
        self._held[version] = link
        return said

    def _attached(self) -> Link:
        link = self._link
        if link is not None and not link.over:
            self._calls.call({"op": "health"}, b"", self._patience_s)
            return link
        said = self._calls.call({"op": "attach", "dtype": self._dtype}, b"", self._patience_s)
        session, folder = str(said["session"]), Path(said["folder"])
        try:
            messages = self._connect(str(said["socket"]), session)
        except Lost as error:
            raise Overloaded(f"the ControlNet service: {error}; try again later") from error
        self._link = Link(messages, folder, session, self._calls, self._device, self._patience_s)
        return self._link

    # Called from the engine's thread.

    def holds(self, version: str) -> bool:
        """Whether the service has a ControlNet for this denoiser."""
        link = self._held.get(version)
        return link is not None and not link.over

    def drop(self, version: str) -> None:
        """The ControlNet is not needed any more."""
        link = self._held.pop(version, None)
        if link is not None and not link.lost:
            link.tell({"op": "drop", "session": link.session, "version": version})

    def open(self, opening: Opening) -> ServedRow:
        """Raises ControlLost: the service is not there."""
        if self._link is None:
            raise _lost("it was never there")
        return self._link.open(opening)

    def take_waits(self) -> list[float]:
        """Seconds that steps have waited for residuals, since this was asked last."""
        if self._link is None:
            return []
        waits, self._link.waits = self._link.waits, []
        return waits

    def close(self) -> None:
        if self._link is not None:
            self._link.close()
        self._calls.close()
