"""The engine's books: each accepted edit and template being primed, from acceptance to its end."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

from maskserve_core.contracts.status_record import Kind, RowStatus
from maskserve_core.planning.flops import Totals
from maskserve_core.worker.ticket import Ticket
from maskserve_engine.cache.reader import EntryReader
from maskserve_engine.families.adapter import Adapter, EditRow, PrimingRow
from maskserve_engine.job import EditJob, Sink
from maskserve_engine.requests.audits import Audit
from maskserve_engine.requests.route import DENSE, Route
from maskserve_engine.requests.templates import Priming
from maskserve_engine.timeline import RequestTimeline


@dataclass(slots=True, eq=False)
class RequestState:
    """One accepted edit. Times are time.monotonic() seconds."""

    job: EditJob
    sink: Sink
    total_tokens: int
    active_tokens: int
    steps: int
    counted: Totals
    """What one step of it costs beside others."""
    submitted: float
    """Put into the engine's inbox."""
    deadline: float | None
    batch_key: Hashable = None
    """Rows of equal keys may share a step."""
    route: Route = DENSE
    """How it runs."""
    reader: EntryReader | None = None
    """Of a cached row, from admission on."""
    made: EditRow | None = None
    """Its row, from admission on."""
    ticket: Ticket | None = None
    waited: bool = False
    """For its template."""
    starts: int = 0
    """Times that it was decided how it runs."""
    queued: float = 0.0
    admitted: float = 0.0
    first_step: float = 0.0
    """When that was done."""
    rows_seen: int = 0
    """Sum over its steps of the rows in the batch."""
    computed_tokens: int = 0
    """By one pass of each of its steps, summed."""
    skipped: int = 0
    """Steps that left all blocks but the first out."""
    plans: Counter[tuple[str, ...]] = field(default_factory=Counter)
    """Steps taken, by the kinds of their blocks."""
    drift: float | None = None
    """Of its template, where that is why it runs dense."""
    audit: Audit | None = None
    """A cached edit that this one makes again; it has no client."""
    said: RowStatus | None = None
    """Its status, kept from step to step."""

    @classmethod
    def of(cls, job: EditJob, sink: Sink, adapter: Adapter) -> RequestState:
        """An edit that is handed to the engine's thread now; its deadline counts from when its
        client was heard.
        """
        request, now = job.request, time.monotonic()
        deadline = None
        if request.settings.deadline_ms is not None:
            left_s = (request.accepted_ns - time.time_ns()) / 1e9
            deadline = now + left_s + request.settings.deadline_ms / 1e3
        tokens = adapter.tokens(job)
        return cls(
            job=job,
            sink=sink,
            total_tokens=tokens.total,
            active_tokens=tokens.active,
            steps=adapter.steps(job),
            batch_key=adapter.batch_key(job),
            counted=adapter.counted(job),
            submitted=now,
            deadline=deadline,
        )

    @property
    def request_id(self) -> str:
        return self.job.request.request_id

    @property
    def row(self) -> EditRow:
        """Once admitted."""
        assert self.made is not None
        return self.made

    @property
    def how(self) -> str:
        """`dense`, `cached` or `wait`."""
        return self.route.how

    @property
    def load_stall(self) -> float:
        """Seconds that its steps have waited for its entries."""
        return 0.0 if self.reader is None else self.reader.stalled

    @property
    def passes(self) -> int:
        """Of the model in one step."""
        return 1 if self.job.negative is None else 2

    @property
    def mask_ratio(self) -> float:
        """Share of tokens that a cached step of it computes, the ring among them."""
        return self.active_tokens / self.total_tokens

    @property
    def step_tokens(self) -> int:
        """Tokens that one step of it computes."""
        return self.passes * (self.active_tokens if self.how == "cached" else self.total_tokens)

    def late(self, now: float) -> bool:
        """Whether its deadline has passed."""
        return self.deadline is not None and self.deadline <= now

    def make_ticket(self) -> Ticket:
        """What the scheduler is to know of it.

        A reproducible edit shares its steps with none: kernels round differently for batches of
        other shapes.
        """
        alone = self.job.request.settings.reproducible
        self.ticket = Ticket(
            request_id=self.request_id,
            steps=self.steps,
            total_tokens=self.passes * self.total_tokens,
            active_tokens=self.step_tokens,
            arrival=self.submitted,
            priority=self.job.request.settings.priority,
            deadline=self.deadline,
            background=self.audit is not None,
            batch_key=(self.batch_key, self.request_id) if alone else self.batch_key,
        )
        return self.ticket

    def release(self) -> None:
        """Let go of what it reads: it ends."""
        if self.reader is not None:
            self.reader.release()

    def count_step(self, rows: int, kinds: tuple[str, ...]) -> tuple[str, ...]:
        """Book a step that was just taken; the kinds of the blocks that it ran.

        Args:
            rows: in the batch.
            kinds: of its blocks.
        """
        if self.row.skipped > self.skipped:
            self.skipped, kinds = self.row.skipped, kinds[:1]
        if not self.rows_seen:
            self.first_step = time.monotonic()
        self.rows_seen += rows
        self.plans[kinds] += 1
        return kinds

    def status(self) -> RowStatus:
        """The one it has had since how it runs was decided, with the steps now left."""
        kind: Kind = "cached" if self.how == "cached" else "dense"
        left = self.steps - (self.made.step if self.made is not None else 0)
        if self.said is None or self.said.kind != kind:
            self.said = RowStatus(
                request_id=self.request_id,
                kind=kind,
                active_tokens=self.step_tokens,
                total_tokens=self.passes * self.total_tokens,
                steps_left=left,
                template_id=self.job.request.template_id,
                priority=self.job.request.settings.priority,
            )
        self.said.steps_left = left
        return self.said

    def final_meta(self, worker: str, model: str) -> dict[str, Any]:
        """META of the finished edit, without what the models after the denoiser add."""
        now, request = time.monotonic(), self.job.request
        return {
            "event": "final",
            "step": self.steps,
            "request_id": request.request_id,
            "seed": request.seed,
            "worker": worker,
            "model": model,
            "template_id": request.template_id,
            "cache_tier": self.route.tier,
            "cache_bytes": {} if self.reader is None else self.reader.loaded,
            "kinds": self.kinds(),
            **({} if self.drift is None else {"drift": round(self.drift, 4)}),
            **self._work(self.steps),
            "timings_ms": {
                **request.timings_ms,
                "queue": _ms(self.admitted - self.submitted),
                "denoise": _ms(now - self.admitted),
                "load_stall": _ms(self.load_stall),
            },
        }

    def kinds(self) -> dict[str, int]:
        """Blocks run, by kind."""
        kinds: Counter[str] = Counter()
        for plan, steps in self.plans.items():
            kinds.update({kind: steps * count for kind, count in Counter(plan).items()})
        return dict(kinds)

    def _work(self, done: int) -> dict[str, Any]:
        """What META and traces both say of it after so many steps."""
        return {
            "steps": self.steps,
            "steps_skipped": self.skipped,
            "mask_ratio": round(self.mask_ratio, 6),
            "mask_ring": self.job.mask_ring,
            "active_tokens": self.active_tokens,
            "total_tokens": self.total_tokens,
            "computed_tokens": self.computed_tokens,
            "cache": self.route.outcome,
            "batch_mean": round(self.rows_seen / done, 3) if done else 0.0,
        }

    def timeline(self) -> RequestTimeline:
        """What it went through, now that it ends."""
        done = 0 if self.made is None else self.made.step
        return RequestTimeline(
            submitted=self.submitted,
            queued=self.queued,
            admitted=self.admitted,
            first_step=self.first_step,
            ended=time.monotonic(),
            waited=self.waited,
            about={
                "request_id": self.request_id,
                "template_id": self.job.request.template_id,
            },
            work={
                "steps_done": done,
                "row": "cached" if self.how == "cached" else "dense",
                **self._work(done),
                "load_stall_ms": _ms(self.load_stall),
            },
        )


@dataclass(slots=True, eq=False)
class PrimingState:
    """A template in the batch: its ticket and row, and what waits for it is in `priming`."""

    priming: Priming
    ticket: Ticket
    total_tokens: int
    counted: Totals
    """What one step of it costs beside others."""
    made: PrimingRow | None = None
    """Its row, from admission on."""

    @property
    def request_id(self) -> str:
        return self.ticket.request_id

    @property
    def row(self) -> PrimingRow:
        """Once admitted."""
        assert self.made is not None
        return self.made

    @property
    def step_tokens(self) -> int:
        """Tokens that one step of it computes: the whole template."""
        return self.total_tokens

    def status(self) -> RowStatus:
        return RowStatus(
            request_id=self.request_id,
            kind="prime",
            active_tokens=self.total_tokens,
            total_tokens=self.total_tokens,
            steps_left=self.ticket.steps - (self.made.step if self.made is not None else 0),
            template_id=self.priming.template_id,
        )


def _ms(seconds: float) -> float:
    return round(1e3 * seconds, 3)
