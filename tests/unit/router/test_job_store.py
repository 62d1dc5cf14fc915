"""Jobs in a database, SQLite or PostgreSQL: each has one end, whichever router is lost."""

from __future__ import annotations

import os
import random
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event, func, select
from sqlalchemy.exc import OperationalError

from maskserve_common.config import ConfigError
from maskserve_router.jobs.store import (
    JobRecord,
    JobStore,
    Lease,
    OtherRequest,
    QuotaReached,
    open_store,
)
from maskserve_router.jobs.tables import CONTENTS, COUNTS, JOBS, RUN, TELL, Counts
from maskserve_router.key_holder import Daily
from maskserve_router.messages.job_states import CANCELLED, FAILED, QUEUED, RUNNING, SUCCEEDED
from tests.support.draws import fresh_random
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
    with store._engine.begin() as db:
        for table in ("jobs", "job_contents", "job_usage", "job_counts", "job_owners"):
            db.exec_driver_sql(f"DELETE FROM maskserve_{table}_2")
    store.close()
    return str(url)


@pytest.fixture
def store(place: str) -> Iterator[JobStore]:
    opened = open_store(place)
    yield opened
    opened.close()


def job(name: str, scope: str = "a", created: float = 0.0, webhook: str | None = None) -> JobRecord:
    return JobRecord(name, scope, QUEUED, created, 4, webhook)


def give(store: JobStore, name: str, scope: str = "a", **more: object) -> JobRecord:
    record = job(name, scope, **more)  # type: ignore[arg-type]
    return store.add(record, b"form", b"digest", None, ONE, Daily())[0]


def take(store: JobStore, owner: str, now: float, kind: str = RUN) -> JobRecord | None:
    if owner not in store.beats():
        store.beat(owner, {})
    keys, _ = store.waiting(kind, now)
    return store.take(owner, kind, keys[0].scope, now) if keys else None


def lose(store: JobStore, owner: str) -> None:
    """Others take the owner for lost."""
    store.free(owner, store.beats()[owner])


def end(store: JobStore, name: str, fence: int | None, **more: Any) -> bool:
    end_options = {"state": SUCCEEDED, "now": 15.0, "keep_s": 60.0, "most": 1000, **more}
    return store.end(name, fence=fence, **end_options)


def check_counts(store: JobStore) -> None:
    """Check the counts of the store against all its rows."""
    with store._reads.connect() as db:
        rows = db.execute(select(JOBS)).mappings().all()
        sums = select(CONTENTS.c.job, func.sum(func.length(CONTENTS.c.content)))
        sizes = {row[0]: row[1] for row in db.execute(sums.group_by(CONTENTS.c.job))}
        counted = {row["scope"]: row for row in db.execute(select(COUNTS)).mappings()}
    for scope in counted:
        scope_rows = [row for row in rows if row["scope"] == scope]
        unended = [row for row in scope_rows if row["state"] in (QUEUED, RUNNING)]
        ended = [row for row in scope_rows if row["state"] not in (QUEUED, RUNNING)]
        expected = Counts(
            sum(row["waits"] == RUN for row in scope_rows),
            sum(row["waits"] == TELL for row in scope_rows),
            len(unended),
            len(ended),
            sum(sizes[row["id"]] for row in unended),
            sum(sizes.get(row["id"], 0) for row in ended),
        )
        assert Counts(*(counted[scope][name] for name in Counts._fields)) == expected
        assert all(sizes.get(row["id"], 0) == row["bytes"] for row in scope_rows)
    assert {row["scope"] for row in rows} <= counted.keys()
    assert sizes.keys() <= {row["id"] for row in rows}


def test_a_job_goes_its_way(store: JobStore) -> None:
    give(store, "1")
    record = take(store, "x", 1.0)
    assert record is not None
    assert (record.id, record.state, record.started, record.runs) == ("1", RUNNING, 1.0, 1)
    assert take(store, "y", 2.0) is None  # it is x's
    assert store.form("1") == b"form"
    assert store.beat("x", {"1": Lease(RUN, record.fence, {"step": 3})})[0] == {"1"}
    assert take(store, "y", 1e9) is None  # no clock takes it from x
    assert store.get("1").progress == {"step": 3}  # type: ignore[union-attr]
    assert end(store, "1", record.fence, result=b"picture")
    ended = store.get("1")
    assert ended is not None
    assert (ended.state, ended.ended, ended.expires, ended.bytes) == (SUCCEEDED, 15.0, 75.0, 7)
    assert (store.form("1"), store.result("1")) == (None, b"picture")
    assert store.counts("a")[1] == Counts(ended=1, result_bytes=7)
    store.expire(76.0, 60.0, 1e6, None)
    assert (store.get("1"), store.result("1"), store.counts("a")[0]) == (None, None, Counts())


def test_a_lost_routers_job_has_one_end(store: JobStore) -> None:
    give(store, "1")
    first = take(store, "x", 0.0)
    assert first is not None
    lose(store, "x")
    second_run = take(store, "y", 11.0)
    assert second_run is not None
    assert (second_run.runs, second_run.fence) == (2, 2)
    late = first.fence
    assert not end(store, "1", late, result=b"late")  # x was only slow
    assert store.beat("x", {"1": Lease(RUN, first.fence)})[0] == frozenset()
    store.put_back("1", late, 0.0, failed=True)
    assert end(store, "1", second_run.fence, result=b"picture")
    assert not end(store, "1", second_run.fence, state=FAILED)
    assert store.result("1") == b"picture"


def test_who_was_taken_for_lost_goes_on_with_what_nobody_has_begun(store: JobStore) -> None:
    give(store, "1")
    give(store, "2", webhook="https://a.example/")
    end(store, "2", None, state=CANCELLED)
    runs, deliveries = take(store, "x", 20.0), take(store, "x", 20.0, TELL)
    assert runs is not None
    assert deliveries is not None
    lose(store, "x")
    assert store.take("x", RUN, "a", 20.0) is None  # it does not take its own job again
    claims = {"1": Lease(RUN, runs.fence), "2": Lease(TELL, deliveries.fence)}
    assert store.beat("x", claims)[0] == {"1", "2"}
    assert take(store, "y", 20.0) is None
    assert take(store, "y", 20.0, TELL) is None
    check_counts(store)
    assert end(store, "1", runs.fence, result=b"picture")


def test_a_late_writer_fails_on_the_fence(store: JobStore) -> None:
    """The owner is the same, and its job was begun anew."""
    give(store, "1")
    first = take(store, "x", 0.0)
    assert first is not None
    store.put_back("1", first.fence, 0.0, failed=False)
    second_run = take(store, "x", 1.0)
    assert second_run is not None
    assert not end(store, "1", first.fence, result=b"late")
    assert store.beat("x", {"1": Lease(RUN, first.fence)})[0] == frozenset()
    assert end(store, "1", second_run.fence, result=b"picture")


def test_what_was_taken_and_not_told_waits_again(store: JobStore) -> None:
    """The connection broke behind the commit."""
    give(store, "1")
    give(store, "2", webhook="https://a.example/")
    end(store, "2", None, state=CANCELLED)
    assert take(store, "x", 20.0)
    assert take(store, "x", 20.0, TELL)
    held_jobs, strays = store.beat("x", {})
    assert (held_jobs, {stray.name for stray in strays}) == (frozenset(), {"1", "2"})
    for stray in strays:
        store.let_go(stray)
        store.let_go(stray)
    check_counts(store)
    assert take(store, "y", 20.0)
    assert take(store, "y", 20.0, TELL)
    for stray in strays:  # it is another's now
        store.let_go(stray)
    assert take(store, "z", 20.0) is None


def test_one_that_beats_is_not_lost(store: JobStore) -> None:
    give(store, "1")
    assert take(store, "x", 0.0)
    beat = store.beats()["x"]
    store.beat("x", {})
    store.free("x", beat)
    assert take(store, "y", 0.0) is None


def test_what_is_put_back_was_not_begun(store: JobStore) -> None:
    give(store, "1")
    record = take(store, "x", 0.0)
    assert record is not None
    store.put_back("1", record.fence, 5.0, failed=False)
    assert take(store, "x", 4.0) is None
    second_run = take(store, "x", 5.0)
    assert second_run is not None
    assert (second_run.runs, second_run.started, second_run.tries) == (1, 5.0, 0)
    store.put_back("1", second_run.fence, 6.0, failed=True)
    third = take(store, "x", 6.0)
    assert third is not None
    assert (third.runs, third.started, third.tries) == (1, 5.0, 1)


def test_a_client_ends_a_job_whoever_has_it(store: JobStore) -> None:
    give(store, "1", webhook="https://a.example/")
    record = take(store, "x", 0.0)
    assert record is not None
    assert end(store, "1", None, state=CANCELLED, now=1.0)
    assert store.beat("x", {"1": Lease(RUN, record.fence)})[0] == frozenset()
    assert not end(store, "1", record.fence, result=b"picture")
    telling = take(store, "y", 3.0, TELL)
    assert telling is not None
    assert (telling.state, telling.told) == (CANCELLED, None)
    store.expire(100.0, 60.0, 1e6, None)
    assert store.get("1") is not None  # until its webhook has been told
    store.webhook_ended("1", telling.fence, delivered=False)
    store.webhook_ended("1", telling.fence, delivered=True)
    assert take(store, "y", 100.0, TELL) is None
    assert store.get("1").told is True  # type: ignore[union-attr]
    store.expire(101.0, 60.0, 1e6, None)
    assert store.get("1") is None


def test_a_job_whose_webhook_is_never_told_goes_too(store: JobStore) -> None:
    give(store, "1", webhook="https://a.example/")
    end(store, "1", None, state=CANCELLED, now=0.0)
    assert take(store, "x", 1.0, TELL)
    store.expire(3659.0, 60.0, 1e6, None)
    assert store.get("1") is not None
    store.expire(3661.0, 60.0, 1e6, None)
    assert store.get("1") is None
    check_counts(store)


def test_one_that_waits_too_long_has_failed(store: JobStore) -> None:
    give(store, "1", created=0.0)
    give(store, "2", created=50.0)
    store.expire(61.0, 60.0, 60.0, {"code": "deadline_exceeded"})
    states = {record.id: (record.state, record.error) for record in store.listed("a", 9) or ()}
    assert states == {"1": (FAILED, {"code": "deadline_exceeded"}), "2": (QUEUED, None)}


def test_of_a_keys_ended_jobs_the_oldest_go(store: JobStore) -> None:
    for number in range(6):
        give(store, f"{number}", created=float(number))
        end(store, f"{number}", None, state=CANCELLED, now=float(number), most=3)
    give(store, "b", "b")
    end(store, "b", None, state=CANCELLED, most=3)
    assert [record.id for record in store.listed("a", 9) or ()] == ["5", "4", "3"]
    assert store.get("b") is not None
    check_counts(store)


def test_jobs_are_listed_in_pages(store: JobStore) -> None:
    for number in range(7):
        give(store, f"{number}", created=float(number // 2))  # two of a time
    give(store, "x", "b")
    names: list[str] = []
    while page := store.listed("a", 3, names[-1] if names else None):
        names += [record.id for record in page]
    assert names == ["6", "5", "4", "3", "2", "1", "0"]
    assert store.listed("a", 3, "x") is None  # another key's


def test_reads_wait_for_no_writer(tmp_path: Path) -> None:
    store = open_store(str(tmp_path / "jobs.sqlite"))
    give(store, "1")
    with store._engine.begin():  # has the lock
        assert store.get("1") is not None
        assert store.listed("a", 9)
        assert store.counts("a")[1].open == 1
        assert store.waiting(RUN, 1.0)[0]
        assert (store.form("1"), store.used("a", 0.0).jobs, store.beats()) == (b"form", 1, {})
    store.close()


def test_each_statement_finds_its_rows_by_an_index(tmp_path: Path) -> None:
    store = open_store(str(tmp_path / "jobs.sqlite"))
    plans: list[str] = []
    explained = "SELECT", "UPDATE", "DELETE"

    def explain(_: Any, cursor: Any, statement: str, values: Any, *__: Any) -> None:
        if statement.startswith(explained):
            rows = cursor.connection.execute(f"EXPLAIN QUERY PLAN {statement}", values)
            plans.extend(f"{row[3]}  of  {statement}" for row in rows)

    event.listen(store._engine, "before_cursor_execute", explain)
    for number in range(4):
        give(store, f"{number}", webhook="https://a.example/")
    store.add(job("named"), b"form", b"digest", "name", ONE, Daily())
    for name in ("0", "1"):
        record = take(store, "x", 1.0)
        assert record is not None
        store.beat("x", {name: Lease(RUN, record.fence, {"step": 1})})
        end(store, name, record.fence, most=1)
    telling = take(store, "x", 99.0, TELL)
    assert telling is not None
    store.webhook_ended(telling.id, telling.fence, delivered=True)
    record = take(store, "x", 2.0)
    assert record is not None
    store.put_back(record.id, record.fence, 0.0, failed=True)
    assert take(store, "x", 2.0)
    store.free("x")
    assert store.listed("a", 2, "3") is not None
    store.expire(1e6, 1.0, 1.0, None)
    store.remove("named")
    full = [plan for plan in plans if "SCAN maskserve_job" in plan or "TEMP B-TREE" in plan]
    small = ("maskserve_job_counts_2", "maskserve_job_owners_2", "maskserve_job_usage_2")
    assert [plan for plan in full if not plan.split("SCAN ")[-1].startswith(small)] == []
    assert len(plans) > 40
    store.close()


def test_what_is_counted_is_what_is_there(store: JobStore) -> None:
    """Random ways of jobs of some keys and routers, beside a look at all rows."""
    draw = fresh_random()
    claims: dict[str, tuple[str, int]] = {}
    for number in range(200):
        now_s = float(number)
        match draw.randrange(9):
            case 0 | 1 | 2:
                webhook = draw.choice((None, "https://a.example/"))
                give(store, f"{number}", draw.choice("abc"), created=now_s, webhook=webhook)
            case 3 | 4:
                owner, kind = draw.choice("xy"), draw.choice((RUN, RUN, TELL))
                if (record := take(store, owner, now_s, kind)) is not None:
                    claims[record.id] = owner, record.fence
            case 5 if claims:
                name = draw.choice(list(claims))
                result = bytes(draw.randrange(9))
                end(store, name, claims[name][1], now=now_s, most=4, keep_s=30.0, result=result)
                store.webhook_ended(name, claims.pop(name)[1], delivered=True)
            case 6 if claims:
                name = draw.choice(list(claims))
                store.put_back(name, claims.pop(name)[1], now_s + 3, failed=draw.random() < 0.5)
            case 7:
                owner = draw.choice("xy")
                if draw.random() < 0.5 and owner in store.beats():
                    lose(store, owner)
                store.beat(owner, {n: Lease(RUN, h[1]) for n, h in claims.items() if h[0] == owner})
            case 8:
                scope = draw.choice("abc")
                for listed_job in (store.listed(scope, 2) or [])[1:]:
                    if draw.random() < 0.5:
                        store.remove(listed_job.id)
                    else:
                        end(store, listed_job.id, None, state=CANCELLED, now=now_s, most=4)
                store.expire(now_s, 30.0, 60.0, None)
        check_counts(store)


def test_nothing_of_a_deleted_job_is_left_in_files(tmp_path: Path) -> None:
    store = open_store(str(tmp_path / "jobs.sqlite"))
    secret = b"a prompt that nobody is to read" * 1000
    for name in ("1", "2", "3"):
        record = JobRecord(name, "a", QUEUED, 0.0, len(secret))
        store.add(record, secret, b"", None, ONE, Daily())
    store.remove("1")
    end(store, "2", None, state=CANCELLED)
    end(store, "3", None, result=secret)
    store.remove("3")
    store.tidy()
    for file in tmp_path.iterdir():
        assert b"nobody is to read" not in file.read_bytes(), file.name
    store.close()


def test_a_request_named_twice_is_one_job(store: JobStore) -> None:
    def ask(name: str, digest: bytes, scope: str = "a") -> tuple[str, bool]:
        record, new = store.add(job(name, scope), b"form", digest, "same", ONE, Daily(jobs=2))
        return record.id, new

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
    assert store.used("a", 0.0) == Daily(*(2 * amount for amount in ONE))


def test_routers_beside_one_another_run_each_job_once(place: str) -> None:
    """Several that take, lose and end jobs at random; every job has one end, of its last owner."""
    stores = [open_store(place) for _ in range(4)]
    for number in range(24):
        give(stores[0], f"{number}", "abc"[number % 3])
    ends: list[tuple[str, str]] = []
    clock, lock = [0.0], threading.Lock()

    def router(number: int) -> None:
        draw, store = random.Random(number), stores[number]
        while store.counts("")[0].open:
            with lock:
                clock[0] += draw.choice((0.0, 1.0, 4.0))
                now_s = clock[0]
            if draw.random() < 0.3 and (beats := store.beats()):  # takes another for lost
                owner = draw.choice(sorted(beats))
                store.free(owner, beats[owner])
            record = take(store, f"r{number}", now_s)
            if record is None or draw.random() < 0.3:  # killed
                continue
            result = f"r{number}".encode()
            if end(store, record.id, record.fence, now=now_s, keep_s=1e6, result=result):
                ends.append((record.id, result.decode()))

    with ThreadPoolExecutor(4) as pool:
        for future in [pool.submit(router, number) for number in range(4)]:
            future.result(60)
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


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 16 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(folder)]
    if os.geteuid() or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("nothing may be mounted here")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_on_a_full_disk_jobs_end_and_are_deleted(small_disk: Path) -> None:
    store = open_store(str(small_disk / "jobs.sqlite"))
    form = bytes(range(256)) * 1000

    def fill() -> None:
        for number in range(100):
            record = JobRecord(f"{number}", "a", QUEUED, float(number), len(form))
            store.add(record, form, b"", None, ONE, Daily())

    with pytest.raises(OperationalError, match="full"):
        fill()
    assert store.counts("a")[1].open > 10
    store.remove("0")
    store.tidy()
    assert end(store, "1", None, state=CANCELLED)
    store.tidy()
    job_record = take(store, "x", 99.0)
    assert job_record is not None
    assert end(store, job_record.id, job_record.fence, result=form[:1000])
    store.remove("3")
    store.tidy()
    check_counts(store)
    give(store, "new")
    store.close()


def test_only_its_owner_reads_the_file(tmp_path: Path) -> None:
    store = open_store(str(tmp_path / "state" / "jobs.sqlite"))
    give(store, "1")
    assert {file.stat().st_mode & 0o077 for file in (tmp_path / "state").iterdir()} == {0}
    store.close()


@pytest.mark.parametrize("port", ["many", "99999999", "0", "-1", "65536"])
def test_a_bad_port_is_told_in_words(port: str) -> None:
    with pytest.raises(ConfigError, match=r"\[jobs\] database: its port .*accepted: 1 to 65535"):
        open_store(f"postgresql+psycopg://user@localhost:{port}/jobs")


@pytest.mark.parametrize("place", ["nodatabase://x", "sqlite+nodriver:///x", "://"])
def test_no_database_is_told(place: str) -> None:
    with pytest.raises(ConfigError, match=r"\[jobs\] database: "):
        open_store(place)
