"""Jobs as clients see them: accepted, listed, cancelled, their results fetched."""

from __future__ import annotations

import hashlib
import secrets
import time
from dataclasses import replace
from functools import partial
from typing import Final

import msgspec

from maskserve_common.contracts.settings import parse_settings
from maskserve_common.errors import InvalidRequest
from maskserve_common.imaging.images import read_size
from maskserve_common.shares import room
from maskserve_router.api.openai.answers import NotFound
from maskserve_router.api.openai.form import EditForm
from maskserve_router.api.openai.form_reader import settings_of
from maskserve_router.jobs.job_pictures import check_pictures
from maskserve_router.jobs.runner import JobRunner, JobServices, description
from maskserve_router.jobs.store import JobRecord, JobStore, OtherRequest, QuotaReached
from maskserve_router.key_holder import Daily, KeyHolder
from maskserve_router.messages.failures import RetryLater
from maskserve_router.messages.job_states import CANCELLED, QUEUED

_SEED_BITS: Final = 32
_LARGE: Final = 2**30
"""A size in bytes that always takes a thread, because a small file can have many pixels."""
_ENCODER = msgspec.msgpack.Encoder(order="deterministic")


class JobNotFound(NotFound):
    """The caller has no job with this id."""

    openai_code = "job_not_found"

    def __init__(self) -> None:
        super().__init__("id", "names no job of this key")


class Jobs:
    """The jobs of one router. Use it from the event loop only.

    Args:
        services: the parts of the router that jobs use.
    """

    def __init__(self, services: JobServices) -> None:
        self._services, self._config = services, services.config.jobs
        self._database, self._reader = services.database, services.reader
        self._fair_share, self._webhooks = services.fair_share, services.webhooks
        self.runner: JobRunner | None = None
        """Runs the jobs; None: the database is not open."""

    async def start(self) -> None:
        """Open the configured database and continue the jobs in it.

        Raises:
            ConfigError: the configured database cannot be opened.
        """
        if (store := await self._database.start()) is not None:
            self.runner = JobRunner(store, self._services)

    @property
    def state(self) -> str:
        """`on`, `off` or an error of the database, for health checks."""
        return self._database.state

    async def stop(self, grace_s: float) -> None:
        """Accept no more jobs, let running jobs end within `grace_s`, and free the others."""
        if self.runner is not None:
            await self.runner.stop(grace_s)
            self.runner = None
        await self._database.close()
        await self._webhooks.close()

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
        runner = await self._opened()
        check = partial(check_pictures, of_workflow=form.fields.model in self._reader.forms)
        await self._fair_share.run(client, _LARGE, check, form, self._services.config.limits)
        pictures = sum(map(len, (form.image, form.mask or b"", *form.references, *form.control)))
        digest = await self._fair_share.run(client, pictures, _digest, form)
        seeded = form
        if form.settings.get("seed") is None:  # drawn now, so that each try is the same edit
            seed = secrets.randbits(_SEED_BITS)
            seeded = replace(form, settings={**form.settings, "seed": seed})
        encoded_form = await self._fair_share.run(client, pictures, _ENCODER.encode, seeded)
        megapixels = await self._fair_share.run(client, pictures, self._work, form)
        work = Daily(1, len(encoded_form), megapixels)
        await self._check_room(runner.store, client, len(encoded_form))
        job = JobRecord(
            secrets.token_hex(16), client.scope, QUEUED, time.time(), len(encoded_form), webhook
        )
        add = partial(runner.store.add, job, encoded_form, digest, idempotency, work, client.daily)
        try:
            added = await self._database.query(client, add)
        except OtherRequest:
            raise InvalidRequest(
                "Idempotency-Key", "was used for another request", "one key for one request"
            ) from None
        except QuotaReached as reached:
            raise _quota_error(client, reached.name) from None
        runner.wake()
        return added

    def _work(self, form: EditForm) -> float:
        """Return the megapixels of a form's picture times the steps of all its edits.

        Raises:
            InvalidRequest: the picture is not readable.
        """
        reader = self._reader
        if answer_size := parse_settings(msgspec.json.encode(settings_of(form))).answer_size:
            height, width = answer_size
        elif form.image:
            height, width = read_size(form.image, "image", self._services.config.limits)
        else:
            sides = [served.native_resolution for served in reader.models.properties()]
            height = width = max(sides, default=1024)
        workflow = reader.forms.get(form.fields.model or "")
        edits = [{}] if workflow is None else workflow.edits
        steps = sum(reader.steps({**form.settings, **settings}) for settings in edits)
        return form.fields.n * steps * height * width / 1e6

    async def _check_room(self, store: JobStore, client: KeyHolder, form_bytes: int) -> None:
        """Check that a client's new job fits.

        Raises:
            RetryLater: there is no room for its form, or the client has too many unfinished jobs.
        """
        total, client_counts = await self._database.query(client, store.counts, client.scope)
        free = room(
            self._config.byte_limit, total.form_bytes, client_counts.form_bytes, client.scope
        )
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
        runner = await self._opened()
        job = await self._database.query(client, runner.store.get, name)
        if job is None or (job.scope != client.scope and not client.admin):
            raise JobNotFound
        return replace(job, progress=runner.progress_of(job))

    async def result(self, job: JobRecord, client: KeyHolder) -> bytes | None:
        """Return the answer's JSON; None: there is none."""
        return await self._database.query(client, (await self._opened()).store.result, job.id)

    async def listed(self, client: KeyHolder, limit: int, after: str | None) -> bytes:
        """Return a page of a client's jobs as JSON, newest first, with its usage of today.

        Raises:
            JobNotFound: it has no job `after`.
        """
        store = (await self._opened()).store
        page = partial(_listed, store, client.scope, limit, after)
        return await self._database.query(client, page)

    async def end(self, name: str, client: KeyHolder) -> JobRecord | None:
        """Cancel an open job, or delete a finished one and return None.

        Raises:
            JobNotFound: the client has no job with this id.
        """
        job, runner = await self.get(name, client), await self._opened()
        store = runner.store
        cancel = partial(
            store.end, name, CANCELLED, time.time(), *self._config.retention, fence=None
        )
        if job.open and await self._database.query(client, cancel):
            self._services.metrics.jobs.labels(CANCELLED).inc()
            runner.cancel(name)
            runner.wake()
            return await self.get(name, client)
        await self._database.query(client, store.remove, name)
        return None

    async def _opened(self) -> JobRunner:
        store = await self._database.opened()
        if self.runner is None:
            self.runner = JobRunner(store, self._services)
        return self.runner


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


def _quota_error(client: KeyHolder, quota: str) -> RetryLater:
    """Return the error of a key that has used one of its daily limits (a field of `Daily`)."""
    unit = "jobs" if quota == "jobs" else f"{quota.replace('_', '-')} of jobs"
    return RetryLater(
        f"key {client.name} has used its limit of {getattr(client.daily, quota):g} {unit} for "
        "today; the next day begins at 0:00 UTC",
        86_400 - time.time() % 86_400,
    )


def _digest(form: EditForm) -> bytes:
    return hashlib.sha256(_ENCODER.encode(form)).digest()
