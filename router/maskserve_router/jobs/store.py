"""What is known of jobs, in a database: SQLite beside the router, or PostgreSQL that several share.

A job that is to be run, or whose webhook is to be told, *waits*. A router that takes it has it
(`owner`), under a number that grows each time it is taken (`fence`): what a router writes holds
only while that is as it was, so a job has one end, however often it was begun. A router
counts a *beat* while it lives. Others free what a router has whose beat stands still; by their own
clocks, so no clock of another host is asked, and no router ever judges itself.

History costs nothing: what is asked of a key or of all is counted as it changes (`_COUNTS`), each
other statement finds its rows by an index, and reads take no lock.
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
    BigInteger,
    Boolean,
    Column,
    ColumnElement,
    Connection,
    Double,
    Engine,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    RowMapping,
    String,
    Table,
    Text,
    UniqueConstraint,
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
from maskserve_router.keys import Daily
from maskserve_router.messages.job_states import FAILED, QUEUED, RUNNING

P = ParamSpec("P")
T = TypeVar("T")
_OPEN: Final = (QUEUED, RUNNING)
RUN, TELL, NOTHING = "run", "tell", ""
"""What a job waits for."""
_FORM, _RESULT = "form", "result"
_BUSY_S: Final = 30
"""How long a process waits for another that writes into the same file."""
_CONNECT_S: Final = 5
_SILENT_MS: Final = 10_000
"""After so long without a sign of a database's host a statement fails."""
_BATCH: Final = 200
"""Rows that are forgotten in one transaction: others come between."""
_RESERVE: Final = 8 * 2**20
_TELL_S: Final = 3600.0
"""A job whose webhook is still to be told is kept so much longer, and then goes."""
MOST_LISTED: Final = 100
"""Jobs of a page."""
_MOST_PORT: Final = 65_535

_META = MetaData()
# The number is raised when a table changes: a newer router leaves an older one's jobs alone.
_JOBS = Table(
    "maskserve_jobs_2",
    _META,
    Column("id", String(32), primary_key=True),
    Column("scope", String(32), nullable=False),
    Column("state", String(16), nullable=False),
    Column("waits", String(8), nullable=False),
    Column("created", Double, nullable=False),
    Column("not_before", Double, nullable=False),
    Column("started", Double),
    Column("ended", Double),
    Column("expires", Double),
    Column("gone", Double),
    Column("owner", String(64), nullable=False, default=""),
    Column("fence", Integer, nullable=False, default=0),
    Column("runs", Integer, nullable=False, default=0),
    Column("tries", Integer, nullable=False, default=0),
    Column("bytes", BigInteger, nullable=False),
    Column("progress", Text, nullable=False, default="null"),
    Column("error", Text, nullable=False, default="null"),
    Column("webhook", Text),
    Column("told", Boolean),
    Column("idempotency", String(255)),
    Column("digest", LargeBinary(32), nullable=False),
    UniqueConstraint("scope", "idempotency"),
    Index("maskserve_jobs_2_next", "waits", "scope", "not_before"),
    Index("maskserve_jobs_2_late", "waits", "created"),
    Index("maskserve_jobs_2_listed", "scope", "created", "id"),
    Index("maskserve_jobs_2_ended", "scope", "ended"),
    Index("maskserve_jobs_2_gone", "gone"),
    Index("maskserve_jobs_2_owner", "owner", "id"),
)
_CONTENTS = Table(  # apart: SQLite writes a row whole when a field of it changes
    "maskserve_job_contents_2",
    _META,
    Column("job", String(32), primary_key=True),
    Column("kind", String(8), primary_key=True),
    Column("content", LargeBinary, nullable=False),
)
_USAGE = Table(
    "maskserve_job_usage_2",
    _META,
    Column("scope", String(32), primary_key=True),
    Column("day", Integer, primary_key=True),
    *(Column(name, Double, nullable=False, default=0) for name in Daily._fields),
)
_OWNERS = Table(
    "maskserve_job_owners_2",
    _META,
    Column("owner", String(64), primary_key=True),
    Column("beat", BigInteger, nullable=False),
)


class Counts(NamedTuple):
    """How much there is of jobs, of one key or of all."""

    run: int = 0
    """Jobs that wait to be run."""
    tell: int = 0
    """Jobs that wait for their webhook to be told."""
    open: int = 0
    """Jobs that have no end yet."""
    ended: int = 0
    form_bytes: int = 0
    """Of what open jobs are to do."""
    result_bytes: int = 0


_COUNTS = Table(
    "maskserve_job_counts_2",
    _META,
    Column("scope", String(32), primary_key=True),
    *(Column(name, BigInteger, nullable=False, default=0) for name in Counts._fields),
)


@dataclass(frozen=True, slots=True)
class JobRecord:
    """A job as it is now; times are seconds of the epoch."""

    id: str
    scope: str
    """Whose it is (`KeyHolder.scope`)."""
    state: str
    created: float
    bytes: int
    """Of what it is to do, or of its result once it has ended."""
    webhook: str | None = None
    started: float | None = None
    ended: float | None = None
    expires: float | None = None
    fence: int = 0
    """Grows each time that a router takes it."""
    runs: int = 0
    """Times that it was begun and no fault was told; above 1, a router was lost."""
    tries: int = 0
    """Times that it was begun and a fault of the server's was told."""
    progress: Any = None
    error: Any = None
    told: bool | None = None
    """Whether the webhook's host has taken what it was told; None: not yet known."""

    @property
    def open(self) -> bool:
        """Whether it has no end yet."""
        return self.state in _OPEN


class Holding(NamedTuple):
    """What a router has of a job."""

    waited: str
    """For what it had waited."""
    fence: int
    progress: Any = None
    """How far it is, if that is to be kept."""


class Stray(NamedTuple):
    """A job that an owner has and does not know of."""

    name: str
    fence: int


class WaitingKey(NamedTuple):
    """A key that has jobs that wait."""

    scope: str
    result_bytes: int
    """Of its jobs that have ended."""


class QuotaReached(Exception):
    """A key has given what it may in a day.

    Args:
        name: of the field of `Daily`.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


class OtherRequest(Exception):
    """The idempotency key came with another request before."""


def open_store(place: str) -> JobStore:
    """The store at a path of an SQLite file, or a URL of a database.

    Raises:
        ConfigError: there is none of that form, or its driver is not installed.
        sqlalchemy.exc.SQLAlchemyError, OSError: it cannot be opened.
    """
    if "://" not in place:
        file = Path(place).absolute()
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Prompts and pictures lie in it: its owner alone reads it.
        os.close(os.open(file, os.O_CREAT | os.O_RDWR, 0o600))
        place = f"sqlite:///{file}"
    try:
        url = make_url(place)
        if url.port is not None and not 1 <= url.port <= _MOST_PORT:
            raise ConfigError(f"[jobs] database: its port is {url.port}; accepted: 1 to 65535")
        lite = url.get_backend_name() == "sqlite"
        more: dict[str, Any] = {}
        if lite:
            more = {"connect_args": {"timeout": _BUSY_S}}
        elif url.drivername.startswith("postgresql+psycopg"):
            bounds = {"connect_timeout": _CONNECT_S, "tcp_user_timeout": _SILENT_MS}
            more = {"connect_args": {k: v for k, v in bounds.items() if k not in url.query}}
        engine = create_engine(url, pool_pre_ping=not lite, **more)
    except ValueError:  # of `int`
        raise ConfigError("[jobs] database: its port is no number; accepted: 1 to 65535") from None
    except (ArgumentError, ImportError) as error:
        raise ConfigError(f"[jobs] database: {error}") from None
    if lite:
        _write_ahead(engine)
    _META.create_all(engine)
    in_file = lite and url.database and url.database != ":memory:"
    return JobStore(engine, lite=lite, reserve=Path(f"{url.database}-reserve") if in_file else None)


def _write_ahead(engine: Engine) -> None:
    """SQLite's log of changes, on disk before a statement has returned; what is deleted is
    overwritten. Transactions that write take the lock as they begin, since one that asks for it
    later is refused at once; those that read take none.
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
    """What one transaction changes of the counts; written last, and keys in one order, so that two
    transactions never wait for one another.
    """

    def __init__(self) -> None:
        self._of: defaultdict[str, Counter[str]] = defaultdict(Counter)

    def add(self, scope: str, **more: int) -> None:
        for name, count in more.items():
            self._of[scope][name] += count

    def waits(self, scope: str, before: str, after: str) -> None:
        """A job of the key waits for something else."""
        for kind, count in ((before, -1), (after, 1)):
            if kind:
                self._of[scope][kind] += count

    def write(self, db: Connection) -> None:
        for scope, more in sorted(self._of.items()):
            grown = {name: _COUNTS.c[name] + count for name, count in more.items() if count}
            if grown:
                db.execute(update(_COUNTS).where(_COUNTS.c.scope == scope).values(**grown))


def _on_a_full_disk(
    method: Callable[Concatenate[JobStore, P], T],
) -> Callable[Concatenate[JobStore, P], T]:
    """A method that goes on with the room kept free for it: what frees room or ends a job."""

    @wraps(method)
    def spared(store: JobStore, /, *given: P.args, **named: P.kwargs) -> T:
        try:
            return method(store, *given, **named)
        except OperationalError:
            if not store.use_reserve():
                raise
        return method(store, *given, **named)

    return spared


class JobStore:
    """Each method is a transaction, and may wait for the disk or the network.

    Args:
        engine: of the database.
        lite: whether it is SQLite.
        reserve: a file beside that of SQLite. To delete takes room, too: this much is kept for it,
            and given back when there is none any more.
    """

    def __init__(self, engine: Engine, *, lite: bool, reserve: Path | None = None) -> None:
        self._engine, self._lite, self._reserve = engine, lite, reserve
        self._reads = engine.execution_options(reads=True)
        self._deleted = False
        self._keep_reserve()

    def close(self) -> None:
        self._engine.dispose()

    @contextmanager
    def _writing(self) -> Iterator[tuple[Connection, _Changes]]:
        with self._engine.begin() as db:
            changes = _Changes()
            yield db, changes
            changes.write(db)

    # What clients ask for.

    def add(
        self,
        job: JobRecord,
        form: bytes,
        digest: bytes,
        idempotency: str | None,
        work: Daily,
        most: Daily,
    ) -> tuple[JobRecord, bool]:
        """Keep a new job.

        Args:
            job: as it begins.
            form: what it is to do.
            digest: of what was asked, for `idempotency`.
            idempotency: the client's own name of the request.
            work: what the job amounts to.
            most: what its key's jobs may amount to in a day; 0: anything.

        Returns:
            The job, and whether it is new; one of the same idempotency key is the earlier one.

        Raises:
            OtherRequest: that was another request.
            QuotaReached: the key has given what it may.
        """
        values = {name: getattr(job, name) for name in JobRecord.__slots__}
        values |= {"progress": "null", "error": "null", "not_before": job.created, "waits": RUN}
        values |= {"idempotency": idempotency, "digest": digest}
        for last in (False, True):
            if old := self._named(job.scope, idempotency, digest):
                return old, False
            try:
                with self._writing() as (db, changes):
                    self._charge(db, job, work, most)
                    scope = _COUNTS.c.scope == job.scope
                    if db.execute(select(_COUNTS.c.scope).where(scope)).first() is None:
                        db.execute(insert(_COUNTS).values(scope=job.scope))
                    db.execute(insert(_JOBS).values(**values))
                    _put(db, job.id, _FORM, form)
                    changes.add(job.scope, run=1, open=1, form_bytes=job.bytes)
                return job, True
            except (
                IntegrityError
            ):  # another router was faster with the same request, or key, or day
                if last:
                    raise
        raise AssertionError("the loop returns")

    def _named(self, scope: str, idempotency: str | None, digest: bytes) -> JobRecord | None:
        if idempotency is None:
            return None
        with self._reads.connect() as db:
            named = and_(_JOBS.c.scope == scope, _JOBS.c.idempotency == idempotency)
            row = db.execute(select(_JOBS).where(named)).mappings().first()
        if row is not None and row["digest"] != digest:
            raise OtherRequest
        return None if row is None else _job(row)

    def _charge(self, db: Connection, job: JobRecord, work: Daily, most: Daily) -> None:
        day = int(job.created // 86_400)
        today = and_(_USAGE.c.scope == job.scope, _USAGE.c.day == day)
        if db.execute(select(_USAGE.c.day).where(today)).first() is None:
            db.execute(insert(_USAGE).values(scope=job.scope, day=day))
        # Of two at a time the second waits here until the first's numbers stand.
        grown = {name: _USAGE.c[name] + more for name, more in work._asdict().items()}
        db.execute(update(_USAGE).where(today).values(**grown))
        used = db.execute(select(_USAGE).where(today)).mappings().one()
        for name, bound in most._asdict().items():
            if bound and used[name] > bound:
                raise QuotaReached(name)

    def used(self, scope: str, now: float) -> Daily:
        """What a key's jobs of today amount to."""
        today = and_(_USAGE.c.scope == scope, _USAGE.c.day == int(now // 86_400))
        with self._reads.connect() as db:
            row = db.execute(select(_USAGE).where(today)).mappings().first()
        return Daily() if row is None else Daily(*(row[name] for name in Daily._fields))

    def counts(self, scope: str) -> tuple[Counts, Counts]:
        """How much there is: of all, and of that the key's."""
        sums = [func.coalesce(func.sum(_COUNTS.c[name]), 0) for name in Counts._fields]
        with self._reads.connect() as db:
            everybody = db.execute(select(*sums)).one()
            of_key = db.execute(select(*sums).where(_COUNTS.c.scope == scope)).one()
        return Counts(*map(int, everybody)), Counts(*map(int, of_key))

    def get(self, name: str) -> JobRecord | None:
        with self._reads.connect() as db:
            row = db.execute(select(_JOBS).where(_JOBS.c.id == name)).mappings().first()
        return None if row is None else _job(row)

    def listed(self, scope: str, limit: int, after: str | None = None) -> list[JobRecord] | None:
        """A page of a key's jobs, the latest first.

        Args:
            scope: the key's.
            limit: how many.
            after: id of the job before the page; None: the page is the first.

        Returns:
            The jobs; None: the key has no job `after`.
        """
        page = select(_JOBS).where(_JOBS.c.scope == scope)
        place = tuple_(_JOBS.c.created, _JOBS.c.id)
        with self._reads.connect() as db:
            if after is not None:
                last = select(_JOBS.c.created).where(_JOBS.c.scope == scope, _JOBS.c.id == after)
                created = db.execute(last).scalar()
                if created is None:
                    return None
                page = page.where(place < tuple_(created, after))
            page = page.order_by(_JOBS.c.created.desc(), _JOBS.c.id.desc()).limit(limit)
            return [_job(row) for row in db.execute(page).mappings()]

    def form(self, name: str) -> bytes | None:
        """What a job is to do; None: it has ended."""
        return self._content(name, _FORM)

    def result(self, name: str) -> bytes | None:
        return self._content(name, _RESULT)

    def _content(self, name: str, kind: str) -> bytes | None:
        place = and_(_CONTENTS.c.job == name, _CONTENTS.c.kind == kind)
        with self._reads.connect() as db:
            content = db.execute(select(_CONTENTS.c.content).where(place)).scalar()
        return None if content is None else bytes(content)

    @_on_a_full_disk
    def remove(self, name: str) -> None:
        """Forget a job."""
        with self._writing() as (db, changes):
            self._forget(db, changes, _locked(db, _JOBS.c.id == name))

    # What routers do with jobs.

    def waiting(self, kind: str, now: float) -> tuple[list[WaitingKey], int]:
        """Keys that have jobs that wait, the longest waiting first, and all keys' `result_bytes`.

        Args:
            kind: what the jobs wait for.
            now: the time.
        """
        place = and_(_JOBS.c.waits == kind, _JOBS.c.scope == _COUNTS.c.scope)
        first = select(func.min(_JOBS.c.not_before)).where(place).scalar_subquery()
        keys = select(_COUNTS.c.scope, _COUNTS.c.result_bytes, first.label("first"))
        with self._reads.connect() as db:
            rows = db.execute(keys.where(_COUNTS.c[kind] > 0)).all()
            result_bytes = db.execute(
                select(func.coalesce(func.sum(_COUNTS.c.result_bytes), 0))
            ).scalar()
        due_rows = sorted((row for row in rows if row[2] is not None and row[2] <= now), key=_first)
        return [WaitingKey(row[0], int(row[1])) for row in due_rows], int(result_bytes or 0)

    def take(self, owner: str, kind: str, scope: str, now: float) -> JobRecord | None:
        """Have the key's next job that waits.

        Args:
            owner: who takes it.
            kind: what it waits for.
            scope: the key's.
            now: the time.

        Returns:
            The job; None: there is none any more, or the owner was taken for lost.
        """
        place = and_(_JOBS.c.waits == kind, _JOBS.c.scope == scope, _JOBS.c.not_before <= now)
        with self._writing() as (db, changes):
            if not _beat(db, owner):
                return None
            rows = _locked(db, place, _JOBS.c.not_before, limit=1)
            if not rows:
                return None
            job = _JOBS.c.id == rows[0]["id"]
            values: dict[str, Any] = {"owner": owner, "waits": NOTHING, "fence": _JOBS.c.fence + 1}
            if kind == RUN:
                started = func.coalesce(_JOBS.c.started, now)
                values |= {"state": RUNNING, "runs": _JOBS.c.runs + 1, "started": started}
            db.execute(update(_JOBS).where(job).values(**values))
            changes.waits(scope, kind, NOTHING)
            return _job(db.execute(select(_JOBS).where(job)).mappings().one())

    @_on_a_full_disk
    def beat(
        self, owner: str, held: Mapping[str, Holding]
    ) -> tuple[frozenset[str], frozenset[Stray]]:
        """Say that the owner lives, and how far its jobs are.

        Where it was taken for lost, what nobody else has begun since is its again.

        Args:
            owner: who lives.
            held: what it has, by the job's id.

        Returns:
            Those of its jobs that are still its, and what it has beside them: it took them, and
            was not told so.
        """
        with self._writing() as (db, changes):
            if not _beat(db, owner):
                db.execute(insert(_OWNERS).values(owner=owner, beat=0))
                for name, holding in sorted(held.items()):
                    _have_again(db, changes, owner, name, holding)
            for name, holding in sorted(held.items()):
                if holding.progress is not None:
                    values = {"progress": msgspec.json.encode(holding.progress).decode()}
                    fenced_job = _fenced(name, holding.fence)
                    db.execute(update(_JOBS).where(fenced_job).values(**values))
            owned_jobs = select(_JOBS.c.id, _JOBS.c.fence).where(_JOBS.c.owner == owner)
            fences: dict[str, int] = {row[0]: row[1] for row in db.execute(owned_jobs)}
        confirmed_names = frozenset(
            n for n, holding in held.items() if fences.get(n) == holding.fence
        )
        strays = (
            Stray(name, fence) for name, fence in fences.items() if name not in confirmed_names
        )
        return confirmed_names, frozenset(strays)

    def beats(self) -> dict[str, int]:
        """The last beat of each owner."""
        with self._reads.connect() as db:
            return {row[0]: int(row[1]) for row in db.execute(select(_OWNERS))}

    @_on_a_full_disk
    def free(self, owner: str, beat: int | None = None) -> None:
        """All that an owner has waits again: it stops, or is lost.

        Args:
            owner: who.
            beat: its last; it is not lost if there was another since. None: it stops.
        """
        owner_clause = _OWNERS.c.owner == owner
        if beat is not None:
            owner_clause = and_(owner_clause, _OWNERS.c.beat == beat)
        with self._writing() as (db, changes):
            if not db.execute(delete(_OWNERS).where(owner_clause)).rowcount and beat is not None:
                return
            _let_go(db, changes, _locked(db, _JOBS.c.owner == owner))

    @_on_a_full_disk
    def let_go(self, stray: Stray) -> None:
        """A job waits again that its owner does not know of."""
        with self._writing() as (db, changes):
            rows = _locked(db, and_(_fenced(*stray), _JOBS.c.waits == NOTHING))
            _let_go(db, changes, [row for row in rows if row["owner"]])

    @_on_a_full_disk
    def put_back(self, name: str, fence: int, not_before: float, *, failed: bool) -> None:
        """A job that was taken waits again.

        Args:
            name: of the job.
            fence: as it was taken.
            not_before: when it may be taken.
            failed: whether it was begun and the server failed it; else it was not begun.
        """
        back: dict[str, Any] = {"state": QUEUED, "owner": "", "waits": RUN}
        back |= {"not_before": not_before, "runs": _JOBS.c.runs - 1}
        back["fence"] = _JOBS.c.fence + 1  # who had it has nothing more to say of it
        back |= {"tries": _JOBS.c.tries + 1} if failed else {"started": None}
        with self._writing() as (db, changes):
            for row in _locked(db, and_(_fenced(name, fence), _JOBS.c.state == RUNNING)):
                db.execute(update(_JOBS).where(_JOBS.c.id == name).values(**back))
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
        """A job has come to its end; False: it had one already, or another router has it.

        Args:
            name: of the job.
            state: its last.
            now: the time.
            keep_s: how long it is kept.
            most: ended jobs of its key that are kept; beyond, the oldest go.
            fence: as it was taken; None: whoever has it (its client ends it, and its router learns
                of it at its next beat).
            result: the answer.
            error: OpenAI's object.
            progress: how far it came; None: as it was told last.
        """
        job = and_(_JOBS.c.id == name, _JOBS.c.state.in_(_OPEN))
        if fence is not None:
            job = and_(job, _fenced(name, fence))
        with self._writing() as (db, changes):
            rows = _locked(db, job)
            if not rows:
                return False
            scope = rows[0]["scope"]
            ended = select(_COUNTS.c.ended).where(_COUNTS.c.scope == scope)
            beyond = int(db.execute(ended).scalar() or 0) + 1 - most
            if beyond > 0:
                old = and_(_JOBS.c.scope == scope, _JOBS.c.ended.is_not(None))
                oldest = _locked(db, old, _JOBS.c.ended, limit=min(beyond, _BATCH))
                self._forget(db, changes, oldest)
            self._end(db, changes, rows[0], state, now, keep_s, len(result), error)
            if result:
                _put(db, name, _RESULT, result)
            if progress is not None:
                values = {"progress": msgspec.json.encode(progress).decode()}
                db.execute(update(_JOBS).where(_JOBS.c.id == name).values(**values))
        return True

    @_on_a_full_disk
    def told(self, name: str, fence: int, *, taken: bool) -> None:
        """The webhook's host has taken what it was told, or never will."""
        values = {"told": taken, "owner": "", "gone": _JOBS.c.expires}
        with self._writing() as (db, _):
            db.execute(update(_JOBS).where(_fenced(name, fence)).values(**values))

    # What is no longer needed.

    @_on_a_full_disk
    def expire(self, now: float, keep_s: float, wait_s: float, error: Any) -> bool:
        """Forget jobs whose time is over, and fail those that have waited too long to begin; some
        at a time. Says whether there are more.

        Args:
            now: the time.
            keep_s: how long ended ones are kept.
            wait_s: how long a job may wait.
            error: of one that has.
        """
        over = _JOBS.c.gone < now
        late = and_(_JOBS.c.waits == RUN, _JOBS.c.created < now - wait_s, _JOBS.c.started.is_(None))
        with self._writing() as (db, changes):
            expired_rows = _locked(db, over, _JOBS.c.gone, limit=_BATCH)
            self._forget(db, changes, expired_rows)
            waited = _locked(db, late, _JOBS.c.created, limit=_BATCH)
            for row in waited:
                self._end(db, changes, row, FAILED, now, keep_s, 0, error)
            db.execute(delete(_USAGE).where(_USAGE.c.day < int(now // 86_400) - 1))
        return _BATCH in (len(expired_rows), len(waited))

    def tidy(self) -> None:
        """Have nothing that was deleted in SQLite's log either."""
        if self._lite and self._deleted:
            self._deleted = False
            self._write_back()
        self._keep_reserve()

    def use_reserve(self) -> bool:
        """Give back the room that is kept; whether there was any."""
        if self._reserve is None or not self._reserve.exists():
            return False
        self._reserve.unlink(missing_ok=True)
        self._write_back()
        return True

    def _keep_reserve(self) -> None:
        if self._reserve is None or self._reserve.exists():
            return
        try:
            with os.fdopen(os.open(self._reserve, os.O_CREAT | os.O_WRONLY, 0o600), "wb") as file:
                os.posix_fallocate(file.fileno(), 0, _RESERVE)
        except OSError:
            self._reserve.unlink(missing_ok=True)

    def _write_back(self) -> None:
        """Have SQLite's log in its file, and the log empty."""
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
            "gone": now + keep_s + (_TELL_S if waits else 0.0),
            "bytes": size,
            "error": msgspec.json.encode(error).decode(),
            "waits": waits,  # whoever is next tells the webhook
            "not_before": now,
            "owner": "",
        }
        db.execute(update(_JOBS).where(_JOBS.c.id == row["id"]).values(**values))
        self._delete_contents(db, [row["id"]])
        scope = row["scope"]
        changes.waits(scope, row["waits"], waits)
        changes.add(scope, open=-1, ended=1, form_bytes=-row["bytes"], result_bytes=size)

    def _forget(self, db: Connection, changes: _Changes, rows: Sequence[RowMapping]) -> None:
        names = [row["id"] for row in rows]
        self._delete_contents(db, names)
        if names:
            db.execute(delete(_JOBS).where(_JOBS.c.id.in_(names)))
        for row in rows:
            changes.waits(row["scope"], row["waits"], NOTHING)
            if row["state"] in _OPEN:
                changes.add(row["scope"], open=-1, form_bytes=-row["bytes"])
            else:
                changes.add(row["scope"], ended=-1, result_bytes=-row["bytes"])

    def _delete_contents(self, db: Connection, names: Sequence[str]) -> None:
        if names:
            db.execute(delete(_CONTENTS).where(_CONTENTS.c.job.in_(names)))
            self._deleted = True


def _locked(
    db: Connection,
    where: ColumnElement[bool],
    order: ColumnElement[Any] | None = None,
    limit: int | None = None,
) -> Sequence[RowMapping]:
    """Rows of jobs that nobody else changes until the transaction ends. Where there is an order,
    any that somebody changes just now are left out: the next ones do.
    """
    rows = select(_JOBS).where(where)
    if order is None:
        rows = rows.order_by(_JOBS.c.id).with_for_update()
    else:
        rows = rows.order_by(order).limit(limit).with_for_update(skip_locked=True)
    return db.execute(rows).mappings().all()


def _fenced(name: str, fence: int) -> ColumnElement[bool]:
    """A job that nobody has taken since it had this number."""
    return and_(_JOBS.c.id == name, _JOBS.c.fence == fence)


def _beat(db: Connection, owner: str) -> bool:
    """Whether the owner is known; it has beaten once more."""
    statement = update(_OWNERS).where(_OWNERS.c.owner == owner)
    return bool(db.execute(statement.values(beat=_OWNERS.c.beat + 1)).rowcount)


def _have_again(db: Connection, changes: _Changes, owner: str, name: str, holding: Holding) -> None:
    free = and_(_fenced(name, holding.fence), _JOBS.c.waits == holding.waited)
    for row in _locked(db, free):
        values = {"owner": owner, "waits": NOTHING}
        if holding.waited == RUN:
            values["state"] = RUNNING
        db.execute(update(_JOBS).where(_JOBS.c.id == name).values(**values))
        changes.waits(row["scope"], row["waits"], NOTHING)


def _let_go(db: Connection, changes: _Changes, rows: Sequence[RowMapping]) -> None:
    for row in rows:
        is_open = row["state"] in _OPEN
        back = {"owner": "", "waits": RUN if is_open else TELL}
        if is_open:
            back["state"] = QUEUED
        db.execute(update(_JOBS).where(_JOBS.c.id == row["id"]).values(**back))
        changes.waits(row["scope"], row["waits"], back["waits"])


def _put(db: Connection, job: str, kind: str, content: bytes) -> None:
    db.execute(insert(_CONTENTS).values(job=job, kind=kind, content=content))


def _first(row: Any) -> Any:
    return row[2], row[0]


def _job(row: RowMapping) -> JobRecord:
    values = {name: row[name] for name in JobRecord.__slots__}
    for name in ("progress", "error"):
        values[name] = msgspec.json.decode(values[name])
    return JobRecord(**values)
