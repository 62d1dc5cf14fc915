"""The engine: one thread that schedules, loads, runs and updates, step by step (design §4).

Everything it owns (scheduler, rows, cache) is touched by that thread only. Other threads put
commands into its inbox; events leave through the reply thread.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

from maskserve_core.config import Config, model_name
from maskserve_core.errors import (
    Cancelled,
    DeadlineExceeded,
    EngineFailed,
    MaskserveError,
    Overloaded,
)
from maskserve_core.masks import active_tokens
from maskserve_core.scheduler import StepScheduler, Ticket
from maskserve_core.status import StatusWriter, WorkerStatus
from maskserve_engine.adapter import Adapter, load_adapter
from maskserve_engine.cache import TemplateCache
from maskserve_engine.edits import Edit, PrimingEdit
from maskserve_engine.job import EditJob, Failed, Final, Preview, Progress, Sink
from maskserve_engine.priming_prompt import PromptEmbedding, read_priming_prompt
from maskserve_engine.replies import Replies
from maskserve_engine.revision import model_revision

_log = logging.getLogger(__name__)
T = TypeVar("T")
_FAILED_STEPS = 3
"""Steps in a row in which every row failed, after which the engine gives itself up."""


class Engine:
    """Runs edits of one model on one device.

    Args:
        config: of this worker.
        adapter: the model.
        prompt: reads the priming prompt's embedding; by default from the runtime folder.
    """

    def __init__(
        self,
        config: Config,
        adapter: Adapter,
        prompt: Callable[[], PromptEmbedding | None] | None = None,
        revision: str = "",
    ) -> None:
        self.config, self.adapter = config, adapter
        runtime = Path(config.runtime_dir) if config.runtime_dir else None
        if prompt is None:
            prompt = _reader(runtime)
        self.cache = TemplateCache(
            config.cache,
            adapter,
            revision,
            str(getattr(adapter, "dtype", "")),
            config.model.num_inference_steps,
            prompt,
        )
        self.scheduler = StepScheduler(
            config.engine.max_rows, config.engine.max_waiting, config.cache.priming_share
        )
        self.counters: dict[str, float] = {
            "steps_total": 0,
            "edits_total": 0,
            "active_tokens_total": 0,
            "dense_rows_total": 0,
            "cached_rows_total": 0,
            "step_seconds_total": 0.0,
        }
        self.last_step_s = 0.0
        self._edits: dict[str, Edit] = {}
        self._primings: dict[str, PrimingEdit] = {}  # by ticket id
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._replies = Replies()
        self._status = StatusWriter(runtime / "status") if runtime else None
        self._state, self._failed_steps, self._published = "loading", 0, 0.0
        self._draining, self._stop = False, False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    @classmethod
    def load(cls, config: Config) -> Engine:
        """Load the model; slow.

        Raises:
            ConfigError: the model cannot be served.
        """
        return cls(config, load_adapter(config), revision=model_revision(config.model.path))

    # Called from any thread.

    def start(self) -> None:
        self._replies.start()
        self._thread.start()

    def submit(self, job: EditJob, sink: Sink) -> None:
        """Take an edit; its answer, an error included, comes through `sink`."""
        if not self._thread.is_alive():
            sink(Failed(EngineFailed("the engine has stopped")))
            return
        self._inbox.put(lambda: self._accept(job, sink))

    def cancel(self, request_id: str) -> bool:
        """Withdraw an edit; False when none of that name is held. Its sink gets CANCELLED."""
        known = request_id in self._edits
        self._inbox.put(lambda: self._cancel(request_id))
        return known

    def ask(self, question: Callable[[], T]) -> Future[T]:
        """Have the engine thread answer between two steps."""
        answer: Future[T] = Future()

        def reply() -> None:
            try:
                answer.set_result(question())
            except Exception as error:
                answer.set_exception(error)

        self._inbox.put(reply)
        return answer

    def heartbeat(self) -> Future[dict[str, Any]]:
        return self.ask(lambda: {"state": self._state, "edits": len(self._edits), **self.counters})

    def templates(self) -> Future[list[dict[str, object]]]:
        return self.ask(self.cache.templates)

    def evict(self, template_id: str) -> Future[int]:
        """Bytes given back."""
        return self.ask(lambda: self.cache.evict(template_id))

    def drain(self) -> None:
        """Refuse new edits from now on; accepted ones go on."""

        def drain() -> None:
            self._draining = True
            self._publish()

        self._inbox.put(drain)

    def close(self, grace_s: float) -> None:
        """Drain, wait at most `grace_s` for accepted edits, and end both threads."""
        self.drain()
        end = time.monotonic() + grace_s
        while self._edits and self._thread.is_alive() and time.monotonic() < end:
            time.sleep(0.01)
        self._inbox.put(self._halt)
        if self._thread.is_alive():
            self._thread.join(grace_s + 30.0)
        self._replies.close(5.0)

    # Called from the engine thread only.

    def _run(self) -> None:
        self._state = "ready"
        self._publish()
        try:
            while not self._stop:
                self._take_commands()
                running = self._schedule()
                if running:
                    self._load(running)
                    self._step(running)
                    self._update(running)
                self._publish()
        except Exception:
            _log.exception("the engine has failed")
            self._state = "failed"
            self._fail_all(EngineFailed("the engine has failed; the worker will be restarted"))
        finally:
            self._publish(final=True)

    def _take_commands(self) -> None:
        """Run what came in; wait for something when no row is there to run."""
        idle = len(self.scheduler) == 0
        try:
            command = self._inbox.get(timeout=self.config.engine.heartbeat_s if idle else 0)
            while True:
                command()
                command = self._inbox.get_nowait()
        except queue.Empty:
            pass

    def _schedule(self) -> list[Edit | PrimingEdit]:
        """Ask the scheduler, tell the expired, make rows for the admitted."""
        now = time.monotonic()
        for request_id in [r for r, e in self._edits.items() if _late(e, now)]:
            self._drop(request_id, DeadlineExceeded("settings.deadline_ms passed while waiting"))
        decision = self.scheduler.schedule(now)
        for ticket in decision.expired:
            self._end(ticket.request_id, DeadlineExceeded("settings.deadline_ms has passed"))
        for ticket in decision.admitted:
            self._admit(ticket)
        held: list[Edit | PrimingEdit | None] = [
            self._edits.get(t.request_id) or self._primings.get(t.request_id)
            for t in decision.running
        ]
        return [edit for edit in held if edit is not None and edit.row is not None]

    def _load(self, running: list[Edit | PrimingEdit]) -> None:
        """Bring in the entries that the step's rows read."""
        for edit in running:
            begin = time.perf_counter()
            edit.row.load()
            if isinstance(edit, Edit):
                edit.load_stall += time.perf_counter() - begin

    def _step(self, running: list[Edit | PrimingEdit]) -> None:
        """One model call for all rows; when it fails, one call each, so that one bad row or a
        batch too large for the memory costs nobody else.
        """
        begin = time.perf_counter()
        try:
            self.adapter.step([edit.row for edit in running], self._kinds())
            self._failed_steps = 0
        except Exception:
            _log.exception("a step of %d rows failed; trying its rows one by one", len(running))
            self._step_alone(running)
        self.last_step_s = time.perf_counter() - begin
        self.counters["step_seconds_total"] += self.last_step_s

    def _step_alone(self, running: list[Edit | PrimingEdit]) -> None:
        failed = 0
        for edit in list(running):
            try:
                self.adapter.step([edit.row], self._kinds())
            except Exception as error:
                _log.exception("request %s: its step failed", edit.request_id)
                running.remove(edit)
                failed += 1
                if isinstance(edit, PrimingEdit):
                    self._end_priming(edit, complete=False, unfit=True)
                else:
                    reason = EngineFailed(f"a denoising step failed ({type(error).__name__})")
                    self._end(edit.request_id, reason)
        self._failed_steps = 0 if running else self._failed_steps + 1
        if self._failed_steps >= _FAILED_STEPS:
            raise RuntimeError(f"{_FAILED_STEPS} steps in a row failed for every row")

    def _update(self, running: list[Edit | PrimingEdit]) -> None:
        """Count, tell clients how far they are, and let finished rows leave."""
        self.counters["steps_total"] += 1
        kinds = self._kinds()
        for edit in running:
            if isinstance(edit, PrimingEdit):
                self._update_priming(edit)
                continue
            edit.rows_seen += len(running)
            cached = edit.how == "cached" and edit.entries[edit.row.step - 1] is not None
            edit.kinds.update(kinds if cached else ("dense",) * self.adapter.blocks)
            self.counters["cached_rows_total" if cached else "dense_rows_total"] += 1
            computed = edit.active_tokens if cached else edit.total_tokens
            self.counters["active_tokens_total"] += computed
            if edit.row.step == edit.steps:
                self._finish(edit)
            else:
                self._tell_progress(edit)

    def _accept(self, job: EditJob, sink: Sink) -> None:
        try:
            self._enter(self._make_edit(job, sink))
        except MaskserveError as error:
            self._replies.send(sink, Failed(error))
        except Exception:
            _log.exception("request %s could not be accepted", job.request.request_id)
            self._replies.send(sink, Failed(EngineFailed("the edit could not be prepared")))

    def _make_edit(self, job: EditJob, sink: Sink) -> Edit:
        request, now = job.request, time.monotonic()
        deadline = None
        if request.settings.deadline_ms is not None:
            left_s = (request.accepted_ns - time.time_ns()) / 1e9
            deadline = now + left_s + request.settings.deadline_ms / 1e3
        token = self.adapter.facts.token_pixels
        height, width = job.edit_mask.shape
        return Edit(
            job=job,
            sink=sink,
            total_tokens=(height // token) * (width // token),
            active_tokens=len(active_tokens(job.edit_mask, token)),
            steps=self.adapter.steps(job),
            submitted=now,
            deadline=deadline,
        )

    def _enter(self, edit: Edit) -> None:
        """Decide how the edit runs and queue it."""
        if self._draining:
            raise Overloaded("the worker is draining; send the edit to another or try again later")
        held = len(self._edits) - len(self.scheduler.running)
        if held >= self.config.engine.max_waiting + self.config.engine.max_rows:
            raise Overloaded(f"{held} edits are waiting already; try again later")
        route = self.cache.route(edit.job, edit.active_tokens / edit.total_tokens)
        edit.how, edit.cache, edit.entries = route.how, route.outcome, route.entries
        if route.prime:
            self._prime(edit.job, urgent=route.how == "wait")
        priming = self.cache.priming.get(self.cache.key_of(edit.job))
        if edit.how == "wait" and priming is None:
            edit = self._without_cache(edit)
        if edit.how != "wait":
            self.scheduler.submit(edit.make_ticket())
        elif priming is not None:
            if edit.request_id in self._edits:
                self.scheduler.submit(edit.make_ticket())  # raises: the id is in use
            priming.waiting.append(edit.request_id)
        self._edits[edit.request_id] = edit

    def _without_cache(self, edit: Edit) -> Edit:
        """An edit that wanted to wait for a template that cannot be primed."""
        if edit.job.request.settings.cache == "require":
            raise EngineFailed(
                "SETTINGS.cache is 'require', but the template could not be primed (it does not "
                "fit the cache's budget, or the worker is short of memory)"
            )
        edit.how, edit.cache = "dense", "miss"
        return edit

    def _prime(self, job: EditJob, *, urgent: bool) -> None:
        """Queue a template's priming, ahead of live rows when an edit waits for it."""
        row_id = f"prime:{self.cache.key_of(job)}"
        priming = self.cache.begin(job, row_id)
        if priming is None:
            return
        _, height, width = job.moments.shape
        tokens = height * width // self.adapter.facts.patch**2
        ticket = Ticket(
            request_id=row_id,
            steps=len(priming.anchors),
            total_tokens=tokens,
            active_tokens=tokens,
            arrival=time.monotonic(),
            priority=job.request.settings.priority,
            background=not urgent,
        )
        edit = PrimingEdit(priming, ticket, tokens)
        self._primings[row_id] = edit
        try:
            self.scheduler.submit(ticket)
        except Overloaded:
            self._primings.pop(row_id)
            self.cache.end(priming, complete=False)

    def _admit(self, ticket: Ticket) -> None:
        """Make the row; an edit whose row cannot be made is answered, and nobody else is hurt."""
        edit = self._edits.get(ticket.request_id)
        try:
            if edit is not None:
                edit.admitted = time.monotonic()
                edit.row = self._make_row(edit)
                return
            priming = self._primings[ticket.request_id]
            prompt = self.cache.prompt()
            assert prompt is not None, "priming began without its prompt"
            of = priming.priming
            priming.row = self.adapter.priming_row(
                of.job,
                of.anchors,
                prompt,
                of.noise_seed,
                self.config.cache.entry_kind,
                self.config.cache.entry_format,
            )
        except Exception:
            _log.exception("request %s: its row could not be made", ticket.request_id)
            if edit is not None:
                self._end(ticket.request_id, EngineFailed("the edit could not be prepared"))
            else:
                self._end_priming(self._primings[ticket.request_id], complete=False, unfit=True)

    def _make_row(self, edit: Edit) -> Any:
        if edit.how == "cached":
            seed = self.cache.noise_seed(edit.job)
            return self.adapter.cached_row(edit.job, edit.entries, seed)
        return self.adapter.dense_row(edit.job)

    def _kinds(self) -> tuple[str, ...]:
        """Kind per block for rows that use entries."""
        kind = "kv" if self.config.cache.entry_kind == "kv" else "project"
        return (kind,) * self.adapter.blocks

    def _tell_progress(self, edit: Edit) -> None:
        settings, step = edit.job.request.settings, edit.row.step
        if settings.preview_every and step % settings.preview_every == 0:
            latents = self.adapter.estimate(edit.row)
            self._replies.send(edit.sink, Preview(step, edit.steps, latents))
        elif settings.progress:
            self._replies.send(edit.sink, Progress(step, edit.steps))

    def _finish(self, edit: Edit) -> None:
        latents = self.adapter.result(edit.row)
        meta = edit.final_meta(self.config.worker, model_name(self.config))
        self.counters["edits_total"] += 1
        self.scheduler.finish(edit.request_id)
        self._edits.pop(edit.request_id)
        self._replies.send(edit.sink, Final(latents, meta))

    def _update_priming(self, edit: PrimingEdit) -> None:
        if not self.cache.keep(edit.priming, edit.row.done.pop()):
            self._end_priming(edit, complete=False, unfit=True)
        elif edit.row.step == edit.row.steps:
            self._end_priming(edit, complete=True)

    def _end_priming(self, edit: PrimingEdit, *, complete: bool, unfit: bool = False) -> None:
        """The template is in the store or will not be; those who waited go on either way."""
        self._primings.pop(edit.request_id)
        self.scheduler.cancel(edit.request_id)
        self.cache.end(edit.priming, complete=complete, unfit=unfit)
        for request_id in edit.priming.waiting:
            waited = self._edits.pop(request_id, None)
            if waited is None:
                continue
            try:
                self._enter_waited(waited, complete=complete)
            except MaskserveError as error:
                self._replies.send(waited.sink, Failed(error))

    def _enter_waited(self, edit: Edit, *, complete: bool) -> None:
        if complete:
            route = self.cache.route(edit.job, edit.active_tokens / edit.total_tokens)
            if route.how == "cached":
                edit.how, edit.cache, edit.entries = route.how, route.outcome, route.entries
        if edit.how == "wait":
            edit = self._without_cache(edit)
        self.scheduler.submit(edit.make_ticket())
        self._edits[edit.request_id] = edit

    def _cancel(self, request_id: str) -> None:
        if request_id in self._edits:
            self._drop(request_id, Cancelled("the edit was cancelled"))

    def _drop(self, request_id: str, error: MaskserveError) -> None:
        self.scheduler.cancel(request_id)
        self._end(request_id, error)

    def _end(self, request_id: str, error: MaskserveError) -> None:
        """Answer an edit that will not finish; its row and entries are let go."""
        self.scheduler.cancel(request_id)
        edit = self._edits.pop(request_id, None)
        if edit is not None:
            self._replies.send(edit.sink, Failed(error))

    def _halt(self) -> None:
        self._stop = True
        self._state = "stopped"
        self._fail_all(Overloaded("the worker is stopping; send the edit to another"))

    def _fail_all(self, error: MaskserveError) -> None:
        for request_id in list(self._edits):
            self._end(request_id, error)

    def _publish(self, *, final: bool = False) -> None:
        if self._status is None:
            return
        state = self._state
        if state == "ready" and self._draining:
            state = "draining"
        running = [t.request_id for t in self.scheduler.running]
        held: dict[str, Edit | PrimingEdit] = {**self._edits, **self._primings}
        self._status.write(
            WorkerStatus(
                worker=self.config.worker,
                model=model_name(self.config),
                state=state,
                max_rows=self.config.engine.max_rows,
                max_waiting=self.config.engine.max_waiting,
                running=tuple(held[r].status() for r in running if r in held),
                waiting=tuple(held[r].status() for r in held if r not in set(running)),
                templates={"device": self.cache.template_ids()},
                tier_bytes={"device": self.cache.store.nbytes},
                counters={
                    **self.counters,
                    "cache_hits_total": self.cache.hits,
                    "cache_misses_total": self.cache.misses,
                    "cache_evictions_total": self.cache.store.evictions,
                },
            )
        )
        if final:
            self._status.close()


def _late(edit: Edit, now: float) -> bool:
    """Whether an edit that waits outside the scheduler has passed its deadline."""
    return edit.how == "wait" and edit.deadline is not None and edit.deadline <= now


def _reader(runtime: Path | None) -> Callable[[], PromptEmbedding | None]:
    held: list[PromptEmbedding] = []

    def read() -> PromptEmbedding | None:
        if not held and runtime is not None:
            found = read_priming_prompt(runtime / "priming_prompt.npz")
            if found is not None:
                held.append(found)
        return held[0] if held else None

    return read
