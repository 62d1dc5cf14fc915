"""One worker as the router sees it: its last status record and the edits sent since."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import grpc
import msgspec
from msgspec import structs

from maskserve_common.contracts.pricing import Pricing
from maskserve_common.contracts.status_record import (
    RowStatus,
    Served,
    TemplateChanges,
    WorkerStatus,
)
from maskserve_common.errors import MaskserveError
from maskserve_common.listings import changes_of
from maskserve_common.routing import Edit, WorkerView, predicted_seconds
from maskserve_common.servers.failure import Failure
from maskserve_common.servers.pool import Server
from maskserve_router.config import RouterConfig
from maskserve_router.workers.answer_times import AnswerTimes
from maskserve_router.workers.breaker import Breaker
from maskserve_router.workers.template_index import TemplateIndex

UNPRICED = Pricing(step=0.005, dense_row=0.1, cached_row=0.01, active_token=2e-5)
"""Prices for a worker that reports none: only the ratios between edits matter."""


class PolledStatus(WorkerStatus):
    """The status record as returned by `control`."""

    reported_age_s: float = msgspec.field(default=0.0, name="age_s")
    """Age of the record when it was sent, in seconds; the clocks of two hosts do not compare."""
    alive: bool = True
    in_flight: int = 0
    template_changes: TemplateChanges | None = None
    """Changes of the templates, in place of `templates`, from workers that support them."""


_decode = msgspec.json.Decoder(PolledStatus).decode
_MOST_BYTES = 64 * 2**20
"""Most bytes of a record: about a million templates of a worker that lists all."""
_MOST_ROWS = 10_000
"""Most rows in a record; each takes microseconds at every poll."""
_MOST_NODES = 100
_MOST_DEVICES = 1024
_MOST_STEPS = 100_000
_MOST_TOKENS = 10**9
_MOST_LOAD_S = 86_400.0


def read_status(raw: bytes) -> PolledStatus:
    """Parse the answer of `control`'s `status`.

    Raises:
        ValueError: it is not a status that this router understands.
    """
    if len(raw) > _MOST_BYTES:
        raise ValueError(f"not a status: {len(raw)} bytes; at most {_MOST_BYTES}")
    try:
        status = _decode(raw)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise ValueError(f"not a status: {error}") from error
    _check_status(status)
    return status


def _check_status(status: PolledStatus) -> None:
    """Check the bounds of the record. Raises ValueError: a value is impossible."""

    def within(name: str, value: float, least: float, most: float) -> None:
        if not least <= value <= most:  # also false for NaN
            raise ValueError(f"not a status: {name} is {value}")

    within("max_rows", status.max_rows, 1, _MOST_ROWS)
    within("devices", status.devices, 1, _MOST_DEVICES)
    within("max_waiting", status.max_waiting, 0, 10**9)
    within("age_s", status.reported_age_s, 0.0, 86_400.0)
    within("in_flight", status.in_flight, 0, 10**9)
    within("the number of rows", len(status.running) + len(status.waiting), 0, _MOST_ROWS)
    for row in (*status.running, *status.waiting):
        within("steps_left", row.steps_left, 0, _MOST_STEPS)
        within("total_tokens", row.total_tokens, 0, _MOST_TOKENS)
        within("active_tokens", row.active_tokens, 0, row.total_tokens)
        within("dense_share", row.dense_share, 0.0, 1.0)
        within("adapter_bytes", row.adapter_bytes, 0, 2**50)
        for _, share in row.controls:
            within("a control's share", share, 0.0, 1.0)
    within("the number of nodes", len(status.nodes), 0, _MOST_NODES)
    for adapters, loads, sort in (
        (status.adapters, status.adapter_loads, "adapter"),
        (status.controlnets, status.controlnet_loads, "controlnet"),
    ):
        within(f"the number of {sort}s", len(adapters), 0, _MOST_ROWS)
        for adapter in adapters:
            within(f"bytes of one of the {sort}s", adapter.nbytes, 0, 2**50)
        for cost in loads.values():
            within(f"{sort}_loads", cost.fixed, 0.0, _MOST_LOAD_S)
            within(f"{sort}_loads", cost.per_byte, 0.0, 1.0)
    if (served := status.served) is not None:
        within("served.native_resolution", served.native_resolution, 1, 2**16)
        within("served.token_pixels", served.token_pixels, 1, served.native_resolution)
        within("served.num_inference_steps", served.num_inference_steps, 1, _MOST_STEPS)
        within("served.step_interval", served.step_interval, 1, _MOST_STEPS)
        within("served.mask_ring", served.mask_ring, 0, 2**16)
        within("served.own_stride", served.own_stride, 0.0, 1.0)
        within("served.promised_stride", served.promised_stride, 0.0, 1.0)
        within("served.own_ring", served.own_ring, 0, 2**16)


def _sets(templates: Mapping[str, tuple[str, ...]]) -> dict[str, frozenset[str]]:
    return {tier: frozenset(ids) for tier, ids in templates.items()}


class WorkerEpoch(NamedTuple):
    """A worker between two losses: a worker that comes back has a new epoch."""

    address: str
    number: int


class Prediction(NamedTuple):
    """Predicted times of an edit at a worker, in seconds from when it is sent."""

    denoised_s: float
    answered_s: float


@dataclass(slots=True, eq=False)
class SentEdit:
    """An edit at a worker, from the choice of the worker until the answer."""

    request_id: str
    edit: Edit
    worker: Worker
    at: float
    """When it was sent, on the router's clock."""
    predicted: Prediction
    listed: bool = False
    """True once a record has listed it."""
    listed_at: float = 0.0
    """When a record last listed it; before that, when it was sent."""
    cancel: Callable[[], object] | None = None
    """Ends the call to the worker."""
    end_reason: MaskserveError | Failure | None = None
    """Reason for which the router ended the call."""

    def end(self, reason: MaskserveError | Failure) -> None:
        """End the call to the worker for this reason."""
        self.end_reason = reason
        if self.cancel is not None:
            self.cancel()


@dataclass(slots=True, eq=False)
class Worker(Server):
    """One worker, identified by its address: workers on two hosts may have the same name."""

    kind = "worker"
    config: RouterConfig
    index: TemplateIndex = field(default_factory=TemplateIndex)
    """Index of templates, shared by all workers of the pool."""
    breaker: Breaker = field(init=False)
    status: PolledStatus | None = None
    as_of: float = 0.0
    """When the record was written, on the router's clock."""
    reading_s: float = 0.0
    """Seconds that parsing its last record took."""
    epochs: int = 0
    """Number of times that it was lost."""
    sent: dict[str, SentEdit] = field(default_factory=dict)
    """The ledger: request id -> edit at this worker."""
    number: int = field(init=False)
    """Number of the worker in the index."""
    templates_version: str | None = ""
    """Version of its templates in the index; empty: none known. None: the worker lists all
    templates in every record."""
    times: AnswerTimes = field(default_factory=AnswerTimes)
    changed: Callable[[Worker], object] | None = None
    """Called when the worker changes in a way that decisions depend on."""
    _listed: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Templates in the index, for a worker that lists all of them."""
    _draining: bool = False
    _answered: set[str] = field(default_factory=set)
    """Edits that were answered since the record was written."""
    _view: WorkerView | None = None

    def __post_init__(self) -> None:
        Server.__post_init__(self)
        self.number = self.index.join()
        self.breaker = Breaker(self.config.faults)

    @property
    def epoch(self) -> WorkerEpoch:
        return WorkerEpoch(self.address, self.epochs)

    @property
    def model(self) -> str:
        return self.status.model if self.status is not None else ""

    @property
    def host(self) -> str:
        """Name of its host, whose values folder it shares; empty: it shares none."""
        return self.status.values.host if self.status is not None else ""

    @property
    def results_at(self) -> str:
        """Name of where its kept results are: its host, or itself if it shares no folder."""
        return self.host or self.address

    @property
    def served(self) -> Served | None:
        return self.status.served if self.status is not None else None

    @property
    def ready(self) -> bool:
        """True if it reports that it takes edits; the breaker may still hold them back."""
        return self.up and not self.draining and self.status is not None and self.status.takes_edits

    @property
    def draining(self) -> bool:
        """True if an operator asked this router to send it no more edits."""
        return self._draining

    @draining.setter
    def draining(self, value: bool) -> None:
        self._draining = value
        self._notify()

    def _notify(self) -> None:
        if self.changed is not None:
            self.changed(self)

    def _see_anew(self) -> None:
        """Discard the cached view."""
        self._view = None
        self._notify()

    def mark_down(self, reason: Failure) -> None:
        """Mark the worker as down and end all calls to it."""
        self._notify()
        self.up, self.epochs = False, self.epochs + 1
        self.templates_version = ""  # a restarted worker may have another version of maskserve
        for sent_edit in list(self.sent.values()):
            sent_edit.end(reason)

    def take_status(self, status: PolledStatus, now: float) -> None:
        """Take in a status record, and end calls of edits that it has not listed for too long."""
        if status.alive:
            self.record_poll()
        else:
            self.misses += 1
        self._take_templates(status)
        self.status, self.as_of = status, now - status.reported_age_s
        self._answered.clear()
        listed = {row.request_id for row in (*status.running, *status.waiting)}
        for name, sent_edit in list(self.sent.items()):
            if name in listed:
                sent_edit.listed, sent_edit.listed_at = True, now
            elif now - sent_edit.listed_at > self.config.faults.unlisted_s:
                message = "[ENGINE_FAILED] the worker has stopped working on the edit"
                sent_edit.end(Failure(grpc.StatusCode.UNAVAILABLE, message))
        self._see_anew()

    def reports_all(self) -> None:
        """Note that the worker lists all templates in every record and reports no changes."""
        self.index.clear(self.number)
        self.templates_version, self._listed = None, {}

    def _take_templates(self, status: PolledStatus) -> None:
        """Update the index from a record."""
        changes = status.template_changes
        if changes is None:
            if self.templates_version is not None:
                self.reports_all()
            if self._listed == status.templates:
                return
            previous, self._listed = self._listed, status.templates
            changes = changes_of(_sets(previous), _sets(status.templates))
        else:
            if changes.since not in ("", self.templates_version):
                # Changes since another version are of no use: the next record has all templates.
                changes = TemplateChanges("")
            if not changes.since:
                self.index.clear(self.number)
            self.templates_version = changes.version
        for tier, templates in changes.added.items():
            self.index.add(self.number, tier, templates)
        for tier, templates in changes.removed.items():
            self.index.remove(self.number, tier, templates)

    def predict(self, edit: Edit, now: float) -> Prediction:
        """Predict the times of an edit that is sent now."""
        denoised = predicted_seconds(edit, self.view(now), now)
        return Prediction(denoised, self.times.predict(edit.total_tokens, denoised))

    def share_left(self, request_id: str) -> float | None:
        """Return the share of steps left of an edit with a row; None: it waits for a row."""
        sent_edit = self.sent.get(request_id)
        if sent_edit is None or not sent_edit.listed or self.status is None:
            return None
        if any(row.request_id == request_id for row in self.status.waiting):
            return None
        steps_left = [r.steps_left for r in self.status.running if r.request_id == request_id]
        return min(sum(steps_left) / sent_edit.edit.steps, 1.0)  # no row: it is past its last step

    def running_s(self, now: float) -> float:
        """Return the seconds until all rows of this worker have ended."""
        rows = self.view(now).running
        steps = max((row.steps for row in rows), default=0)
        work = steps * self.view(now).pricing.step + sum(row.steps * row.compute for row in rows)
        return max(work - (now - self.as_of), 0.0)

    def least_s(
        self,
        edit: Edit,
        now: float,
        *,
        queue: Sequence[Edit] = (),
        alone: bool = False,
        primed: bool = False,
    ) -> float:
        """Return the seconds until the edit's answer if it steps down as far as allowed.

        Args:
            edit: edit to send to this worker now.
            now: time.monotonic().
            queue: edits that are sent before it.
            alone: predict for an idle worker.
            primed: predict as if the worker had the edit's template.
        """
        view = self.view(now)
        if queue:
            view = view.with_sent(queue)
        if alone:
            view = replace(view, running=(), waiting=())
        if primed:
            view = replace(view, templates=None)
        denoised = view.least_share(edit) * predicted_seconds(
            edit, view, view.as_of if alone else now
        )
        return self.times.predict(edit.total_tokens, denoised)

    def add(self, sent: SentEdit) -> None:
        """Write an edit into the ledger."""
        self.sent[sent.request_id] = sent
        self._see_anew()

    def record_answer(self, sent: SentEdit, seconds: float) -> None:
        """Learn from an edit that was answered `seconds` after it was sent."""
        self.times.learn(sent.edit.total_tokens, sent.predicted.denoised_s, seconds)

    def remove(self, sent: SentEdit) -> None:
        """Take an edit off the ledger: it is answered or given up."""
        if self.sent.pop(sent.request_id, None) is not None:
            self._answered.add(sent.request_id)
            self._see_anew()

    def view(self, now: float) -> WorkerView:
        """Return the worker as policies see it: the record, without answered edits, plus new ones.

        An edit that a record has listed and no longer lists is past its last step.
        """
        if self._view is None:
            self._view = self._base().with_sent(s.edit for s in self.sent.values() if not s.listed)
        usable = self.ready and self.breaker.allows(now)
        return self._view if self._view.ready == usable else replace(self._view, ready=usable)

    def _base(self) -> WorkerView:
        status = self.status
        if status is None:
            return WorkerView(self.address, UNPRICED, 1, 0, ready=False)
        adjusted_status = structs.replace(
            status,
            worker=self.address,
            running=self._unanswered(status.running),
            waiting=self._unanswered(status.waiting),
            max_waiting=min(status.max_waiting, self.config.admission.waiting_per_worker),
        )
        templates = self.index.view(self.number)
        return WorkerView.from_status(
            adjusted_status, status.pricing or UNPRICED, self.as_of, templates
        )

    def _unanswered(self, rows: tuple[RowStatus, ...]) -> tuple[RowStatus, ...]:
        if not self._answered:
            return rows
        return tuple(row for row in rows if row.request_id not in self._answered)
