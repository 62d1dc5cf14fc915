"""Accepts jobs, runs them like any edit, keeps their results and calls their webhooks."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import secrets
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec
from sqlalchemy.exc import SQLAlchemyError

from maskserve_common.config import ConfigError
from maskserve_common.contracts.settings import parse_settings
from maskserve_common.errors import (
    DeadlineExceeded,
    EngineFailed,
    InvalidRequest,
    MaskserveError,
    Overloaded,
)
from maskserve_common.files.store import make_private
from maskserve_common.logs import about
from maskserve_common.shares import Shares, room
from maskserve_router.api.openai.answers import NotFound, error_body
from maskserve_router.api.openai.edits import ImageEdits
from maskserve_router.api.openai.form import EditForm
from maskserve_router.config import RouterConfig
from maskserve_router.fair_share import FairShare
from maskserve_router.jobs.owners import Owners
from maskserve_router.jobs.pauses import Pauses
from maskserve_router.jobs.store import (
    RUN,
    TELL,
    JobRecord,
    JobStore,
    Lease,
    OtherRequest,
    QuotaReached,
    Stray,
    WaitingKey,
    open_store,
)
from maskserve_router.jobs.webhooks import Webhooks
from maskserve_router.key_holder import Daily, KeyHolder
from maskserve_router.keys import KeyRing
from maskserve_router.messages.failures import (
    Failure,
    NotSupported,
    RetryLater,
    guarded,
    retry_after,
)
from maskserve_router.messages.job_states import CANCELLED, FAILED, QUEUED, SUCCEEDED
from maskserve_router.metrics import Metrics
from maskserve_router.scheduling.admission import Admission

log = logging.getLogger("maskserve.router")
_SEED_BITS: Final = 32
_LARGE: Final = 2**30
"""A size in bytes that always takes a thread, because a small file can have many pixels."""
_POLL_S: Final = 1.0
"""Seconds between two checks for jobs of other routers and for jobs whose pause is over."""
_CLEAN_S: Final = 60.0
_RETRY_S: Final = 2.0
"""First pause after a fault of the server; each further one is twice as long."""
_MOST_WEBHOOK_CALLS: Final = 64
"""Webhook calls under way at a time."""
_MOST_RUNS: Final = 32
"""Runs after which a job fails: routers were lost while they ran it, perhaps because of it."""
_ENCODER = msgspec.msgpack.Encoder(order="deterministic")
T = TypeVar("T")


class JobNotFound(NotFound):
    """The caller has no job with this id."""

    openai_code = "job_not_found"

    def __init__(self) -> None:
        super().__init__("id", "names no job of this key")


class Jobs:
    """The jobs of one router. Use it from the event loop only.

    Args:
        config: configuration of the router.
        edits: reads forms and answers them.
        keys: finds the key holder of a job.
        admission: counts bytes in memory.
        fair_share: threads that encode and decode forms and query the database for clients.
        webhooks: calls webhooks when jobs end.
        metrics: counters of jobs.
    """

    def __init__(
        self,
        config: RouterConfig,
        edits: ImageEdits,
        keys: KeyRing,
        admission: Admission,
        fair_share: FairShare,
        webhooks: Webhooks,
        metrics: Metrics,
    ) -> None:
        self._config = config.jobs
        self._place, self._disabled_reason = database_of(config)
        self._edits, self._keys, self._admission = edits, keys, admission
        self._fair_share, self._webhooks, self._metrics = fair_share, webhooks, metrics
        self._owner = f"{config.name[:24]}-{secrets.token_hex(8)}"
        self._owners = Owners(self._owner, config.jobs.lease_s)
        self._store: JobStore | None = None
        # Statements wait for the disk. Two threads, so that a large picture delays no heartbeat.
        self._threads = ThreadPoolExecutor(2, "jobs")
        self._runs = _RunningJobs(RUN, config.jobs.running)
        self._calls = _RunningJobs(TELL, _MOST_WEBHOOK_CALLS)
        self._pauses = Pauses()
        self._strays: frozenset[Stray] = frozenset()
        self._problem = ""
        """Error of the database while it does not work; empty: it works."""
        self._wake = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Open the configured database and continue the jobs in it.

        Raises:
            ConfigError: the configured database cannot be opened.
        """
        jobs = self._config
        try:
            if jobs.database_file:
                self._place = Path(jobs.database_file).read_text().strip()
            if jobs.database or jobs.database_file:
                await self._open()
            elif self._place:
                make_private(Path(self._place).parent)
                if Path(self._place).exists():
                    await self._open()
                elif not os.access(Path(self._place).parent, os.W_OK):
                    raise PermissionError(f"{self._place} cannot be written")
        except (SQLAlchemyError, OSError, UnicodeDecodeError) as error:
            if jobs.database or jobs.database_file:
                key = "database" if jobs.database else "database_file"
                raise ConfigError(f"[jobs] {key}: {_error_text(error)}") from None
            self._place, self._disabled_reason = "", f"are not kept here: {_error_text(error)}"
            log.warning("the router takes no jobs: %s", _error_text(error))

    @property
    def state(self) -> str:
        """`on`, `off` or an error of the database, for health checks."""
        if self._problem:
            return f"the database does not answer: {self._problem}"
        return "off" if self._disabled_reason else "on"

    async def stop(self, grace_s: float) -> None:
        """Accept no more jobs, let running jobs end within `grace_s`, and free the others."""
        for task in self._tasks[:1]:
            task.cancel()
        running = [leased_job.task for leased_job in self._runs.jobs.values()]
        if running:
            await asyncio.wait(running, timeout=max(grace_s, 0.0))
        leased_jobs = (*self._runs.jobs.values(), *self._calls.jobs.values())
        remaining_tasks = [*(leased_job.task for leased_job in leased_jobs), *self._tasks]
        for task in remaining_tasks:
            task.cancel()
        await asyncio.gather(*remaining_tasks, return_exceptions=True)
        if self._store is not None:
            try:
                await self._run_in_thread(self._store.free, self._owner)
                await self._run_in_thread(self._store.tidy)
            except (SQLAlchemyError, OSError) as error:
                log.warning(
                    "jobs could not be released and run again when their leases expire: %s",
                    _error_text(error),
                )
            await self._run_in_thread(self._store.close)
            self._store = None
        self._threads.shutdown(wait=False)
        await self._webhooks.close()

    # Calls of clients.

    async def add(
        self, form: EditForm, client: KeyHolder, idempotency: str | None
    ) -> tuple[JobRecord, bool]:
        """Store a job; it runs in its turn.

        Args:
            form: the request.
            client: holder of the key that sent it.
            idempotency: the client's Idempotency-Key.

        Returns:
            The job, and whether it is new.

        Raises:
            InvalidRequest: naming the field.
            RetryLater: there is no room for it, or its key has reached its daily limit.
        """
        if form.fields.stream:
            raise InvalidRequest("stream", "is given with a job", "false")
        parse_settings(msgspec.json.encode(form.settings))
        webhook = form.fields.webhook
        if webhook is not None:
            self._webhooks.check(webhook, client.webhook_secret)
        store = await self._opened()
        await self._fair_share.run(client, _LARGE, self._edits.check_pictures, form)
        pictures = sum(map(len, (form.image, form.mask or b"", *form.references, *form.control)))
        digest = await self._fair_share.run(client, pictures, _digest, form)
        seeded = form
        if form.settings.get("seed") is None:  # drawn now, so that each try is the same edit
            seed = secrets.randbits(_SEED_BITS)
            seeded = replace(form, settings={**form.settings, "seed": seed})
        encoded_form = await self._fair_share.run(client, pictures, _ENCODER.encode, seeded)
        megapixels = await self._fair_share.run(client, pictures, self._edits.work, form)
        work = Daily(1, len(encoded_form), megapixels)
        await self._check_room(store, client, len(encoded_form))
        job = JobRecord(
            secrets.token_hex(16), client.scope, QUEUED, time.time(), len(encoded_form), webhook
        )
        add = partial(store.add, job, encoded_form, digest, idempotency, work, client.daily)
        try:
            added = await self._query(client, add)
        except OtherRequest:
            raise InvalidRequest(
                "Idempotency-Key", "was used for another request", "one key for one request"
            ) from None
        except QuotaReached as reached:
            raise _quota_error(client, reached.name) from None
        self._wake.set()
        return added

    async def _check_room(self, store: JobStore, client: KeyHolder, form_bytes: int) -> None:
        """Check that a client's new job fits.

        Raises:
            RetryLater: there is no room for its form, or the client has too many unfinished jobs.
        """
        total, client_counts = await self._query(client, store.counts, client.scope)
        free = room(self._byte_limit, total.form_bytes, client_counts.form_bytes, client.scope)
        if form_bytes > free:
            raise RetryLater(
                f"waiting jobs already have {total.form_bytes} bytes; try again later", 60.0
            )
        if client_counts.open >= self._config.keep_jobs:
            raise RetryLater(f"{client_counts.open} jobs are unfinished; try again later", 60.0)

    async def get(self, name: str, client: KeyHolder) -> JobRecord:
        """Return a client's job.

        Raises:
            JobNotFound: it has no job with this id.
        """
        job = await self._query(client, (await self._opened()).get, name)
        if job is None or (job.scope != client.scope and not client.admin):
            raise JobNotFound
        # The progress of a finished job comes from the database, so that all routers agree.
        leased_job = self._runs.jobs.get(name) if job.open else None
        return (
            job
            if leased_job is None
            else replace(job, progress=leased_job.progress or job.progress)
        )

    async def result(self, job: JobRecord, client: KeyHolder) -> bytes | None:
        """Return the answer's JSON; None: there is none."""
        return await self._query(client, (await self._opened()).result, job.id)

    async def listed(self, client: KeyHolder, limit: int, after: str | None) -> bytes:
        """Return a page of a client's jobs as JSON, newest first, with its usage of today.

        Raises:
            JobNotFound: it has no job `after`.
        """
        page = partial(_listed, await self._opened(), client.scope, limit, after)
        return await self._query(client, page)

    async def end(self, name: str, client: KeyHolder) -> JobRecord | None:
        """Cancel an open job, or delete a finished one and return None.

        Raises:
            JobNotFound: the client has no job with this id.
        """
        job, store = await self.get(name, client), await self._opened()
        cancel = partial(store.end, name, CANCELLED, time.time(), *self._retention, fence=None)
        if job.open and await self._query(client, cancel):
            self._count(CANCELLED)
            if (leased_job := self._runs.jobs.get(name)) is not None:
                leased_job.task.cancel()
            self._wake.set()
            return await self.get(name, client)
        await self._query(client, store.remove, name)
        return None

    # The database.

    @property
    def _byte_limit(self) -> int:
        """Limit on the bytes of all unfinished requests, and also on those of all results."""
        return self._config.max_bytes // 2

    @property
    def _retention(self) -> tuple[float, int]:
        """Seconds that finished jobs are kept, and the number kept for each key."""
        return self._config.keep_s, self._config.keep_jobs

    async def _opened(self) -> JobStore:
        if self._store is not None:
            return self._store
        if not self._place:
            raise NotSupported("jobs", self._disabled_reason)
        with _storage_errors():
            return await self._open()

    async def _open(self) -> JobStore:
        store = await self._run_in_thread(open_store, self._place)
        if self._store is None:
            self._store = store
            self._tasks = [asyncio.create_task(work()) for work in (self._dispatch, self._maintain)]
        else:  # two calls opened it at the same time
            store.close()
        return self._store

    async def _query(self, client: KeyHolder, work: Callable[..., T], *arguments: Any) -> T:
        """Query the store in the client's turn; raises RetryLater if the database fails."""
        with _storage_errors():
            return await self._fair_share.ask(client, work, *arguments)

    async def _run_in_thread(self, work: Callable[..., T], *arguments: Any) -> T:
        loop = asyncio.get_running_loop()
        return await asyncio.shield(loop.run_in_executor(self._threads, work, *arguments))

    # Tasks in the background.

    async def _dispatch(self) -> None:
        """Take waiting jobs and webhooks whenever a place is free."""
        while True:
            self._wake.clear()
            try:
                await self._take(self._runs, self._run)
                await self._take(self._calls, self._call_webhook)
            except (SQLAlchemyError, OSError) as error:
                if not self._problem:
                    log.error("jobs wait: %s", _error_text(error))
            except Exception as error:
                guarded("", error)
            await _wait_for(self._wake, _POLL_S)

    async def _take(
        self, running: _RunningJobs, work: Callable[[JobRecord], Coroutine[Any, Any, None]]
    ) -> None:
        assert self._store is not None
        places = running.places
        if places.total >= places.budget:
            return
        keys, results = await self._run_in_thread(self._store.waiting, running.kind, time.time())
        while places.total < places.budget:
            free = [key for key in keys if self._may_start(running, key, results)]
            if not free:
                return
            turn = min(free, key=lambda key: places.rank(key.scope))
            take = partial(self._store.take, self._owner, running.kind, turn.scope)
            job = await self._run_in_thread(take, time.time())
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
            if running is self._runs:
                self._pauses.began(job.scope, job.id)
            task.add_done_callback(partial(self._task_ended, running, job))

    def _may_start(self, running: _RunningJobs, key: WaitingKey, results: int) -> bool:
        """Return True if a job or webhook of the key may be taken now."""
        if running is self._calls:
            # A webhook call may wait for its timeout, so keys share these places.
            return bool(running.places.room(key.scope))
        # A job waits while there is no room for its result.
        free = room(self._byte_limit, results, key.result_bytes, key.scope)
        return free > 0 and self._pauses.may_begin(key.scope, time.monotonic())

    def _task_ended(self, running: _RunningJobs, job: JobRecord, task: asyncio.Task[None]) -> None:
        try:
            leased_job = running.jobs.get(job.id)
            if leased_job is not None and leased_job.task is task:
                del running.jobs[job.id]
            if running is self._runs:
                self._pauses.ended(job.scope, job.id)
            if not task.cancelled() and (error := task.exception()) is not None:
                log.error("job %s: %s", job.id, _error_text(error), extra=about(job.id))
        finally:
            running.places.give_back(job.scope)
            self._wake.set()

    async def _maintain(self) -> None:
        """Maintain the jobs in the database until the router stops: send heartbeats, end tasks of
        jobs that other routers have ended, free jobs of lost routers, delete expired jobs.
        """
        assert self._store is not None
        cleaned = -_CLEAN_S
        while True:
            try:
                await self._beat()
                for owner, beat in self._owners.lost(
                    await self._run_in_thread(self._store.beats), time.monotonic()
                ):
                    await self._run_in_thread(self._store.free, owner, beat)
                    self._wake.set()
                total, _ = await self._run_in_thread(self._store.counts, "")
                self._metrics.jobs_waiting.set(total.run)
                self._metrics.jobs_running.set(len(self._runs.jobs))
                if time.monotonic() - cleaned >= min(_CLEAN_S, self._config.keep_s):
                    cleaned = time.monotonic()
                    await self._expire()
                await self._run_in_thread(self._store.tidy)
                self._problem = ""
            except (SQLAlchemyError, OSError) as error:
                if not self._problem:
                    log.error("jobs wait for their database: %s", _error_text(error))
                self._problem = type(error).__name__
            except Exception as error:
                guarded("", error)
            await asyncio.sleep(min(_POLL_S, self._config.lease_s / 4))

    async def _beat(self) -> None:
        assert self._store is not None
        leases: dict[str, Lease] = {}
        leased: dict[str, _LeasedJob] = {}
        for running in (self._runs, self._calls):
            for name, leased_job in running.jobs.items():
                new = (
                    leased_job.progress
                    if leased_job.progress != leased_job.stored_progress
                    else None
                )
                leases[name] = Lease(running.kind, leased_job.fence, new)
                leased[name] = leased_job
        confirmed_names, strays = await self._run_in_thread(self._store.beat, self._owner, leases)
        for stray in strays & self._strays:  # a stray of the last beat, too: not taken just now
            if not any(stray.name in running.jobs for running in (self._runs, self._calls)):
                await self._run_in_thread(self._store.let_go, stray)
        self._strays = strays
        for name, lease in leases.items():
            if name not in confirmed_names:
                leased[name].task.cancel()
            elif lease.progress is not None:
                leased[name].stored_progress = lease.progress

    async def _expire(self) -> None:
        assert self._store is not None
        late = DeadlineExceeded(f"it did not begin in {self._config.max_wait_s:g} s")
        error_object = error_body(late)["error"]
        bounds = self._config.keep_s, self._config.max_wait_s
        while await self._run_in_thread(self._store.expire, time.time(), *bounds, error_object):
            pass

    async def _run(self, job: JobRecord) -> None:
        """Run a job; store its end, or put it back to the waiting ones."""
        assert self._store is not None
        result, problem = b"", None
        try:
            result = bytes(await self._answer(job))
            self._pauses.found_room(job.scope)
        except Exception as error:
            if not isinstance(error, MaskserveError | Failure):
                error = guarded(job.id, error)
            if (pause_s := self._pause(job, error)) is not None:
                failed = error.code != Overloaded.code
                back = partial(self._store.put_back, job.id, job.fence, failed=failed)
                await self._persist(job, partial(back, time.time() + pause_s))
                return
            problem = error_body(error)["error"]
        state = FAILED if problem else SUCCEEDED
        progress = self._runs.jobs[job.id].progress or job.progress
        end = partial(self._store.end, job.id, state, time.time(), *self._retention)
        end = partial(end, fence=job.fence, result=result, error=problem, progress=progress)
        if await self._persist(job, end):
            self._count(state)

    def _pause(self, job: JobRecord, error: MaskserveError | Failure) -> float | None:
        """Return the seconds until a job runs again after an error; None: it has failed."""
        if error.code == Overloaded.code:
            least_s = float(retry_after(error) or 1)
            self._pauses.refused(job.scope, time.monotonic(), least_s)
            return least_s
        hopeless = job.tries >= self._config.retries or job.runs > _MOST_RUNS
        if error.code != EngineFailed.code or hopeless:
            return None
        log.warning(
            "job %s runs again after an error: %s", job.id, _error_text(error), extra=about(job.id)
        )
        return _RETRY_S * 2.0**job.tries

    async def _persist(self, job: JobRecord, work: Callable[[], T]) -> T:
        """Run a statement about a job, and repeat it until the database accepts it.

        While the disk is full or the database is away, the job keeps its place and its result.
        """
        is_logged = False
        while True:
            try:
                return await self._run_in_thread(work)
            except (SQLAlchemyError, OSError) as error:
                if not is_logged:
                    text = "job %s: its result waits for the database: %s"
                    log.error(text, job.id, _error_text(error), extra=about(job.id))
                is_logged = True
            await asyncio.sleep(_POLL_S)

    async def _answer(self, job: JobRecord) -> msgspec.Raw:
        """Run a job's request and return its answer as JSON."""
        assert self._store is not None
        client = self._keys.holder(job.scope)
        if client is None:
            raise InvalidRequest("key", "is not known any more")
        if job.runs > _MOST_RUNS:
            raise EngineFailed(f"{_MOST_RUNS} routers were lost while they ran it")
        with ExitStack() as exit_stack:
            exit_stack.enter_context(self._admission.hold(client, job.bytes))
            raw = await self._run_in_thread(self._store.form, job.id)
            if raw is None:
                raise asyncio.CancelledError  # its client ended it first
            form = await self._fair_share.run(client, len(raw), _form, raw)
            del raw
            progress, leased_job = _JobProgress(form.fields.n), self._runs.jobs[job.id]

            def keep_progress(number: int, meta: Mapping[str, Any]) -> None:
                self._pauses.found_room(job.scope)
                if (changed := progress.update(number, meta)) is not None:
                    leased_job.progress = changed

            # A new id for each try: a worker may still run the try of a router that was killed.
            name = job.id if job.fence == 1 else f"{job.id}.{job.fence}"
            return await self._edits.answer(client, form, job.bytes, name, keep_progress, job.id)

    async def _call_webhook(self, job: JobRecord) -> None:
        """Call a job's webhook after its end."""
        assert self._store is not None
        assert job.webhook is not None
        client = self._keys.holder(job.scope)
        event = {"type": f"job.{job.state}", "timestamp": job.ended, "data": description(job)}
        is_delivered = client is not None and await self._webhooks.deliver(
            job.webhook, client.webhook_secret, job.id, event
        )
        self._metrics.webhooks.labels("taken" if is_delivered else "given_up").inc()
        record_delivery = partial(
            self._store.webhook_ended, job.id, job.fence, delivered=is_delivered
        )
        await self._persist(job, record_delivery)

    def _count(self, state: str) -> None:
        self._metrics.jobs.labels(state).inc()


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


class _RunningJobs:
    """Jobs of one kind that this router has taken.

    Args:
        kind: RUN, or TELL for their webhooks.
        most: most jobs at a time.
    """

    def __init__(self, kind: str, most: int) -> None:
        self.kind = kind
        self.places = Shares(most)
        self.jobs: dict[str, _LeasedJob] = {}


def _listed(store: JobStore, scope: str, limit: int, after: str | None) -> bytes:
    jobs = store.listed(scope, limit + 1, after)
    if jobs is None:
        raise JobNotFound
    data = [description(job) for job in jobs[:limit]]
    return msgspec.json.encode(
        {
            "object": "list",
            "data": data,
            "first_id": data[0]["id"] if data else None,
            "last_id": data[-1]["id"] if data else None,
            "has_more": len(jobs) > limit,
            "today": store.used(scope, time.time())._asdict(),
        }
    )


@contextmanager
def _storage_errors() -> Iterator[None]:
    """Turn errors of the disk or database in the block into RetryLater."""
    try:
        yield
    except (SQLAlchemyError, OSError) as error:
        log.error("jobs: %s", _error_text(error))
        raise RetryLater("jobs cannot be kept at the moment; try again later", 5.0) from None


def _quota_error(client: KeyHolder, quota: str) -> RetryLater:
    """Return the error of a key that has used one of its daily limits (a field of `Daily`)."""
    unit = "jobs" if quota == "jobs" else f"{quota.replace('_', '-')} of jobs"
    return RetryLater(
        f"key {client.name} has used its limit of {getattr(client.daily, quota):g} {unit} for "
        "today; the next day begins at 0:00 UTC",
        86_400 - time.time() % 86_400,
    )


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


def database_of(config: RouterConfig) -> tuple[str, str]:
    """Return the location of the database; if there is none, an empty text and the reason."""
    jobs = config.jobs
    if jobs.database or jobs.database_file:
        return jobs.database, ""
    if not config.listen.http_port:
        return "", "are not kept here: the router's port is drawn, and [jobs] database is empty"
    state = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return str(Path(state) / "maskserve" / f"jobs-{config.listen.http_port}.sqlite"), ""


def _form(raw: bytes) -> EditForm:
    return msgspec.msgpack.decode(raw, type=EditForm)


def _digest(form: EditForm) -> bytes:
    return hashlib.sha256(_ENCODER.encode(form)).digest()


def _error_text(error: BaseException) -> str:
    """Return the text of an error, without the database's statement and its pictures."""
    return f"{type(error).__name__}: {getattr(error, 'orig', None) or error}"[:300]


async def _wait_for(event: asyncio.Event, seconds: float) -> None:
    """Wait for an event, at most `seconds`."""
    with suppress(TimeoutError):
        # Not `wait_for`: Python 3.11's loses a cancel that comes with the event.
        async with asyncio.timeout(seconds):
            await event.wait()
