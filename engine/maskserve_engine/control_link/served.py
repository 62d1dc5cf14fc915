"""Rows whose ControlNets run in services, and the sessions with these (docs/adr/0035; Katz §5).

The denoiser requests residuals as a step begins and continues with its own blocks. It waits where a
residual is added, until that residual has arrived. Rows with `adapters: fast` send the request one
step ahead (`reuse`).

The ControlNets of a row may run in several services, beside each other (docs/adr/0035). Then it has
a `LinkRow` at each, and their residuals are added in the order of the edit's controls.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache, reduce
from operator import add, is_
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from maskserve_common.errors import EngineFailed, MaskserveError
from maskserve_engine.batch.step_cache import RefreshSchedule
from maskserve_engine.control_link.opening import Opening
from maskserve_engine.control_link.reuse import Reuse, SentRequest
from maskserve_engine.control_link.slots import LOOKAHEAD
from maskserve_engine.control_link.transport import (
    AddedPart,
    Answered,
    Lost,
    Messages,
    RequestedRow,
    ResidualsRequest,
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


class LinkRow:
    """A row at one service: ControlNets of an edit that run there, and whose residuals the service
    sums.

    Args:
        link: session with the service.
        name: name of the row in the session.
        nets: number of its ControlNets.
        reuse: requests of the row; at each service it decides alike.
        opened: the call that opens the row.
    """

    def __init__(self, link: Link, name: str, nets: int, reuse: Reuse, opened: Future[Any]) -> None:
        self.link, self.name, self.nets, self.reuse = link, name, nets, reuse
        self.slots = link.messages.slots(name)
        self._opened: Future[Any] | None = opened
        self.added: SentRequest | None = None
        """Request whose residuals the present step adds; None: none."""
        self.stale = False
        """Whether those residuals were requested one step ahead, so not for the step's latents."""
        self.lookahead: SentRequest | None = None
        """Request whose residuals the present step's lookahead adds; None: none."""
        self.last_lookahead = 0
        """Number of the latest request with a lookahead, whose input lies in a slot of its own; 0:
        there was none.
        """

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

    def residual(self, sent: SentRequest | None, place: int) -> Tensor | None:
        """Wait for the residual of a request at a place of the base and return it; None: nothing is
        added.

        Raises:
            EngineFailed: it will not arrive.
        """
        return None if sent is None else self.link.find(sent, self, place)

    @property
    def numbers(self) -> set[int]:
        """Numbers of the requests whose answers may still be added."""
        return self.reuse.numbers | {self.last_lookahead}


class _Sum:
    """Sum of residuals, of which several places and passes add the same ones."""

    def __init__(self) -> None:
        self._terms: Sequence[Tensor] = ()
        self._total: Tensor | None = None

    def of(self, residuals: Iterable[Tensor | None]) -> Tensor | None:
        """Return the sum, added in order; None: there is nothing to add."""
        terms = [x for x in residuals if x is not None]
        is_same = len(terms) == len(self._terms) and all(map(is_, terms, self._terms))
        if not is_same:
            self._terms, self._total = terms, reduce(add, terms) if terms else None
        return self._total


class ServedRow:
    """A row whose ControlNets run in services; gives the residuals that the base adds
    (`batch.packing.Residuals`).

    Args:
        link_rows: the row at each service, in the order in which their residuals are added.
        schedule: schedule of its nets (`families.control.RowControl`).
    """

    def __init__(self, link_rows: Sequence[LinkRow], schedule: RefreshSchedule) -> None:
        self.link_rows, self.schedule = tuple(link_rows), schedule
        self._sum = _Sum()

    @property
    def for_lookahead(self) -> LookaheadResiduals:
        """Residuals of the lookahead pass."""
        return LookaheadResiduals(self, _Sum())

    @property
    def stale(self) -> bool:
        """Whether residuals of the present step were requested one step ahead."""
        return any(row.stale for row in self.link_rows)

    def after(self, number: int) -> Tensor | None:
        """Wait for the residual at a place of the base and return it; None: nothing is added.

        Raises:
            EngineFailed: it will not arrive.
        """
        return self._sum.of(row.residual(row.added, number) for row in self.link_rows)

    def close(self) -> None:
        for row in self.link_rows:
            row.link.close_row(row)


class LookaheadResiduals(NamedTuple):
    """Residuals that a row adds to a lookahead pass (`batch.packing.Residuals`)."""

    row: ServedRow
    sum: _Sum

    def after(self, number: int) -> Tensor | None:
        """Wait for the residual at a place of the base and return it; None: nothing is added."""
        return self.sum.of(row.residual(row.lookahead, number) for row in self.row.link_rows)


_batches = itertools.count(1)


def new_batch() -> int:
    return next(_batches)


def request_residuals(requests: Sequence[RowRequest], batch: int) -> None:
    """Request each row's residuals from all its services at once; the first lost session fails all
    rows.
    """
    requests = [request._replace(extrapolate=cache(request.extrapolate)) for request in requests]
    by_link: dict[Link, list[tuple[LinkRow, RowRequest]]] = {}
    for request in requests:
        for row in request.row.link_rows:
            by_link.setdefault(row.link, []).append((row, request))
    for link, link_requests in by_link.items():
        link.request(link_requests, batch)


class _RequestedPass(NamedTuple):
    """A row's pass whose residuals are requested: of its step, of the next one, or a lookahead."""

    row: LinkRow
    step: int
    computed: int
    sample: Tensor
    extrapolated: bool
    lookahead: int | None = None


class _Received:
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
        address: HOST:PORT of the service, for messages.
    """

    def __init__(
        self,
        messages: Messages,
        session: str,
        calls: ServiceCalls,
        device: torch.device,
        patience_s: float,
        address: str = "",
    ) -> None:
        self.messages, self.session, self._calls = messages, session, calls
        self._device, self._patience_s, self._address = device, patience_s, address
        self._names, self._numbers = itertools.count(), itertools.count(1)
        self._rows: set[LinkRow] = set()
        """Open rows."""
        self._answers: dict[int, _Received] = {}
        """Answers that some row may still need, by the number of the request."""
        self._pool = ThreadPoolExecutor(1, "controlnet calls")
        self.lost = ""
        """Reason why the session is over; empty while it is not."""
        self.waits: list[float] = []
        """Seconds that steps have waited for residuals; the reader clears the list."""

    def open(self, opening: Opening, reuse: Reuse) -> LinkRow:
        """Return a row at the service; its first request waits until the service has it.

        Args:
            opening: opening of the row, with the ControlNets that run at this service.
            reuse: the row's requests, of which there is none yet.

        Raises:
            ControlLost: the session is over.
        """
        self._check()
        if self.messages.ended():
            raise self._over("it has ended")
        name = f"{self.session}-{next(self._names)}"
        opened = self._pool.submit(self._open, name, opening)
        row = LinkRow(self, name, len(opening.spec.controls), reuse, opened)
        self._rows.add(row)
        return row

    @property
    def nets(self) -> int:
        """Number of ControlNets of the open rows, each counted in each row."""
        return sum(row.nets for row in self._rows)

    def close_row(self, row: LinkRow) -> None:
        self._rows.discard(row)
        self.send({"op": "close", "session": self.session, "row": row.name})

    def send(self, op: dict[str, Any]) -> None:
        """Queue a call after the earlier ones; no thread waits for its answer."""
        if not self.lost:
            self._pool.submit(self._call, op)

    def request(self, requests: Sequence[tuple[LinkRow, RowRequest]], batch: int) -> None:
        """Request the residuals of a step, for rows that begin it together, and of the next step
        for rows that request ahead.

        Raises:
            EngineFailed: they will not arrive.
        """
        present: list[_RequestedPass] = []
        ahead: list[_RequestedPass] = []
        for row, request in requests:
            step, computed = request.step, request.computed
            added = row.reuse.at(step, computed, self._failed)
            row.turn_to(step, added)
            row.lookahead = None
            if row.reuse.needs_present(step, added):
                present.append(
                    _RequestedPass(row, step, computed, request.sample, extrapolated=False)
                )
            foreseen = request.lookahead
            if foreseen is not None and row.reuse.acts(foreseen.step):
                at, sample, count = foreseen
                present.append(
                    _RequestedPass(row, step, count, sample, extrapolated=False, lookahead=at)
                )
            if row.reuse.needs_extrapolated(step, computed):
                extrapolated = request.extrapolate()
                if extrapolated is not None:
                    ahead.append(
                        _RequestedPass(row, step + 1, computed, extrapolated, extrapolated=True)
                    )
        for passes in (present, ahead):
            if passes:
                self._send(passes, batch)
        needed = {number for row in self._rows for number in row.numbers}
        self._answers = {n: answer for n, answer in self._answers.items() if n in needed}

    def _send(self, passes: Sequence[_RequestedPass], batch: int) -> None:
        self._check()
        while self.messages.has_next():  # unread answers of skipped blocks would block the service
            self._read(self._patience_s)
        number, rows = next(self._numbers), []
        for requested in passes:
            row, sample, is_step = requested.row, requested.sample, requested.lookahead is None
            slot = row.free_slot(requested.step) if is_step else LOOKAHEAD
            row.await_opened()
            if not is_step:
                self._await_answer(row.last_lookahead)
            with self._slots():
                row.slots.request(slot).write(0, sample)
            dtype, shape = str(sample.dtype).removeprefix("torch."), tuple(sample.shape)
            fields = (row.name, requested.step, requested.computed, slot, shape, dtype)
            rows.append(RequestedRow(*fields, lookahead=requested.lookahead))
        self._settle()
        try:
            self.messages.request(
                ResidualsRequest(number, batch, tuple(rows), self.messages.lent is not None)
            )
        except Lost as error:
            raise self._over(str(error)) from error
        self._answers[number] = _Received()
        for requested, record in zip(passes, rows, strict=True):
            row, step, extrapolated = requested.row, requested.step, requested.extrapolated
            sent = SentRequest(number, step, requested.computed, record.slot, extrapolated)
            if requested.lookahead is not None:
                row.lookahead, row.last_lookahead = sent, number
                continue
            row.reuse.keep(sent)
            if row.added is None and not extrapolated:
                row.turn_to(step, sent)

    def _await_answer(self, number: int) -> None:
        """Wait until the service has read all inputs of a request, whose slot is written anew. A
        step of a fast row does not wait for a lookahead that only fills step caches.
        """
        answer = self._answers.get(number)
        while answer is not None and not answer.ended:
            self._read(self._patience_s)

    def _failed(self, number: int) -> bool:
        return bool(self._answers[number].error)

    def _read(self, patience_s: float) -> None:
        try:
            more = self.messages.next(patience_s)
        except Lost as error:
            raise self._over(str(error)) from error
        if more.number in self._answers:
            self._answers[more.number].add(more)

    def find(self, sent: SentRequest, row: LinkRow, place: int) -> Tensor | None:
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
            if not self.messages.has_next():
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

    def _copy(self, part: AddedPart, row: LinkRow) -> Tensor:
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
        header, arrays = opening.packed()
        op = {"op": "open", "session": self.session, "row": name, "opening": header}
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
            raise lost(self._address, self.lost)

    def _over(self, why: str) -> ControlLost:
        _log.error("the ControlNet service %s is lost: %s", self._address, why)
        self.lost = why
        self.close()
        return lost(self._address, why)


def lost(address: str, why: str) -> ControlLost:
    """Return the error of an edit whose service, at this address, is lost."""
    reason = f"{address}: {why}" if address else why
    return ControlLost(
        f"the ControlNet service was lost while the edit ran ({reason}); send it again"
    )
