"""ControlNets of a denoiser's rows that another process runs (docs/adr/0035; Katz §5).

The denoiser requests residuals as a step begins and continues with its own blocks. It waits where a
residual is added, until that residual has arrived. Rows with `adapters: fast` send the request one
step ahead (`reuse`).
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import msgspec
import torch
from msgspec import structs
from torch import Tensor

from maskserve_common.contracts.settings import AdapterMode
from maskserve_common.errors import EngineFailed, MaskserveError, Overloaded
from maskserve_engine.control_link.opening import Opening
from maskserve_engine.control_link.reuse import Reuse, SentRequest
from maskserve_engine.control_link.slots import LOOKAHEAD
from maskserve_engine.control_link.transport import (
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
_WAITS = 4096
"""Most waits recorded between two reads."""


class ServiceCalls(Protocol):
    """KServe calls of the service."""

    def call(self, op: dict[str, Any], arrays: bytes, limit_s: float) -> dict[str, Any]:
        """Make a KServe call.

        Raises:
            MaskserveError: the service's error, or Overloaded where it does not answer.
        """
        ...

    def close(self) -> None: ...


class ControlLost(EngineFailed):
    """The service has ended or is frozen; the edit cannot continue."""


class RowRequest(NamedTuple):
    """A row whose step begins."""

    row: ServedRow
    step: int
    sample: Tensor
    """Input of the nets, on any device."""
    computed: int = 0
    """Tokens that the base computes (`transport.RequestedRow.computed`)."""
    extrapolate: Callable[[], Tensor | None] = lambda: None
    """Returns the extrapolated input of the next step; None: there is nothing to
    extrapolate from.
    """
    lookahead: LookaheadRequest | None = None
    """Lookahead that the row computes beside this step; None: there is none."""


class LookaheadRequest(NamedTuple):
    """All tokens of a row at a later refresh step, computed by lookahead."""

    step: int
    sample: Tensor
    computed: int
    """Tokens that the base computes (`transport.RequestedRow.computed`); 0: no residual is added,
    and the service only fills its step caches."""


class ServedRow:
    """A row at the service; gives the residuals that the base adds (`batch.packing.Residuals`)."""

    def __init__(
        self, link: Link, name: str, opening: Opening, opened: Future[Any], *, fast: bool
    ) -> None:
        self.link, self.name = link, name
        self.schedule = opening.spec.schedule
        """Schedule of its nets (`families.control.RowControl`)."""
        self.slots = link.messages.slots(name)
        controls, steps = (
            [control.input for control in opening.spec.controls],
            opening.spec.timesteps,
        )
        count = len(steps)
        scales = [
            tuple(control.scale_at(step, count) for control in controls) for step in range(count)
        ]
        self.reuse = Reuse(scales, fast=fast)
        self._opened: Future[Any] | None = opened
        self.added: SentRequest | None = None
        """Request whose residuals the present step adds; None: none."""
        self.stale = False
        """Whether those residuals were requested one step ahead, so not for the step's latents."""
        self.lookahead: SentRequest | None = None
        """Request whose residuals the present step's lookahead adds; None: none."""

    @property
    def for_lookahead(self) -> LookaheadResiduals:
        """Residuals of the lookahead pass."""
        return LookaheadResiduals(self)

    def turn_to(self, step: int, added: SentRequest | None) -> None:
        self.added = added
        self.stale = added is not None and (added.extrapolated or added.step != step)

    def free_slot(self, step: int) -> int:
        """Return a slot for the request of a step; residuals that the present or a later step adds
        stay in other slots.
        """
        return self.reuse.free_slot(step, self.added)

    def await_opened(self) -> None:
        """Wait until the service has the row.

        Raises:
            EngineFailed: the service does not have it.
        """
        if self._opened is not None:
            try:
                self._opened.result()
            except MaskserveError as error:  # running: the client must not try again
                raise EngineFailed(error.message) from error
            self._opened = None

    def after(self, number: int) -> Tensor | None:
        """Wait for the residual at a place of the base and return it; None: nothing is added.

        Raises:
            EngineFailed: it will not arrive.
        """
        return None if self.added is None else self.link.find(self.added, self, number)

    @property
    def numbers(self) -> set[int]:
        """Numbers of the requests whose answers may still be added."""
        return self.reuse.numbers | (set() if self.lookahead is None else {self.lookahead.number})

    def close(self) -> None:
        self.link.close_row(self)


class LookaheadResiduals(NamedTuple):
    """Residuals that a row adds to a lookahead pass (`batch.packing.Residuals`)."""

    row: ServedRow

    def after(self, number: int) -> Tensor | None:
        """Wait for the residual at a place of the base and return it; None: nothing is added."""
        row = self.row
        return None if row.lookahead is None else row.link.find(row.lookahead, row, number)


_batches = itertools.count(1)


def new_batch() -> int:
    return next(_batches)


def request_residuals(requests: Sequence[RowRequest], batch: int) -> None:
    """Request each row's residuals through its link; the first lost session fails all rows."""
    for link in dict.fromkeys(ask.row.link for ask in requests):
        link.request([ask for ask in requests if ask.row.link is link], batch)


class _Question(NamedTuple):
    row: ServedRow
    step: int
    computed: int
    sample: Tensor
    extrapolated: bool
    lookahead: int | None = None


class _Answer:
    """The parts received in answer to one request."""

    def __init__(self) -> None:
        self._parts: dict[tuple[str, int], list[AddedPart]] = {}
        self.copied: dict[tuple[str, int], tuple[AddedPart, Tensor]] = {}
        """Latest part of each row and slot, copied to the base's device: several places and passes
        add the same part.
        """
        self.ended = False
        self.error = ""

    def add(self, more: Answered) -> None:
        for part in more.parts:
            self._parts.setdefault((part.row, part.slot), []).append(part)
        self.ended, self.error = more.ended, more.error

    def at(self, row: str, slot: int, place: int) -> AddedPart | None:
        for part in self._parts.get((row, slot), ()):
            if part.first <= place <= part.last:
                return part
        return None


class Link:
    """One session with a service; over once the service has ended or was silent for too long.

    Used by the engine's thread only, but for `lost`.

    Args:
        messages: transport to the service.
        session: the service's name of the session.
        patience_s: `[controls] service_timeout_s`.
    """

    def __init__(
        self,
        messages: Messages,
        session: str,
        calls: ServiceCalls,
        device: torch.device,
        patience_s: float,
    ) -> None:
        self.messages, self.session, self._calls = messages, session, calls
        self._device, self._patience_s = device, patience_s
        self._names, self._numbers = itertools.count(), itertools.count(1)
        self._rows: set[ServedRow] = set()
        """Open rows."""
        self._answers: dict[int, _Answer] = {}
        """Answers that some row may still need, by the number of the request."""
        self._pool = ThreadPoolExecutor(1, "controlnet calls")
        self.lost = ""
        """Reason why the session is over; empty while it is not."""
        self.waits: list[float] = []
        """Seconds that steps have waited for residuals; the reader clears the list."""

    def open(self, opening: Opening, *, fast: bool = False) -> ServedRow:
        """Return a row at the service; its first request waits until the service has it.

        Args:
            opening: opening of the row.
            fast: whether residuals are requested one step ahead.

        Raises:
            ControlLost: the session is over.
        """
        self._check()
        if self.messages.ended():
            raise self._over("it has ended")
        name = f"{self.session}-{next(self._names)}"
        opened = self._pool.submit(self._open, name, opening)
        row = ServedRow(self, name, opening, opened, fast=fast)
        self._rows.add(row)
        return row

    def close_row(self, row: ServedRow) -> None:
        self._rows.discard(row)
        self.send({"op": "close", "session": self.session, "row": row.name})

    def send(self, op: dict[str, Any]) -> None:
        """Queue a call after the earlier ones; no thread waits for its answer."""
        if not self.lost:
            self._pool.submit(self._call, op)

    def request(self, requests: Sequence[RowRequest], batch: int) -> None:
        """Request the residuals of a step, for rows that begin it together, and of the next step
        for rows that request ahead.

        Raises:
            EngineFailed: they will not arrive.
        """
        current: list[_Question] = []
        ahead: list[_Question] = []
        for row_ask in requests:
            row, step = row_ask.row, row_ask.step
            added = row.reuse.at(step, row_ask.computed, self._failed)
            row.turn_to(step, added)
            row.lookahead = None
            if row.reuse.needs_present(step, added):
                current.append(
                    _Question(row, step, row_ask.computed, row_ask.sample, extrapolated=False)
                )
            if row_ask.lookahead is not None and row.reuse.acts(row_ask.lookahead.step):
                at, lookahead_sample, computed = row_ask.lookahead
                current.append(
                    _Question(
                        row, step, computed, lookahead_sample, extrapolated=False, lookahead=at
                    )
                )
            if row.reuse.needs_extrapolated(step, row_ask.computed):
                sample = row_ask.extrapolate()
                if sample is not None:
                    ahead.append(
                        _Question(row, step + 1, row_ask.computed, sample, extrapolated=True)
                    )
        for questions in (current, ahead):
            if questions:
                self._send(questions, batch)
        needed = {number for row in self._rows for number in row.numbers}
        self._answers = {n: answer for n, answer in self._answers.items() if n in needed}

    def _send(self, questions: Sequence[_Question], batch: int) -> None:
        self._check()
        while self.messages.receive():  # unread answers of skipped blocks would block the service
            self._read(self._patience_s)
        number, rows = next(self._numbers), []
        for question in questions:
            row, sample = question.row, question.sample
            slot = row.free_slot(question.step) if question.lookahead is None else LOOKAHEAD
            row.await_opened()
            with self._slots():
                row.slots.request(slot).write(0, sample)
            dtype, shape = str(sample.dtype).removeprefix("torch."), tuple(sample.shape)
            fields = (row.name, question.step, question.computed, slot, shape, dtype)
            rows.append(RequestedRow(*fields, lookahead=question.lookahead))
        self._settle()
        try:
            self.messages.request(
                ResidualsRequest(number, batch, tuple(rows), self.messages.lent is not None)
            )
        except Lost as error:
            raise self._over(str(error)) from error
        self._answers[number] = _Answer()
        for question, row_record in zip(questions, rows, strict=True):
            row = question.row
            ask = SentRequest(
                number, question.step, question.computed, row_record.slot, question.extrapolated
            )
            if question.lookahead is not None:
                row.lookahead = ask
                continue
            row.reuse.keep(ask)
            if row.added is None and not question.extrapolated:
                row.turn_to(question.step, ask)

    def _failed(self, number: int) -> bool:
        return bool(self._answers[number].error)

    def _read(self, patience_s: float) -> None:
        try:
            more = self.messages.next(patience_s)
        except Lost as error:
            raise self._over(str(error)) from error
        if more.number in self._answers:
            self._answers[more.number].add(more)

    def find(self, sent: SentRequest, row: ServedRow, place: int) -> Tensor | None:
        """Wait for the residual of a row at a place; None: nothing is added.

        Raises:
            EngineFailed: it will not arrive.
        """
        self._check()
        answer = self._answers[sent.number]
        begin = 0.0
        while True:
            part = answer.at(row.name, sent.slot, place)
            if part is not None or answer.ended:
                break
            if not self.messages.receive():
                begin = begin or time.monotonic()
            self._read(begin + self._patience_s - time.monotonic() if begin else self._patience_s)
        if begin:
            self.waits = [*self.waits[-_WAITS:], time.monotonic() - begin]
        if answer.error:
            raise EngineFailed(f"the ControlNet service failed: {answer.error}")
        if part is None:
            return None
        cached_copy = answer.copied.get((row.name, sent.slot))
        if cached_copy is None or cached_copy[0] is not part:
            cached_copy = answer.copied[row.name, sent.slot] = part, self._copy(part, row)
        return cached_copy[1]

    def _copy(self, part: AddedPart, row: ServedRow) -> Tensor:
        """Copy a row's residual to the base's device.

        Raises:
            EngineFailed: it is lost.
        """
        slot, dtype = row.slots.answer(part.slot), getattr(torch, part.dtype)
        if part.lent:
            assert self.messages.lent is not None
            if self.messages.ended():  # messages outlive a session, lent memory does not
                raise self._over("it has ended")
            return self.messages.lent.read(part.offset, part.shape, dtype)
        with self._slots():
            return slot.read(part.offset, part.shape, dtype).to(self._device)

    @property
    def over(self) -> bool:
        """Whether the session is over; may be read from any thread. A service can end while no row
        waits for it: if it froze as rows were opened, no row has sent a request yet.
        """
        return bool(self.lost) or self.messages.ended()

    def close(self) -> None:
        self.lost = self.lost or "it is closed"
        self.messages.close()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _open(self, name: str, opening: Opening) -> None:
        facts, arrays = opening.packed()
        op = {"op": "open", "session": self.session, "row": name, "opening": facts}
        self._calls.call(op, arrays, self._patience_s)

    def _settle(self) -> None:
        """Wait for pending copies before a call after which the service may overwrite lent
        memory.
        """
        if self.messages.lent is not None:
            self.messages.lent.settle()

    def _call(self, op: dict[str, Any]) -> None:
        self._settle()
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
    """A denoiser's service. The denoiser attaches to it when it is first needed, and again after a
    loss.

    Args:
        dtype: data type of the base; the service's must be the same.
        patience_s: `[controls] service_timeout_s`.
        connect: connects to an attached session.
    """

    def __init__(
        self,
        calls: ServiceCalls,
        device: torch.device,
        dtype: str,
        patience_s: float,
        connect: Callable[[Attached], Messages] = SocketMessages,
    ) -> None:
        self._calls, self._device, self._dtype = calls, device, dtype
        self._patience_s, self._connect = patience_s, connect
        self._link: Link | None = None
        self._nets_held: dict[str, tuple[Link, str]] = {}
        """ControlNets that the service holds, by version: the session, and the content by which the
        service names the net.
        """

    # Called from the loader's thread.

    def load(self, name: str, version: str, content: str, limit_s: float) -> dict[str, Any]:
        """Have the service load a ControlNet; return its answer (`digest`).

        Args:
            name: name of its folder, on both sides.
            version: its version at this denoiser.
            content: digest of the folder here (`spec.control_nets.content_of`).
            limit_s: seconds after which the call is given up.

        Raises:
            MaskserveError: it cannot be loaded, or the service does not answer.
        """
        link = self._attached()
        op = {"op": "load", "session": link.session, "name": name, "version": content}
        response = self._calls.call(op, b"", limit_s)
        self._nets_held[version] = link, content
        return response

    def _attached(self) -> Link:
        link = self._link
        if link is not None and not link.over:
            self._calls.call({"op": "health"}, b"", self._patience_s)
            return link
        response = self._calls.call({"op": "attach", "dtype": self._dtype}, b"", self._patience_s)
        attached = msgspec.convert(response, Attached)
        try:
            messages = self._connect(attached)
        except Lost as error:
            raise Overloaded(f"the ControlNet service: {error}; try again later") from error
        self._link = Link(messages, attached.session, self._calls, self._device, self._patience_s)
        return self._link

    # Called from the engine's thread.

    def holds(self, version: str) -> bool:
        """Whether the service holds a ControlNet for this denoiser."""
        link, _ = self._nets_held.get(version, (None, ""))
        return link is not None and not link.over

    def drop(self, version: str) -> None:
        """Release a ControlNet that is not needed any more."""
        link, content = self._nets_held.pop(version, (None, ""))
        other_contents = [
            loaded_content for _, loaded_content in list(self._nets_held.values())
        ]  # copies under another name
        if link is not None and not link.lost and content not in other_contents:
            link.send({"op": "drop", "session": link.session, "version": content})

    def open(self, opening: Opening, adapters: AdapterMode = "exact") -> ServedRow:
        """Return a row at the service.

        Args:
            opening: opening of the row.
            adapters: adapter mode of the edit.

        Raises:
            ControlLost: the service cannot be reached.
        """
        if self._link is None:
            raise _lost("it was never there")
        controls = [
            structs.replace(control, net=self._nets_held.get(control.net, (None, control.net))[1])
            for control in opening.spec.controls
        ]
        facts = structs.replace(opening.spec, controls=tuple(controls))
        return self._link.open(replace(opening, spec=facts), fast=adapters == "fast")

    def take_waits(self) -> list[float]:
        """Return and clear the seconds that steps have waited for residuals."""
        if self._link is None:
            return []
        waits, self._link.waits = self._link.waits, []
        return waits

    def close(self) -> None:
        if self._link is not None:
            self._link.close()
        self._calls.close()
