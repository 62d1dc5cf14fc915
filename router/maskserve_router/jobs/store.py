"""What is known of jobs, in a database: SQLite beside the router, or PostgreSQL that several share.

A router that runs a job has a *lease* on it, which it renews. Once a lease has passed, whoever asks
next has the job: so one that was killed loses none. What a router writes of a job holds only while
its lease is its own (`owner`), so a job has one end, however often it was begun.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

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
    update,
)
from sqlalchemy.exc import ArgumentError, IntegrityError

from maskserve_core.config import ConfigError
from maskserve_router.keys import Daily

QUEUED, RUNNING, SUCCEEDED, FAILED, CANCELLED = (
    "queued",
    "running",
    "succeeded",
    "failed",
    "cancelled",
)
_OPEN: Final = (QUEUED, RUNNING)
_FORM, _RESULT = "form", "result"
_BUSY_S: Final = 30
"""How long a process waits for another that writes into the same file."""
_LISTED: Final = 100

_META = MetaData()
# The number is raised when a table changes: a newer router leaves an older one's jobs alone.
_JOBS = Table(
    "maskserve_jobs_1",
    _META,
    Column("id", String(32), primary_key=True),
    Column("scope", String(32), nullable=False),
    Column("state", String(16), nullable=False),
    Column("created", Double, nullable=False),
    Column("not_before", Double, nullable=False),
    Column("started", Double),
    Column("ended", Double),
    Column("expires", Double),
    Column("owner", String(64), nullable=False, default=""),
    Column("lease", Double, nullable=False, default=0.0),
    Column("runs", Integer, nullable=False, default=0),
    Column("bytes", BigInteger, nullable=False),
    Column("progress", Text, nullable=False, default="null"),
    Column("error", Text, nullable=False, default="null"),
    Column("webhook", Text),
    Column("telling", Boolean, nullable=False, default=False),
    Column("told", Boolean),
    Column("idempotency", String(255)),
    Column("digest", LargeBinary(32), nullable=False),
    UniqueConstraint("scope", "idempotency"),
    Index("maskserve_jobs_1_next", "state", "lease"),
)
_CONTENTS = Table(  # apart: SQLite writes a row whole when a field of it changes
    "maskserve_job_contents_1",
    _META,
    Column("job", String(32), primary_key=True),
    Column("kind", String(8), primary_key=True),
    Column("content", LargeBinary, nullable=False),
)
_USAGE = Table(
    "maskserve_job_usage_1",
    _META,
    Column("scope", String(32), primary_key=True),
    Column("day", Integer, primary_key=True),
    *(Column(name, Double, nullable=False, default=0) for name in Daily._fields),
)


@dataclass(frozen=True, slots=True)
class JobRecord:
    """A job as it is now; times are seconds of the epoch."""

    id: str
    scope: str
    """Whose it is (`KeyHolder.scope`)."""
    state: str
    created: float
    started: float | None
    ended: float | None
    expires: float | None
    runs: int
    """Times that it was begun; above 1, a router was lost."""
    bytes: int
    progress: Any
    error: Any
    webhook: str | None
    told: bool | None
    """Whether the webhook's host has taken what it was told; None: not yet known."""
    telling: bool

    @property
    def open(self) -> bool:
        """Whether it has no end yet."""
        return self.state in _OPEN


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
        lite = url.get_backend_name() == "sqlite"
        more: dict[str, Any] = {"connect_args": {"timeout": _BUSY_S}} if lite else {}
        engine = create_engine(url, pool_pre_ping=not lite, **more)
    except (ArgumentError, ImportError) as error:
        raise ConfigError(f"[jobs] database: {error}") from None
    if lite:
        _write_ahead(engine)
    _META.create_all(engine)
    return JobStore(engine)


def _write_ahead(engine: Engine) -> None:
    """SQLite's log of changes, on disk before a statement has returned; and transactions that take
    the lock as they begin, since one that asks for it later is refused at once.
    """

    @event.listens_for(engine, "connect")
    def _(connection: Any, _: Any) -> None:
        connection.isolation_level = None
        for pragma in ("journal_mode = WAL", "synchronous = FULL"):
            connection.execute(f"PRAGMA {pragma}")

    @event.listens_for(engine, "begin")
    def _(connection: Any) -> None:
        connection.exec_driver_sql("BEGIN IMMEDIATE")


class JobStore:
    """Each method is a transaction, and may wait for the disk or the network."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def close(self) -> None:
        self._engine.dispose()

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
        values |= {"progress": "null", "error": "null", "not_before": job.created}
        values |= {"idempotency": idempotency, "digest": digest}
        for last in (False, True):
            if old := self._named(job.scope, idempotency, digest):
                return old, False
            try:
                with self._engine.begin() as db:
                    self._charge(db, job, work, most)
                    db.execute(insert(_JOBS).values(**values))
                    _put(db, job.id, _FORM, form)
                return job, True
            except IntegrityError:  # another router was faster with the same request, or day
                if last:
                    raise
        raise AssertionError("the loop returns")

    def _named(self, scope: str, idempotency: str | None, digest: bytes) -> JobRecord | None:
        if idempotency is None:
            return None
        with self._engine.begin() as db:
            wanted = and_(_JOBS.c.scope == scope, _JOBS.c.idempotency == idempotency)
            row = db.execute(select(_JOBS).where(wanted)).mappings().first()
        if row is not None and row["digest"] != digest:
            raise OtherRequest
        return None if row is None else _job(row)

    def _charge(self, db: Connection, job: JobRecord, work: Daily, most: Daily) -> None:
        day = int(job.created // 86_400)
        own = and_(_USAGE.c.scope == job.scope, _USAGE.c.day == day)
        if db.execute(select(_USAGE.c.day).where(own)).first() is None:
            db.execute(insert(_USAGE).values(scope=job.scope, day=day))
        # Of two at a time the second waits here until the first's numbers stand.
        grown = {name: _USAGE.c[name] + more for name, more in work._asdict().items()}
        db.execute(update(_USAGE).where(own).values(**grown))
        used = db.execute(select(_USAGE).where(own)).mappings().one()
        for name, bound in most._asdict().items():
            if bound and used[name] > bound:
                raise QuotaReached(name)

    def used(self, scope: str, now: float) -> Daily:
        """What a key's jobs of today amount to."""
        own = and_(_USAGE.c.scope == scope, _USAGE.c.day == int(now // 86_400))
        with self._engine.begin() as db:
            row = db.execute(select(_USAGE).where(own)).mappings().first()
        return Daily() if row is None else Daily(*(row[name] for name in Daily._fields))

    def held(self, scope: str) -> tuple[int, int]:
        """Bytes that are kept: of all, and of that the key's."""
        total = func.coalesce(func.sum(_JOBS.c.bytes), 0)
        with self._engine.begin() as db:
            everybody = db.execute(select(total)).scalar_one()
            own = db.execute(select(total).where(_JOBS.c.scope == scope)).scalar_one()
        return int(everybody), int(own)

    def get(self, name: str) -> JobRecord | None:
        with self._engine.begin() as db:
            row = db.execute(select(_JOBS).where(_JOBS.c.id == name)).mappings().first()
        return None if row is None else _job(row)

    def listed(self, scope: str) -> list[JobRecord]:
        """A key's jobs, the latest first."""
        asked = select(_JOBS).where(_JOBS.c.scope == scope).order_by(_JOBS.c.created.desc())
        with self._engine.begin() as db:
            return [_job(row) for row in db.execute(asked.limit(_LISTED)).mappings()]

    def form(self, name: str) -> bytes | None:
        """What a job is to do; None: it has ended."""
        return self._content(name, _FORM)

    def result(self, name: str) -> bytes | None:
        return self._content(name, _RESULT)

    def _content(self, name: str, kind: str) -> bytes | None:
        wanted = and_(_CONTENTS.c.job == name, _CONTENTS.c.kind == kind)
        with self._engine.begin() as db:
            found = db.execute(select(_CONTENTS.c.content).where(wanted)).scalar()
        return None if found is None else bytes(found)

    def take(
        self,
        owner: str,
        now: float,
        lease_s: float,
        turn: Callable[[Sequence[str]], str | None],
        *,
        ended: bool,
    ) -> JobRecord | None:
        """Have the next job that nobody has, until the lease passes.

        Args:
            owner: who takes it.
            now: the time.
            lease_s: how long the lease is good for.
            turn: which of the scopes that have any is next, the longest waiting first.
            ended: whether to take one whose webhook is to be told, or one to run.
        """
        wanted: ColumnElement[bool] = _JOBS.c.state.in_(_OPEN)
        if ended:
            wanted = and_(_JOBS.c.telling, _JOBS.c.state.not_in(_OPEN))
        free = and_(wanted, _JOBS.c.lease <= now, _JOBS.c.not_before <= now)
        waiting = select(_JOBS.c.scope).where(free).group_by(_JOBS.c.scope)
        with self._engine.begin() as db:
            scopes = db.execute(waiting.order_by(func.min(_JOBS.c.created))).scalars().all()
            scope = turn(scopes) if scopes else None
            if scope is None:
                return None
            first = select(_JOBS.c.id).where(free, _JOBS.c.scope == scope)
            name = db.execute(first.order_by(_JOBS.c.created).limit(1)).scalar()
            had = {"owner": owner, "lease": now + lease_s}
            if not ended:
                started = func.coalesce(_JOBS.c.started, now)
                had |= {"state": RUNNING, "runs": _JOBS.c.runs + 1, "started": started}
            # Where another router was faster, the row is not free any more.
            taken = db.execute(update(_JOBS).where(free, _JOBS.c.id == name).values(**had))
            if not taken.rowcount:
                return None
            return _job(db.execute(select(_JOBS).where(_JOBS.c.id == name)).mappings().one())

    def renew(
        self, owner: str, now: float, lease_s: float, progress: Mapping[str, Any]
    ) -> frozenset[str]:
        """Keep these jobs, and say how far they are; those of them that are still the owner's."""
        kept = set()
        with self._engine.begin() as db:
            for name, done in progress.items():
                values = {"lease": now + lease_s, "progress": msgspec.json.encode(done).decode()}
                mine = and_(_JOBS.c.id == name, _JOBS.c.owner == owner)
                if db.execute(update(_JOBS).where(mine).values(**values)).rowcount:
                    kept.add(name)
        return frozenset(kept)

    def put_back(self, owner: str, name: str, not_before: float) -> None:
        """A job that was taken waits again; it was not begun."""
        mine = and_(_JOBS.c.id == name, _JOBS.c.owner == owner, _JOBS.c.state == RUNNING)
        back = {
            "state": QUEUED,
            "owner": "",
            "lease": 0.0,
            "not_before": not_before,
            "started": None,
        }
        with self._engine.begin() as db:
            db.execute(update(_JOBS).where(mine).values(**back, runs=_JOBS.c.runs - 1))

    def end(
        self,
        name: str,
        state: str,
        now: float,
        keep_s: float,
        *,
        owner: str | None,
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
            owner: who has it; None: whoever (its client ends it, and its router learns of it as it
                renews its lease).
            result: the answer.
            error: OpenAI's object.
            progress: how far it came; None: as it was told last.
        """
        mine = and_(_JOBS.c.id == name, _JOBS.c.state.in_(_OPEN))
        if owner is not None:
            mine = and_(mine, _JOBS.c.owner == owner)
        with self._engine.begin() as db:
            if not _end(db, name, mine, state, now, keep_s, len(result), error):
                return False
            if result:
                _put(db, name, _RESULT, result)
            if progress is not None:
                told = {"progress": msgspec.json.encode(progress).decode()}
                db.execute(update(_JOBS).where(_JOBS.c.id == name).values(**told))
        return True

    def told(self, owner: str, name: str, *, taken: bool) -> None:
        """The webhook's host has taken what it was told, or never will."""
        mine = and_(_JOBS.c.id == name, _JOBS.c.owner == owner)
        values = {"telling": False, "told": taken, "owner": "", "lease": 0.0}
        with self._engine.begin() as db:
            db.execute(update(_JOBS).where(mine).values(**values))

    def leave(self, owner: str) -> None:
        """All that is this owner's is anybody's: it stops."""
        with self._engine.begin() as db:
            free = update(_JOBS).where(_JOBS.c.owner == owner)
            db.execute(free.values(owner="", lease=0.0))

    def remove(self, name: str) -> None:
        """Forget a job."""
        with self._engine.begin() as db:
            _forget(db, [name])

    def expire(self, now: float, keep_s: float, wait_s: float, error: Any) -> None:
        """Forget jobs whose time is over, and fail those that have waited too long to begin.

        Args:
            now: the time.
            keep_s: how long ended ones are kept.
            wait_s: how long a job may wait.
            error: of one that has.
        """
        over = and_(_JOBS.c.expires < now, ~_JOBS.c.telling)
        late = and_(_JOBS.c.state == QUEUED, _JOBS.c.created < now - wait_s)
        with self._engine.begin() as db:
            _forget(db, db.execute(select(_JOBS.c.id).where(over)).scalars().all())
            names = db.execute(select(_JOBS.c.id).where(late)).scalars().all()
            for name in names:
                _end(db, name, and_(late, _JOBS.c.id == name), FAILED, now, keep_s, 0, error)
            db.execute(delete(_USAGE).where(_USAGE.c.day < int(now // 86_400) - 1))

    def waiting(self) -> int:
        """Jobs that no router has begun."""
        with self._engine.begin() as db:
            asked = select(func.count()).select_from(_JOBS).where(_JOBS.c.state == QUEUED)
            return int(db.execute(asked).scalar_one())


def _end(
    db: Connection,
    name: str,
    where: ColumnElement[bool],
    state: str,
    now: float,
    keep_s: float,
    size: int,
    error: Any,
) -> bool:
    values = {
        "state": state,
        "ended": now,
        "expires": now + keep_s,
        "bytes": size,
        "error": msgspec.json.encode(error).decode(),
        "telling": _JOBS.c.webhook.is_not(None),
        "owner": "",  # whoever is next tells the webhook
        "lease": 0.0,
    }
    if not db.execute(update(_JOBS).where(where).values(**values)).rowcount:
        return False
    db.execute(delete(_CONTENTS).where(_CONTENTS.c.job == name))
    return True


def _put(db: Connection, job: str, kind: str, content: bytes) -> None:
    db.execute(insert(_CONTENTS).values(job=job, kind=kind, content=content))


def _forget(db: Connection, names: Sequence[str]) -> None:
    db.execute(delete(_CONTENTS).where(_CONTENTS.c.job.in_(names)))
    db.execute(delete(_JOBS).where(_JOBS.c.id.in_(names)))


def _job(row: RowMapping) -> JobRecord:
    values = {name: row[name] for name in JobRecord.__slots__}
    for name in ("progress", "error"):
        values[name] = msgspec.json.decode(values[name])
    return JobRecord(**values)
