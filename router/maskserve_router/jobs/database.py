"""The database of a router's jobs: where it lies, its threads, and its errors in words."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy.exc import SQLAlchemyError

from maskserve_common.config import ConfigError
from maskserve_common.files.store import make_private
from maskserve_router.config import RouterConfig
from maskserve_router.fair_share import FairShare, LoopThreads
from maskserve_router.jobs.store import JobStore, open_store
from maskserve_router.key_holder import KeyHolder
from maskserve_router.messages.failures import NotSupported, RetryLater

log = logging.getLogger("maskserve.router")
_STATEMENTS = 4
"""Threads that query the database for clients."""
_CALL_S = 0.002
"""Seconds of the loop for a client's query, beside the statement itself."""
T = TypeVar("T")


class JobDatabase:
    """Opens the database when jobs need it. Use it from the event loop only.

    Args:
        config: configuration of the router.
        fair_share: turns of the clients that query the database.
    """

    def __init__(self, config: RouterConfig, fair_share: FairShare) -> None:
        self._config, self._fair_share = config.jobs, fair_share
        self._place, self._disabled_reason = database_of(config)
        self._store: JobStore | None = None
        # Statements wait for the disk. Two threads, so that a large picture delays no heartbeat.
        self._threads = ThreadPoolExecutor(2, "jobs")
        self._statements = LoopThreads(_STATEMENTS, "statements")
        self.problem = ""
        """Error of the database while it does not work; empty: it works."""

    @property
    def state(self) -> str:
        """`on`, `off` or an error of the database, for health checks."""
        if self.problem:
            return f"the database does not answer: {self.problem}"
        return "off" if self._disabled_reason else "on"

    async def start(self) -> JobStore | None:
        """Open a database that is configured or exists; return None if a first job must come.

        Raises:
            ConfigError: the configured database cannot be opened.
        """
        jobs = self._config
        try:
            if jobs.database_file:
                self._place = Path(jobs.database_file).read_text().strip()
            if jobs.database or jobs.database_file:
                return await self._open()
            if self._place:
                make_private(Path(self._place).parent)
                if Path(self._place).exists():
                    return await self._open()
                if not os.access(Path(self._place).parent, os.W_OK):
                    raise PermissionError(f"{self._place} cannot be written")
        except (SQLAlchemyError, OSError, UnicodeDecodeError) as error:
            if jobs.database or jobs.database_file:
                key = "database" if jobs.database else "database_file"
                raise ConfigError(f"[jobs] {key}: {error_text(error)}") from None
            self._place, self._disabled_reason = "", f"are not kept here: {error_text(error)}"
            log.warning("the router takes no jobs: %s", error_text(error))
        return None

    async def opened(self) -> JobStore:
        """Return the store, which is opened if it is not yet.

        Raises:
            NotSupported: this router keeps no jobs.
            RetryLater: the database cannot be opened now.
        """
        if self._store is not None:
            return self._store
        if not self._place:
            raise NotSupported("jobs", self._disabled_reason)
        with _storage_errors():
            return await self._open()

    async def query(self, client: KeyHolder, work: Callable[..., T], *arguments: Any) -> T:
        """Query the store in the client's turn; raises RetryLater if the database fails.

        It may wait for the disk. A client with many calls waits behind its own.
        """
        await self._fair_share.may_read(client)
        self._fair_share.book(client.scope, _CALL_S)
        with _storage_errors():
            return await self._fair_share.run_in(self._statements, client, work, *arguments)

    async def run(self, work: Callable[..., T], *arguments: Any) -> T:
        """Run a statement of the router's own in a thread; a cancel does not break it off."""
        loop = asyncio.get_running_loop()
        return await asyncio.shield(loop.run_in_executor(self._threads, work, *arguments))

    async def close(self) -> None:
        if self._store is not None:
            await self.run(self._store.close)
            self._store = None
        self._threads.shutdown(wait=False)
        self._statements.close()

    async def _open(self) -> JobStore:
        store = await self.run(open_store, self._place)
        if self._store is None:
            self._store = store
        else:  # two calls opened it at the same time
            store.close()
        return self._store


@contextmanager
def _storage_errors() -> Iterator[None]:
    """Turn errors of the disk or database in the block into RetryLater."""
    try:
        yield
    except (SQLAlchemyError, OSError) as error:
        log.error("jobs: %s", error_text(error))
        raise RetryLater("jobs cannot be kept at the moment; try again later", 5.0) from None


def database_of(config: RouterConfig) -> tuple[str, str]:
    """Return the location of the database; if there is none, an empty text and the reason."""
    jobs = config.jobs
    if jobs.database or jobs.database_file:
        return jobs.database, ""
    if not config.listen.http_port:
        return "", "are not kept here: the router's port is not fixed, and [jobs] database is empty"
    state = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return str(Path(state) / "maskserve" / f"jobs-{config.listen.http_port}.sqlite"), ""


def error_text(error: BaseException) -> str:
    """Return the text of an error, without the database's statement and its pictures."""
    return f"{type(error).__name__}: {getattr(error, 'orig', None) or error}"[:300]
