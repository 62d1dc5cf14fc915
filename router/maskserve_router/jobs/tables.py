"""Tables of the database of jobs."""

from __future__ import annotations

from typing import Final, NamedTuple

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Double,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    UniqueConstraint,
)

from maskserve_router.key_holder import Daily

RUN, TELL, NOTHING = "run", "tell", ""
"""Values of a job's column `waits`."""

METADATA: Final = MetaData()
# A change of a table raises the number: a newer router leaves an older one's jobs alone.
JOBS = Table(
    "maskserve_jobs_2",
    METADATA,
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
CONTENTS = Table(  # a separate table: SQLite rewrites a whole row for each change
    "maskserve_job_contents_2",
    METADATA,
    Column("job", String(32), primary_key=True),
    Column("kind", String(8), primary_key=True),
    Column("content", LargeBinary, nullable=False),
)
USAGE = Table(
    "maskserve_job_usage_2",
    METADATA,
    Column("scope", String(32), primary_key=True),
    Column("day", Integer, primary_key=True),
    *(Column(name, Double, nullable=False, default=0) for name in Daily._fields),
)
OWNERS = Table(
    "maskserve_job_owners_2",
    METADATA,
    Column("owner", String(64), primary_key=True),
    Column("beat", BigInteger, nullable=False),
)


class Counts(NamedTuple):
    """Totals of the jobs of one key or of all keys."""

    run: int = 0
    """Jobs that wait to be run."""
    tell: int = 0
    """Jobs whose webhook waits to be called."""
    open: int = 0
    """Jobs that have not ended."""
    ended: int = 0
    form_bytes: int = 0
    """Bytes of the open jobs' requests."""
    result_bytes: int = 0


COUNTS = Table(
    "maskserve_job_counts_2",
    METADATA,
    Column("scope", String(32), primary_key=True),
    *(Column(name, BigInteger, nullable=False, default=0) for name in Counts._fields),
)
