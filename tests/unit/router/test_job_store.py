"""What a database keeps of jobs, and that each has one end, whoever is lost: SQLite, PostgreSQL."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from sqlalchemy.exc import OperationalError

from maskserve_core.config import ConfigError
from maskserve_router.jobs.store import (
    CANCELLED,
    FAILED,
    QUEUED,
    RUNNING,
    SUCCEEDED,
    JobRecord,
    JobStore,
    OtherRequest,
    QuotaReached,
    open_store,
)
from maskserve_router.keys import Daily
from tests.support.postgres import find_postgres, postgres

ONE = Daily(1, 10, 2.5)


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    programs = find_postgres()
    if programs is None:
        pytest.skip("PostgreSQL is not installed")
    with postgres(programs) as url:
        yield url


@pytest.fixture(params=["sqlite", "postgresql"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return str(tmp_path / "jobs.sqlite")
    url = request.getfixturevalue("server")
    store = open_store(url)
    for job in [job for scope in "abcde" for job in store.listed(scope)]:
        store.remove(job.id)
    with store._engine.begin() as db:
        db.exec_driver_sql("DELETE FROM maskserve_job_usage_1")
    store.close()
    return str(url)


@pytest.fixture
def store(place: str) -> Iterator[JobStore]:
    opened = open_store(place)
    yield opened
    opened.close()


def job(name: str, scope: str = "a", created: float = 0.0, webhook: str | None = None) -> JobRecord:
    return JobRecord(
        name, scope, QUEUED, created, None, None, None, 0, 4, None, None, webhook, None, False
    )


def give(store: JobStore, name: str, scope: str = "a", **more: object) -> JobRecord:
    made = job(name, scope, **more)  # type: ignore[arg-type]
    return store.add(made, b"form", b"digest", None, ONE, Daily())[0]


def first(scopes: Sequence[str]) -> str:
    return scopes[0]


def take(store: JobStore, owner: str, now: float, *, ended: bool = False) -> JobRecord | None:
    return store.take(owner, now, 10.0, first, ended=ended)


def test_a_job_goes_its_way(store: JobStore) -> None:
    give(store, "1")
    taken = take(store, "x", 1.0)
    assert taken is not None
    assert (taken.id, taken.state, taken.started, taken.runs) == ("1", RUNNING, 1.0, 1)
    assert take(store, "y", 2.0) is None  # it is x's
    assert store.form("1") == b"form"
    assert store.renew("x", 5.0, 10.0, {"1": {"step": 3}}) == {"1"}
    assert take(store, "y", 14.0) is None
    assert store.get("1").progress == {"step": 3}  # type: ignore[union-attr]
    assert store.end("1", SUCCEEDED, 15.0, 60.0, owner="x", result=b"picture")
    ended = store.get("1")
    assert ended is not None
    assert (ended.state, ended.ended, ended.expires, ended.bytes) == (SUCCEEDED, 15.0, 75.0, 7)
    assert (store.form("1"), store.result("1")) == (None, b"picture")
    assert store.held("a") == (7, 7)
    store.expire(76.0, 60.0, 1e6, None)
    assert (store.get("1"), store.result("1"), store.held("a")) == (None, None, (0, 0))


def test_a_lost_routers_job_has_one_end(store: JobStore) -> None:
    give(store, "1")
    assert take(store, "x", 0.0)
    again = take(store, "y", 11.0)
    assert again is not None
    assert again.runs == 2
    assert not store.end("1", SUCCEEDED, 12.0, 60.0, owner="x", result=b"late")  # x was only slow
    assert store.renew("x", 12.0, 10.0, {"1": None}) == frozenset()
    assert store.end("1", SUCCEEDED, 13.0, 60.0, owner="y", result=b"picture")
    assert not store.end("1", FAILED, 14.0, 60.0, owner="y")
    assert store.result("1") == b"picture"


def test_what_is_put_back_was_not_begun(store: JobStore) -> None:
    give(store, "1")
    assert take(store, "x", 0.0)
    store.put_back("x", "1", 5.0)
    assert take(store, "x", 4.0) is None
    again = take(store, "x", 5.0)
    assert again is not None
    assert (again.runs, again.started) == (1, 5.0)


def test_a_client_ends_a_job_whoever_has_it(store: JobStore) -> None:
    give(store, "1", webhook="https://a.example/")
    assert take(store, "x", 0.0)
    assert store.end("1", CANCELLED, 1.0, 60.0, owner=None)
    assert store.renew("x", 1.0, 10.0, {"1": None}) == frozenset()
    assert not store.end("1", SUCCEEDED, 2.0, 60.0, owner="x", result=b"picture")
    telling = take(store, "y", 3.0, ended=True)
    assert telling is not None
    assert (telling.state, telling.told) == (CANCELLED, None)
    store.expire(100.0, 60.0, 1e6, None)
    assert store.get("1") is not None  # until its webhook has been told
    store.told("y", "1", taken=True)
    assert take(store, "y", 100.0, ended=True) is None
    assert store.get("1").told is True  # type: ignore[union-attr]
    store.expire(101.0, 60.0, 1e6, None)
    assert store.get("1") is None


def test_one_that_waits_too_long_has_failed(store: JobStore) -> None:
    give(store, "1", created=0.0)
    give(store, "2", created=50.0)
    store.expire(61.0, 60.0, 60.0, {"code": "deadline_exceeded"})
    states = {each.id: (each.state, each.error) for each in store.listed("a")}
    assert states == {"1": (FAILED, {"code": "deadline_exceeded"}), "2": (QUEUED, None)}


def test_a_request_named_twice_is_one_job(store: JobStore) -> None:
    def ask(name: str, digest: bytes, scope: str = "a") -> tuple[str, bool]:
        made, new = store.add(job(name, scope), b"form", digest, "same", ONE, Daily(jobs=2))
        return made.id, new

    assert ask("1", b"x") == ("1", True)
    assert ask("2", b"x") == ("1", False)
    assert ask("3", b"x", "b") == ("3", True)  # another key's name
    with pytest.raises(OtherRequest):
        ask("4", b"y")
    assert store.used("a", 0.0) == ONE  # repeats cost nothing


@pytest.mark.parametrize("name", Daily._fields)
def test_a_day_holds_what_its_key_may_give(store: JobStore, name: str) -> None:
    most = Daily()._replace(**{name: 2 * getattr(ONE, name)})
    for number in range(2):
        store.add(job(f"{number}"), b"form", b"", None, ONE, most)
    with pytest.raises(QuotaReached, match=name):
        store.add(job("2"), b"form", b"", None, ONE, most)
    assert store.get("2") is None
    store.add(job("3", "b"), b"form", b"", None, ONE, most)
    store.add(job("4", created=86_400.0), b"form", b"", None, ONE, most)
    assert store.used("a", 0.0) == Daily(*(2 * each for each in ONE))


def test_routers_beside_one_another_run_each_job_once(place: str) -> None:
    """Several that take, lose and end jobs at random; every job has one end, of its last owner."""
    stores = [open_store(place) for _ in range(4)]
    for number in range(24):
        give(stores[0], f"{number}", "abc"[number % 3])
    ends: list[tuple[str, str]] = []
    clock, lock = [0.0], threading.Lock()

    def router(number: int) -> None:
        draw, store = random.Random(number), stores[number]
        while any(each.state in (QUEUED, RUNNING) for s in "abc" for each in store.listed(s)):
            with lock:
                clock[0] += draw.choice((0.0, 1.0, 4.0))  # leases pass while others are at work
                now = clock[0]
            taken = take(store, f"r{number}", now)
            if taken is None or draw.random() < 0.3:  # killed
                continue
            result = f"r{number}".encode()
            if store.end(taken.id, SUCCEEDED, now, 1e6, owner=f"r{number}", result=result):
                ends.append((taken.id, result.decode()))

    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(router, number) for number in range(4)]:
            done.result(60)
    assert sorted(name for name, _ in ends) == sorted(f"{number}" for number in range(24))
    assert {(name, (stores[0].result(name) or b"").decode()) for name, _ in ends} == set(ends)
    for store in stores:
        store.close()


def test_a_full_disk_is_told_and_leaves_nothing_half(tmp_path: Path) -> None:
    store = open_store(str(tmp_path / "jobs.sqlite"))
    with store._engine.begin() as db:
        pages = db.exec_driver_sql("PRAGMA page_count").scalar_one()
        db.exec_driver_sql(f"PRAGMA max_page_count = {pages + 2}")
    with pytest.raises(OperationalError, match="full"):
        store.add(job("1"), bytes(2**20), b"", None, ONE, Daily())
    assert (store.get("1"), store.used("a", 0.0)) == (None, Daily())
    give(store, "2")
    store.close()


def test_only_its_owner_reads_the_file(tmp_path: Path) -> None:
    store = open_store(str(tmp_path / "state" / "jobs.sqlite"))
    give(store, "1")
    assert {file.stat().st_mode & 0o077 for file in (tmp_path / "state").iterdir()} == {0}
    store.close()


@pytest.mark.parametrize("place", ["nodatabase://x", "sqlite+nodriver:///x", "://"])
def test_no_database_is_told(place: str) -> None:
    with pytest.raises(ConfigError, match=r"\[jobs\] database: "):
        open_store(place)
