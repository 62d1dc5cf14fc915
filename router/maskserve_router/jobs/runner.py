"""Runs the jobs of a database like any edit, keeps their results and calls their webhooks."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Coroutine, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NamedTuple, TypeVar

import msgspec
from sqlalchemy.exc import SQLAlchemyError

from maskserve_common.errors import (
    DeadlineExceeded,
    EngineFailed,
    InvalidRequest,
    MaskserveError,
    Overloaded,
)
from maskserve_common.logs import about
from maskserve_common.servers.failure import Failure
from maskserve_common.shares import Shares, room
from maskserve_router.api.openai.answers import error_body
from maskserve_router.api.openai.edits import ImageEdits
from maskserve_router.api.openai.form import EditForm
from maskserve_router.api.openai.form_reader import FormReader
from maskserve_router.config import RouterConfig
from maskserve_router.fair_share import FairShare
from maskserve_router.jobs.database import JobDatabase, error_text
from maskserve_router.jobs.owners import Owners
from maskserve_router.jobs.pauses import Pauses
from maskserve_router.jobs.store import JobRecord, JobStore, Lease, Stray, WaitingKey
from maskserve_router.jobs.tables import RUN, TELL
from maskserve_router.jobs.webhooks import Webhooks
from maskserve_router.keys import KeyRing
from maskserve_router.messages.failures import guarded, retry_after
from maskserve_router.messages.job_states import FAILED, SUCCEEDED
from maskserve_router.metrics import Metrics
from maskserve_router.scheduling.admission import Admission

log = logging.getLogger("maskserve.router")
_POLL_S: Final = 1.0
"""Seconds between two checks for jobs of other routers and for jobs whose pause is over."""
_CLEAN_S: Final = 60.0
_RETRY_S: Final = 2.0
"""First pause after a fault of the server; each further one is twice as long."""
_MOST_WEBHOOK_CALLS: Final = 64
"""Webhook calls under way at a time."""
_MOST_RUNS: Final = 32
"""Runs after which a job fails: routers were lost while they ran it, perhaps because of it."""
T = TypeVar("T")


class JobServices(NamedTuple):
    """The parts of the router that jobs use."""

    config: RouterConfig
    database: JobDatabase
    reader: FormReader
    edits: ImageEdits
    keys: KeyRing
    admission: Admission
    fair_share: FairShare
    webhooks: Webhooks
    metrics: Metrics


class JobRunner:
    """Takes waiting jobs from the database and runs them. Use it from the event loop only.

    Args:
        store: the jobs.
        services: the parts of the router that jobs use.
    """

    def __init__(self, store: JobStore, services: JobServices) -> None:
        config = services.config
        self.store, self.services, self._config = store, services, config.jobs
        self._database, self._metrics = services.database, services.metrics
        self.owner = f"{config.name[:24]}-{secrets.token_hex(8)}"
        """Name of this router in the database."""
        self._owners = Owners(self.owner, config.jobs.lease_s)
        self.runs = RunningJobs(RUN, config.jobs.running)
        self.calls = RunningJobs(TELL, _MOST_WEBHOOK_CALLS)
        self._pauses = Pauses()
        self._strays: frozenset[Stray] = frozenset()
        self._wake = asyncio.Event()
        self.tasks = [asyncio.create_task(work()) for work in (self._dispatch, self._maintain)]
        """Tasks in the background: one takes jobs, one maintains the database."""

    def wake(self) -> None:
        """Look for waiting jobs now."""
        self._wake.set()

    def progress_of(self, job: JobRecord) -> dict[str, Any] | None:
        """Return the progress of a job, here or by the database."""
        # The progress of a finished job comes from the database, so that all routers agree.
        leased_job = self.runs.jobs.get(job.id) if job.open else None
        return job.progress if leased_job is None else leased_job.progress or job.progress

    def cancel(self, name: str) -> None:
        """End a job's run here, if there is one."""
        if (leased_job := self.runs.jobs.get(name)) is not None:
            leased_job.task.cancel()

    async def stop(self, grace_s: float) -> None:
        """Take no more jobs, let running jobs end within `grace_s`, and free the others."""
        for task in self.tasks[:1]:
            task.cancel()
        running = [leased_job.task for leased_job in self.runs.jobs.values()]
        if running:
            await asyncio.wait(running, timeout=max(grace_s, 0.0))
        leased_jobs = (*self.runs.jobs.values(), *self.calls.jobs.values())
        remaining_tasks = [*(leased_job.task for leased_job in leased_jobs), *self.tasks]
        for task in remaining_tasks:
            task.cancel()
        await asyncio.gather(*remaining_tasks, return_exceptions=True)
        try:
            await self._database.run(self.store.free, self.owner)
            await self._database.run(self.store.tidy)
        except (SQLAlchemyError, OSError) as error:
            log.warning(
                "jobs could not be released and run again when their leases expire: %s",
                error_text(error),
            )

    async def _dispatch(self) -> None:
        """Take waiting jobs and webhooks whenever a place is free."""
        while True:
            self._wake.clear()
            try:
                await self._take(self.runs, self._run)
                await self._take(self.calls, self._call_webhook)
            except (SQLAlchemyError, OSError) as error:
                if not self._database.problem:
                    log.error("jobs wait: %s", error_text(error))
            except Exception as error:
                guarded("", error)
            await _wait_for(self._wake, _POLL_S)

    async def _take(
        self, running: RunningJobs, work: Callable[[JobRecord], Coroutine[Any, Any, None]]
    ) -> None:
        places = running.places
        if places.total >= places.budget:
            return
        keys, results = await self._database.run(self.store.waiting, running.kind, time.time())
        while places.total < places.budget:
            free = [key for key in keys if self._may_start(running, key, results)]
            if not free:
                return
            turn = min(free, key=lambda key: places.rank(key.scope))
            take = partial(self.store.take, self.owner, running.kind, turn.scope)
            job = await self._database.run(take, time.time())
            if job is None:
                keys.remove(turn)
                continue
            if (previous := running.jobs.get(job.id)) is not None:
                # The job was put back or lost just now: end its previous task first, since a job
                # never runs twice at a time.
                previous.task.cancel()
                await asyncio.wait([previous.task])
            places.book(job.scope)
            task = asyncio.create_task(work(job))
            running.jobs[job.id] = _LeasedJob(job.fence, task)
            if running is self.runs:
                self._pauses.record_begin(job.scope, job.id)
            task.add_done_callback(partial(self._task_ended, running, job))

    def _may_start(self, running: RunningJobs, key: WaitingKey, results: int) -> bool:
        """Return True if a job or webhook of the key may be taken now."""
        if running is self.calls:
            # A webhook call may wait for its timeout, so keys share these places.
            return bool(running.places.room(key.scope))
        # A job waits while there is no room for its result.
        free = room(self._config.byte_limit, results, key.result_bytes, key.scope)
        return free > 0 and self._pauses.may_begin(key.scope, time.monotonic())

    def _task_ended(self, running: RunningJobs, job: JobRecord, task: asyncio.Task[None]) -> None:
        try:
            leased_job = running.jobs.get(job.id)
            if leased_job is not None and leased_job.task is task:
                del running.jobs[job.id]
            if running is self.runs:
                self._pauses.record_end(job.scope, job.id)
            if not task.cancelled() and (error := task.exception()) is not None:
                log.error("job %s: %s", job.id, error_text(error), extra=about(job.id))
        finally:
            running.places.give_back(job.scope)
            self.wake()

    async def _maintain(self) -> None:
        """Maintain the jobs in the database until the router stops: send heartbeats, end tasks of
        jobs that other routers have ended, free jobs of lost routers, delete expired jobs.
        """
        cleaned = -_CLEAN_S
        while True:
            try:
                await self._beat()
                for owner, beat in self._owners.find_lost(
                    await self._database.run(self.store.beats), time.monotonic()
                ):
                    await self._database.run(self.store.free, owner, beat)
                    self.wake()
                total, _ = await self._database.run(self.store.counts, "")
                self._metrics.jobs_waiting.set(total.run)
                self._metrics.jobs_running.set(len(self.runs.jobs))
                if time.monotonic() - cleaned >= min(_CLEAN_S, self._config.keep_s):
                    cleaned = time.monotonic()
                    await self._expire()
                await self._database.run(self.store.tidy)
                self._database.problem = ""
            except (SQLAlchemyError, OSError) as error:
                if not self._database.problem:
                    log.error("jobs wait for their database: %s", error_text(error))
                self._database.problem = type(error).__name__
            except Exception as error:
                guarded("", error)
            await asyncio.sleep(min(_POLL_S, self._config.lease_s / 4))

    async def _beat(self) -> None:
        leases: dict[str, Lease] = {}
        leased: dict[str, _LeasedJob] = {}
        for running in (self.runs, self.calls):
            for name, leased_job in running.jobs.items():
                new = (
                    leased_job.progress
                    if leased_job.progress != leased_job.stored_progress
                    else None
                )
                leases[name] = Lease(running.kind, leased_job.fence, new)
                leased[name] = leased_job
        confirmed_names, strays = await self._database.run(self.store.beat, self.owner, leases)
        for stray in strays & self._strays:  # a stray of the last beat, too: not taken just now
            if not any(stray.name in running.jobs for running in (self.runs, self.calls)):
                await self._database.run(self.store.let_go, stray)
        self._strays = strays
        for name, lease in leases.items():
            if name not in confirmed_names:
                leased[name].task.cancel()
            elif lease.progress is not None:
                leased[name].stored_progress = lease.progress

    async def _expire(self) -> None:
        late = DeadlineExceeded(f"it did not begin in {self._config.max_wait_s:g} s")
        error_object = error_body(late)["error"]
        bounds = self._config.keep_s, self._config.max_wait_s
        while await self._database.run(self.store.expire, time.time(), *bounds, error_object):
            pass

    async def _run(self, job: JobRecord) -> None:
        """Run a job; store its end, or put it back to the waiting ones."""
        result, problem = b"", None
        try:
            result = bytes(await self._answer(job))
            self._pauses.lift(job.scope)
        except Exception as error:
            if not isinstance(error, MaskserveError | Failure):
                error = guarded(job.id, error)
            if (pause_s := self._pause(job, error)) is not None:
                failed = error.code != Overloaded.code
                back = partial(self.store.put_back, job.id, job.fence, failed=failed)
                await self._persist(job, partial(back, time.time() + pause_s))
                return
            problem = error_body(error)["error"]
        state = FAILED if problem else SUCCEEDED
        progress = self.runs.jobs[job.id].progress or job.progress
        end = partial(self.store.end, job.id, state, time.time(), *self._config.retention)
        end = partial(end, fence=job.fence, result=result, error=problem, progress=progress)
        if await self._persist(job, end):
            self._metrics.jobs.labels(state).inc()

    def _pause(self, job: JobRecord, error: MaskserveError | Failure) -> float | None:
        """Return the seconds until a job runs again after an error; None: it has failed."""
        if error.code == Overloaded.code:
            least_s = float(retry_after(error) or 1)
            self._pauses.record_refusal(job.scope, time.monotonic(), least_s)
            return least_s
        hopeless = job.tries >= self._config.retries or job.runs > _MOST_RUNS
        if error.code != EngineFailed.code or hopeless:
            return None
        log.warning(
            "job %s runs again after an error: %s", job.id, error_text(error), extra=about(job.id)
        )
        return _RETRY_S * 2.0**job.tries

    async def _persist(self, job: JobRecord, work: Callable[[], T]) -> T:
        """Run a statement about a job, and repeat it until the database accepts it.

        While the disk is full or the database is away, the job keeps its place and its result.
        """
        is_logged = False
        while True:
            try:
                return await self._database.run(work)
            except (SQLAlchemyError, OSError) as error:
                if not is_logged:
                    text = "job %s: its result waits for the database: %s"
                    log.error(text, job.id, error_text(error), extra=about(job.id))
                is_logged = True
            await asyncio.sleep(_POLL_S)

    async def _answer(self, job: JobRecord) -> msgspec.Raw:
        """Run a job's request and return its answer as JSON."""
        client = self.services.keys.holder(job.scope)
        if client is None:
            raise InvalidRequest("key", "is not known any more")
        if job.runs > _MOST_RUNS:
            raise EngineFailed(f"{_MOST_RUNS} routers were lost while they ran it")
        with ExitStack() as exit_stack:
            exit_stack.enter_context(self.services.admission.hold(client, job.bytes))
            raw = await self._database.run(self.store.form, job.id)
            if raw is None:
                raise asyncio.CancelledError  # its client ended it first
            form = await self.services.fair_share.run(client, len(raw), _form, raw)
            del raw
            progress, leased_job = _JobProgress(form.fields.n), self.runs.jobs[job.id]

            def keep_progress(number: int, meta: Mapping[str, Any]) -> None:
                self._pauses.lift(job.scope)
                if (changed := progress.update(number, meta)) is not None:
                    leased_job.progress = changed

            # A new id for each try: a worker may still run the try of a router that was killed.
            name = job.id if job.fence == 1 else f"{job.id}.{job.fence}"
            return await self.services.edits.answer(
                client, form, job.bytes, name, keep_progress, job.id
            )

    async def _call_webhook(self, job: JobRecord) -> None:
        """Call a job's webhook after its end."""
        assert job.webhook is not None
        client = self.services.keys.holder(job.scope)
        event = {"type": f"job.{job.state}", "timestamp": job.ended, "data": description(job)}
        is_delivered = client is not None and await self.services.webhooks.deliver(
            job.webhook, client.webhook_secret, job.id, event
        )
        self._metrics.webhooks.labels("taken" if is_delivered else "given_up").inc()
        record_delivery = partial(
            self.store.webhook_ended, job.id, job.fence, delivered=is_delivered
        )
        await self._persist(job, record_delivery)


class _JobProgress:
    """Progress of a job, from the events of its pictures.

    Args:
        pictures: number of pictures that the job makes.
    """

    def __init__(self, pictures: int) -> None:
        self._pictures = pictures
        self._counts: dict[int, tuple[int, int]] = {}
        """Picture -> its step and number of steps; in a workflow, its finished nodes and 0."""

    def update(self, number: int, meta: Mapping[str, Any]) -> dict[str, int] | None:
        """Count an event of a picture; return the job's progress, or None if it has not changed."""
        if meta.get("event") == "node":
            nodes, _ = self._counts.get(number, (0, 0))
            self._counts[number] = nodes + 1, 0
            return {"nodes": sum(nodes for nodes, _ in self._counts.values())}
        if not meta.get("steps") or "key" in meta:
            return None
        self._counts[number] = int(meta["step"]), int(meta["steps"])
        step, steps = (sum(column) for column in zip(*self._counts.values(), strict=True))
        # Pictures that have not begun count with the most steps of the others.
        most = max(steps for _, steps in self._counts.values())
        return {"step": step, "steps": max(steps, self._pictures * most)}


@dataclass(slots=True, eq=False)
class _LeasedJob:
    """A job that this router runs, or whose webhook it calls."""

    fence: int
    task: asyncio.Task[None]
    progress: dict[str, Any] | None = None
    """None: it has made none."""
    stored_progress: dict[str, Any] | None = None
    """Progress that is in the database."""


class RunningJobs:
    """Jobs of one kind that this router has taken.

    Args:
        kind: RUN, or TELL for their webhooks.
        most: most jobs at a time.
    """

    def __init__(self, kind: str, most: int) -> None:
        self.kind = kind
        self.places = Shares(most)
        self.jobs: dict[str, _LeasedJob] = {}


def description(job: JobRecord) -> dict[str, Any]:
    """Return the job as clients see it, without its result."""
    return {
        "id": job.id,
        "object": "job",
        "status": job.state,
        "created_at": int(job.created),
        "started_at": None if job.started is None else int(job.started),
        "ended_at": None if job.ended is None else int(job.ended),
        "expires_at": None if job.expires is None else int(job.expires),
        "progress": job.progress,
        "error": job.error,
        "webhook": None if job.webhook is None else {"url": job.webhook, "taken": job.told},
    }


def _form(raw: bytes) -> EditForm:
    return msgspec.msgpack.decode(raw, type=EditForm)


async def _wait_for(event: asyncio.Event, seconds: float) -> None:
    """Wait for an event, at most `seconds`."""
    with suppress(TimeoutError):
        # Not `wait_for`: Python 3.11's loses a cancel that comes with the event.
        async with asyncio.timeout(seconds):
            await event.wait()
