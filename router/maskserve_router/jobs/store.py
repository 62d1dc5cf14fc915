"""The database of jobs: SQLite beside the router, or PostgreSQL shared by several routers.

A job *waits* to be run, or for its webhook to be called. A router that takes it becomes its `owner`
and raises its number, the `fence`. A router's writes count only while owner and fence are
unchanged, so a job has exactly one end, even if it began several times. A router counts a heartbeat
(`beat`) while it lives. Other routers free the jobs of a router whose heartbeat stops, by their own
clocks. Clocks of different hosts are never compared, and no router judges itself.

History costs nothing: totals are counted as they change (`COUNTS`), each other statement finds its
rows by an index, and reads take no lock.
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any, Concatenate, Final, NamedTuple, ParamSpec, TypeVar

import msgspec
from sqlalchemy import (
    ColumnElement,
    Connection,
    Engine,
    RowMapping,
    and_,
    create_engine,
    delete,
    event,
    func,
    insert,
    make_url,
    select,
    tuple_,
    update,
)
from sqlalchemy.exc import ArgumentError, IntegrityError, OperationalError

from maskserve_common.config import ConfigError
from maskserve_router.jobs.disk_reserve import DiskReserve
from maskserve_router.jobs.tables import (
    CONTENTS,
    COUNTS,
    JOBS,
    METADATA,
    NOTHING,
    OWNERS,
    RUN,
    TELL,
    USAGE,
    Counts,
)
from maskserve_router.key_holder import Daily
from maskserve_router.messages.job_states import FAILED, QUEUED, RUNNING

P = ParamSpec("P")
T = TypeVar("T")
_OPEN: Final = (QUEUED, RUNNING)
_FORM, _RESULT = "form", "result"
_BUSY_S: Final = 30
"""Seconds that a process waits for another one's lock on the file."""
_CONNECT_S: Final = 5
_SILENT_MS: Final = 10_000
"""Milliseconds without a sign of the database's host after which a statement fails."""
_BATCH: Final = 200
"""Rows that are deleted in one transaction, so that other transactions run in between."""
_WEBHOOK_S: Final = 3600.0
"""Seconds that a job stays longer while its webhook has not been called."""
_MOST_PORT: Final = 65_535


@dataclass(frozen=True, slots=True)
class JobRecord:
    """A job as it is now; times are seconds since the epoch."""

    id: str
    scope: str
    """`KeyHolder.scope` of its client."""
    state: str
    created: float
    bytes: int
    """Bytes of its request, or of its result once it has ended."""
    webhook: str | None = None
    started: float | None = None
    ended: float | None = None
    expires: float | None = None
    fence: int = 0
    """Number that grows each time a router takes the job."""
    runs: int = 0
    """Runs that began and reported no fault; above 1: a router was lost."""
    tries: int = 0
    """Runs that ended with a fault of the server."""
    progress: Any = None
    error: Any = None
    told: bool | None = None
    """True if the webhook's host accepted the call, False if it never will; None: not yet known."""

    @property
    def open(self) -> bool:
        """True if it has not ended."""
        return self.state in _OPEN


class Lease(NamedTuple):
    """A router's hold on a job."""

    waited: str
    """The kind of work that it waited for: RUN or TELL."""
    fence: int
    progress: Any = None
    """New progress to store; None: unchanged."""


class Stray(NamedTuple):
    """A job that an owner holds in the database without knowing it."""

    name: str
    fence: int


class WaitingKey(NamedTuple):
    """A key that has waiting jobs."""

    scope: str
    result_bytes: int
    """Bytes of the results of its ended jobs."""


class QuotaReached(Exception):
    """A key has reached its daily limit.

    Args:
        name: field of `Daily`.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


class OtherRequest(Exception):
    """The idempotency key came with another request before."""


def open_store(place: str) -> JobStore:
    """Open the store: a path of an SQLite file, or a URL of a database.

    Raises:
        ConfigError: the URL is malformed, or its driver is not installed.
        sqlalchemy.exc.SQLAlchemyError, OSError: it cannot be opened.
    """
    if "://" not in place:
        file = Path(place).absolute()
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # It contains prompts and pictures, so only its owner may read it.
        os.close(os.open(file, os.O_CREAT | os.O_RDWR, 0o600))
        place = f"sqlite:///{file}"
    try:
        url = make_url(place)
        if url.port is not None and not 1 <= url.port <= _MOST_PORT:
            raise ConfigError(f"[jobs] database: its port is {url.port}; accepted: 1 to 65535")
        lite = url.get_backend_name() == "sqlite"
        options: dict[str, Any] = {}
        if lite:
            options = {"connect_args": {"timeout": _BUSY_S}}
        elif url.drivername.startswith("postgresql+psycopg"):
            bounds = {"connect_timeout": _CONNECT_S, "tcp_user_timeout": _SILENT_MS}
            options = {"connect_args": {k: v for k, v in bounds.items() if k not in url.query}}
        engine = create_engine(url, pool_pre_ping=not lite, **options)
    except ValueError:  # from `int`
        raise ConfigError(
            "[jobs] database: its port is not a number; accepted: 1 to 65535"
        ) from None
    except (ArgumentError, ImportError) as error:
        raise ConfigError(f"[jobs] database: {error}") from None
    if lite:
        _write_ahead(engine)
    METADATA.create_all(engine)
    in_file = lite and url.database and url.database != ":memory:"
    return JobStore(engine, lite=lite, reserve=Path(f"{url.database}-reserve") if in_file else None)


def _write_ahead(engine: Engine) -> None:
    """Set SQLite to a write-ahead log, on disk before a statement returns, and to overwrite
    deletions.

    Transactions that write take the lock as they begin, because SQLite refuses a later request at
    once. Transactions that read take no lock.
    """

    @event.listens_for(engine, "connect")
    def _(connection: Any, _: Any) -> None:
        connection.isolation_level = None
        for pragma in ("journal_mode = WAL", "synchronous = FULL", "secure_delete = ON"):
            connection.execute(f"PRAGMA {pragma}")

    @event.listens_for(engine, "begin")
    def _(connection: Any) -> None:
        reads = connection.get_execution_options().get("reads")
        connection.exec_driver_sql("BEGIN" if reads else "BEGIN IMMEDIATE")


class _Changes:
    """Changes of the counts by one transaction.

    They are written last, with keys in one order, so that no two transactions wait for one another.
    """

    def __init__(self) -> None:
        self._by_scope: defaultdict[str, Counter[str]] = defaultdict(Counter)

    def add(self, scope: str, **changes: int) -> None:
        for name, count in changes.items():
            self._by_scope[scope][name] += count

    def waits(self, scope: str, before: str, after: str) -> None:
        """Count a job of the key that changes the kind of work it waits for."""
        for kind, count in ((before, -1), (after, 1)):
            if kind:
                self._by_scope[scope][kind] += count

    def write(self, db: Connection) -> None:
        for scope, changes in sorted(self._by_scope.items()):
            new_counts = {name: COUNTS.c[name] + count for name, count in changes.items() if count}
            if new_counts:
                db.execute(update(COUNTS).where(COUNTS.c.scope == scope).values(**new_counts))


def _on_a_full_disk(
    method: Callable[Concatenate[JobStore, P], T],
) -> Callable[Concatenate[JobStore, P], T]:
    """Decorate a method that frees room or ends a job: on a full disk it uses the reserve."""

    @wraps(method)
    def spared(store: JobStore, /, *arguments: P.args, **keywords: P.kwargs) -> T:
        try:
            return method(store, *arguments, **keywords)
        except OperationalError:
            if not store.use_reserve():
                raise
        return method(store, *arguments, **keywords)

    return spared


class JobStore:
    """The database. Each method is a transaction and may wait for the disk or network.

    Args:
        engine: engine of the database.
        lite: True for SQLite.
        reserve: file of the `DiskReserve` beside SQLite's; None: there is none.
    """

    def __init__(self, engine: Engine, *, lite: bool, reserve: Path | None = None) -> None:
        self._engine, self._lite, self._reserve = engine, lite, DiskReserve(reserve)
        self._reads = engine.execution_options(reads=True)
        self._deleted = False
        self._reserve.fill()

    def close(self) -> None:
        self._engine.dispose()

    @contextmanager
    def _writing(self) -> Iterator[tuple[Connection, _Changes]]:
        with self._engine.begin() as db:
            changes = _Changes()
            yield db, changes
            changes.write(db)

    # Calls of clients.

    def add(
        self,
        job: JobRecord,
        form: bytes,
        digest: bytes,
        idempotency: str | None,
        work: Daily,
        most: Daily,
    ) -> tuple[JobRecord, bool]:
        """Store a new job.

        Args:
            job: its first state.
            form: its encoded request.
            digest: digest of the request, to compare for `idempotency`.
            idempotency: the client's Idempotency-Key.
            work: amount of the job.
            most: daily limits of its key; 0: none.

        Returns:
            The job, and whether it is new; the earlier job if the idempotency key is known.

        Raises:
            OtherRequest: the idempotency key came with another request.
            QuotaReached: the key has reached a daily limit.
        """
        values = {name: getattr(job, name) for name in JobRecord.__slots__}
        values |= {"progress": "null", "error": "null", "not_before": job.created, "waits": RUN}
        values |= {"idempotency": idempotency, "digest": digest}
        for is_last_try in (False, True):
            if earlier_job := self._named(job.scope, idempotency, digest):
                return earlier_job, False
            try:
                with self._writing() as (db, changes):
                    self._charge(db, job, work, most)
                    scope = COUNTS.c.scope == job.scope
                    if db.execute(select(COUNTS.c.scope).where(scope)).first() is None:
                        db.execute(insert(COUNTS).values(scope=job.scope))
                    db.execute(insert(JOBS).values(**values))
                    _put(db, job.id, _FORM, form)
                    changes.add(job.scope, run=1, open=1, form_bytes=job.bytes)
                return job, True
            except IntegrityError:  # another router stored the same request, key or day first
                if is_last_try:
                    raise
        raise AssertionError("the loop returns")

    def _named(self, scope: str, idempotency: str | None, digest: bytes) -> JobRecord | None:
        if idempotency is None:
            return None
        with self._reads.connect() as db:
            same_key = and_(JOBS.c.scope == scope, JOBS.c.idempotency == idempotency)
            row = db.execute(select(JOBS).where(same_key)).mappings().first()
        if row is not None and row["digest"] != digest:
            raise OtherRequest
        return None if row is None else _job(row)

    def _charge(self, db: Connection, job: JobRecord, work: Daily, most: Daily) -> None:
        day = int(job.created // 86_400)
        today = and_(USAGE.c.scope == job.scope, USAGE.c.day == day)
        if db.execute(select(USAGE.c.day).where(today)).first() is None:
            db.execute(insert(USAGE).values(scope=job.scope, day=day))
        # Of two at a time, the second waits here until the first is committed.
        new_usage = {name: USAGE.c[name] + amount for name, amount in work._asdict().items()}
        db.execute(update(USAGE).where(today).values(**new_usage))
        used = db.execute(select(USAGE).where(today)).mappings().one()
        for name, bound in most._asdict().items():
            if bound and used[name] > bound:
                raise QuotaReached(name)

    def used(self, scope: str, now: float) -> Daily:
        """Return today's usage of a key."""
        today = and_(USAGE.c.scope == scope, USAGE.c.day == int(now // 86_400))
        with self._reads.connect() as db:
            row = db.execute(select(USAGE).where(today)).mappings().first()
        return Daily() if row is None else Daily(*(row[name] for name in Daily._fields))

    def counts(self, scope: str) -> tuple[Counts, Counts]:
        """Return the totals of all keys, and of this key."""
        sums = [func.coalesce(func.sum(COUNTS.c[name]), 0) for name in Counts._fields]
        with self._reads.connect() as db:
            all_keys = db.execute(select(*sums)).one()
            this_key = db.execute(select(*sums).where(COUNTS.c.scope == scope)).one()
        return Counts(*map(int, all_keys)), Counts(*map(int, this_key))

    def get(self, name: str) -> JobRecord | None:
        with self._reads.connect() as db:
            row = db.execute(select(JOBS).where(JOBS.c.id == name)).mappings().first()
        return None if row is None else _job(row)

    def listed(self, scope: str, limit: int, after: str | None = None) -> list[JobRecord] | None:
        """Return a page of a key's jobs, newest first.

        Args:
            scope: scope of the key.
            limit: number of jobs.
            after: id of the job before the page; None: the first page.

        Returns:
            The jobs; None: the key has no job `after`.
        """
        page = select(JOBS).where(JOBS.c.scope == scope)
        place = tuple_(JOBS.c.created, JOBS.c.id)
        with self._reads.connect() as db:
            if after is not None:
                last = select(JOBS.c.created).where(JOBS.c.scope == scope, JOBS.c.id == after)
                created = db.execute(last).scalar()
                if created is None:
                    return None
                page = page.where(place < tuple_(created, after))
            page = page.order_by(JOBS.c.created.desc(), JOBS.c.id.desc()).limit(limit)
            return [_job(row) for row in db.execute(page).mappings()]

    def form(self, name: str) -> bytes | None:
        """Return a job's request; None: the job has ended."""
        return self._content(name, _FORM)

    def result(self, name: str) -> bytes | None:
        return self._content(name, _RESULT)

    def _content(self, name: str, kind: str) -> bytes | None:
        place = and_(CONTENTS.c.job == name, CONTENTS.c.kind == kind)
        with self._reads.connect() as db:
            content = db.execute(select(CONTENTS.c.content).where(place)).scalar()
        return None if content is None else bytes(content)

    @_on_a_full_disk
    def remove(self, name: str) -> None:
        """Delete a job."""
        with self._writing() as (db, changes):
            self._forget(db, changes, _locked(db, JOBS.c.id == name))

    # Calls of routers.

    def waiting(self, kind: str, now: float) -> tuple[list[WaitingKey], int]:
        """Return the keys with waiting jobs, longest waiting first, and all keys' `result_bytes`.

        Args:
            kind: RUN or TELL.
            now: seconds since the epoch.
        """
        place = and_(JOBS.c.waits == kind, JOBS.c.scope == COUNTS.c.scope)
        first = select(func.min(JOBS.c.not_before)).where(place).scalar_subquery()
        keys = select(COUNTS.c.scope, COUNTS.c.result_bytes, first.label("first"))
        with self._reads.connect() as db:
            rows = db.execute(keys.where(COUNTS.c[kind] > 0)).all()
            result_bytes = db.execute(
                select(func.coalesce(func.sum(COUNTS.c.result_bytes), 0))
            ).scalar()
        due_rows = sorted((row for row in rows if row[2] is not None and row[2] <= now), key=_first)
        return [WaitingKey(row[0], int(row[1])) for row in due_rows], int(result_bytes or 0)

    def take(self, owner: str, kind: str, scope: str, now: float) -> JobRecord | None:
        """Take the key's next waiting job.

        Args:
            owner: router that takes it.
            kind: RUN or TELL.
            scope: scope of the key.
            now: seconds since the epoch.

        Returns:
            The job; None: none is left, or the owner is considered lost.
        """
        place = and_(JOBS.c.waits == kind, JOBS.c.scope == scope, JOBS.c.not_before <= now)
        with self._writing() as (db, changes):
            if not _beat(db, owner):
                return None
            rows = _locked(db, place, JOBS.c.not_before, limit=1)
            if not rows:
                return None
            job = JOBS.c.id == rows[0]["id"]
            values: dict[str, Any] = {"owner": owner, "waits": NOTHING, "fence": JOBS.c.fence + 1}
            if kind == RUN:
                started = func.coalesce(JOBS.c.started, now)
                values |= {"state": RUNNING, "runs": JOBS.c.runs + 1, "started": started}
            db.execute(update(JOBS).where(job).values(**values))
            changes.waits(scope, kind, NOTHING)
            return _job(db.execute(select(JOBS).where(job)).mappings().one())

    @_on_a_full_disk
    def beat(
        self, owner: str, leases: Mapping[str, Lease]
    ) -> tuple[frozenset[str], frozenset[Stray]]:
        """Send the owner's heartbeat and the progress of its jobs.

        If it was considered lost, it takes back the jobs that no other router has begun.

        Args:
            owner: router that is alive.
            leases: job id -> its hold.

        Returns:
            Ids of the jobs that it still owns, and strays: jobs that it owns without knowing.
        """
        with self._writing() as (db, changes):
            if not _beat(db, owner):
                db.execute(insert(OWNERS).values(owner=owner, beat=0))
                for name, holding in sorted(leases.items()):
                    _renew(db, changes, owner, name, holding)
            for name, holding in sorted(leases.items()):
                if holding.progress is not None:
                    values = {"progress": msgspec.json.encode(holding.progress).decode()}
                    fenced_job = _fenced(name, holding.fence)
                    db.execute(update(JOBS).where(fenced_job).values(**values))
            owned_jobs = select(JOBS.c.id, JOBS.c.fence).where(JOBS.c.owner == owner)
            fences: dict[str, int] = {row[0]: row[1] for row in db.execute(owned_jobs)}
        confirmed_names = frozenset(
            n for n, holding in leases.items() if fences.get(n) == holding.fence
        )
        strays = (
            Stray(name, fence) for name, fence in fences.items() if name not in confirmed_names
        )
        return confirmed_names, frozenset(strays)

    def beats(self) -> dict[str, int]:
        """Return the last heartbeat of each owner."""
        with self._reads.connect() as db:
            return {row[0]: int(row[1]) for row in db.execute(select(OWNERS))}

    @_on_a_full_disk
    def free(self, owner: str, beat: int | None = None) -> None:
        """Let all jobs of an owner wait again: it stops, or is lost.

        Args:
            owner: the router.
            beat: its last heartbeat; a later one means that it is not lost. None: it stops.
        """
        owner_clause = OWNERS.c.owner == owner
        if beat is not None:
            owner_clause = and_(owner_clause, OWNERS.c.beat == beat)
        with self._writing() as (db, changes):
            if not db.execute(delete(OWNERS).where(owner_clause)).rowcount and beat is not None:
                return
            _let_go(db, changes, _locked(db, JOBS.c.owner == owner))

    @_on_a_full_disk
    def let_go(self, stray: Stray) -> None:
        """Let a job wait again that its owner does not know of."""
        with self._writing() as (db, changes):
            rows = _locked(db, and_(_fenced(*stray), JOBS.c.waits == NOTHING))
            _let_go(db, changes, [row for row in rows if row["owner"]])

    @_on_a_full_disk
    def put_back(self, name: str, fence: int, not_before: float, *, failed: bool) -> None:
        """Let a taken job wait again.

        Args:
            name: id of the job.
            fence: its number when it was taken.
            not_before: when it may be taken again.
            failed: True if it began and the server failed it; False if it did not begin.
        """
        back: dict[str, Any] = {"state": QUEUED, "owner": "", "waits": RUN}
        back |= {"not_before": not_before, "runs": JOBS.c.runs - 1}
        back["fence"] = JOBS.c.fence + 1  # the previous owner's writes no longer count
        back |= {"tries": JOBS.c.tries + 1} if failed else {"started": None}
        with self._writing() as (db, changes):
            for row in _locked(db, and_(_fenced(name, fence), JOBS.c.state == RUNNING)):
                db.execute(update(JOBS).where(JOBS.c.id == name).values(**back))
                changes.waits(row["scope"], row["waits"], RUN)

    @_on_a_full_disk
    def end(
        self,
        name: str,
        state: str,
        now: float,
        keep_s: float,
        most: int,
        *,
        fence: int | None,
        result: bytes = b"",
        error: Any = None,
        progress: Any = None,
    ) -> bool:
        """End a job. Return False: it has ended already, or another router owns it.

        Args:
            name: id of the job.
            state: final state.
            now: seconds since the epoch.
            keep_s: seconds that it is kept.
            most: ended jobs kept for its key; beyond, the oldest go.
            fence: its number when it was taken; None: any owner (its client ends it, and its router
                learns that at the next heartbeat).
            result: the answer.
            error: error object in OpenAI's form.
            progress: final progress; None: as last stored.
        """
        job = and_(JOBS.c.id == name, JOBS.c.state.in_(_OPEN))
        if fence is not None:
            job = and_(job, _fenced(name, fence))
        with self._writing() as (db, changes):
            rows = _locked(db, job)
            if not rows:
                return False
            scope = rows[0]["scope"]
            ended_count = select(COUNTS.c.ended).where(COUNTS.c.scope == scope)
            beyond = int(db.execute(ended_count).scalar() or 0) + 1 - most
            if beyond > 0:
                old = and_(JOBS.c.scope == scope, JOBS.c.ended.is_not(None))
                oldest = _locked(db, old, JOBS.c.ended, limit=min(beyond, _BATCH))
                self._forget(db, changes, oldest)
            self._end(db, changes, rows[0], state, now, keep_s, len(result), error)
            if result:
                _put(db, name, _RESULT, result)
            if progress is not None:
                values = {"progress": msgspec.json.encode(progress).decode()}
                db.execute(update(JOBS).where(JOBS.c.id == name).values(**values))
        return True

    @_on_a_full_disk
    def webhook_ended(self, name: str, fence: int, *, delivered: bool) -> None:
        """Store whether the webhook's host accepted the call."""
        values = {"told": delivered, "owner": "", "gone": JOBS.c.expires}
        with self._writing() as (db, _):
            db.execute(update(JOBS).where(_fenced(name, fence)).values(**values))

    # Deletion.

    @_on_a_full_disk
    def expire(self, now: float, keep_s: float, wait_s: float, error: Any) -> bool:
        """Delete expired jobs and fail jobs that waited too long, one batch at a time.

        Return True if there may be more.

        Args:
            now: seconds since the epoch.
            keep_s: seconds that ended jobs are kept.
            wait_s: most seconds that a job may wait.
            error: error object of a job that waited too long.
        """
        over = JOBS.c.gone < now
        late = and_(JOBS.c.waits == RUN, JOBS.c.created < now - wait_s, JOBS.c.started.is_(None))
        with self._writing() as (db, changes):
            expired_rows = _locked(db, over, JOBS.c.gone, limit=_BATCH)
            self._forget(db, changes, expired_rows)
            waited = _locked(db, late, JOBS.c.created, limit=_BATCH)
            for row in waited:
                self._end(db, changes, row, FAILED, now, keep_s, 0, error)
            db.execute(delete(USAGE).where(USAGE.c.day < int(now // 86_400) - 1))
        return _BATCH in (len(expired_rows), len(waited))

    def tidy(self) -> None:
        """Remove deleted data from SQLite's log too, and restore the reserve."""
        if self._lite and self._deleted:
            self._deleted = False
            self._write_back()
        self._reserve.fill()

    def use_reserve(self) -> bool:
        """Remove the reserve. Return False: there is none."""
        if not self._reserve.remove():
            return False
        self._write_back()
        return True

    def _write_back(self) -> None:
        """Write SQLite's log into its file and empty the log."""
        with closing(self._engine.raw_connection()) as db:
            db.cursor().execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()

    def _end(
        self,
        db: Connection,
        changes: _Changes,
        row: RowMapping,
        state: str,
        now: float,
        keep_s: float,
        size: int,
        error: Any,
    ) -> None:
        waits = NOTHING if row["webhook"] is None else TELL
        values = {
            "state": state,
            "ended": now,
            "expires": now + keep_s,
            "gone": now + keep_s + (_WEBHOOK_S if waits else 0.0),
            "bytes": size,
            "error": msgspec.json.encode(error).decode(),
            "waits": waits,  # any router may call the webhook
            "not_before": now,
            "owner": "",
        }
        db.execute(update(JOBS).where(JOBS.c.id == row["id"]).values(**values))
        self._delete_contents(db, [row["id"]])
        scope = row["scope"]
        changes.waits(scope, row["waits"], waits)
        changes.add(scope, open=-1, ended=1, form_bytes=-row["bytes"], result_bytes=size)

    def _forget(self, db: Connection, changes: _Changes, rows: Sequence[RowMapping]) -> None:
        names = [row["id"] for row in rows]
        self._delete_contents(db, names)
        if names:
            db.execute(delete(JOBS).where(JOBS.c.id.in_(names)))
        for row in rows:
            changes.waits(row["scope"], row["waits"], NOTHING)
            if row["state"] in _OPEN:
                changes.add(row["scope"], open=-1, form_bytes=-row["bytes"])
            else:
                changes.add(row["scope"], ended=-1, result_bytes=-row["bytes"])

    def _delete_contents(self, db: Connection, names: Sequence[str]) -> None:
        if names:
            db.execute(delete(CONTENTS).where(CONTENTS.c.job.in_(names)))
            self._deleted = True


def _locked(
    db: Connection,
    where: ColumnElement[bool],
    order: ColumnElement[Any] | None = None,
    limit: int | None = None,
) -> Sequence[RowMapping]:
    """Return rows of jobs, locked until the transaction ends.

    With an order, rows that another transaction has locked are skipped, and the following rows are
    taken.
    """
    rows = select(JOBS).where(where)
    if order is None:
        rows = rows.order_by(JOBS.c.id).with_for_update()
    else:
        rows = rows.order_by(order).limit(limit).with_for_update(skip_locked=True)
    return db.execute(rows).mappings().all()


def _fenced(name: str, fence: int) -> ColumnElement[bool]:
    """Match a job that nobody has taken since it had this number."""
    return and_(JOBS.c.id == name, JOBS.c.fence == fence)


def _beat(db: Connection, owner: str) -> bool:
    """Count the owner's heartbeat. Return False: the owner is unknown."""
    statement = update(OWNERS).where(OWNERS.c.owner == owner)
    return bool(db.execute(statement.values(beat=OWNERS.c.beat + 1)).rowcount)


def _renew(db: Connection, changes: _Changes, owner: str, name: str, lease: Lease) -> None:
    free = and_(_fenced(name, lease.fence), JOBS.c.waits == lease.waited)
    for row in _locked(db, free):
        values = {"owner": owner, "waits": NOTHING}
        if lease.waited == RUN:
            values["state"] = RUNNING
        db.execute(update(JOBS).where(JOBS.c.id == name).values(**values))
        changes.waits(row["scope"], row["waits"], NOTHING)


def _let_go(db: Connection, changes: _Changes, rows: Sequence[RowMapping]) -> None:
    for row in rows:
        is_open = row["state"] in _OPEN
        back = {"owner": "", "waits": RUN if is_open else TELL}
        if is_open:
            back["state"] = QUEUED
        db.execute(update(JOBS).where(JOBS.c.id == row["id"]).values(**back))
        changes.waits(row["scope"], row["waits"], back["waits"])


def _put(db: Connection, job: str, kind: str, content: bytes) -> None:
    db.execute(insert(CONTENTS).values(job=job, kind=kind, content=content))


def _first(row: Any) -> Any:
    return row[2], row[0]


def _job(row: RowMapping) -> JobRecord:
    values = {name: row[name] for name in JobRecord.__slots__}
    for name in ("progress", "error"):
        values[name] = msgspec.json.decode(values[name])
    return JobRecord(**values)
