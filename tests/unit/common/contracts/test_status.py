"""The status record between processes: whole records only, no waiting, and no exceptions."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from maskserve_common.contracts.pricing import Pricing
from maskserve_common.contracts.status_record import NodeStatus, Served
from maskserve_common.status import RowStatus, StatusReader, StatusWriter, WorkerStatus
from tests.support.draws import fresh_random, fresh_rng
from tests.support.examples import examples

ROW = RowStatus("edit-1", "cached", 103, 4096, 17, "0f" * 32, 3)
STATUS = WorkerStatus(
    "worker-0",
    "demo",
    "ready",
    max_rows=8,
    max_waiting=256,
    running=(ROW, replace(ROW, request_id="edit-2", kind="dense", active_tokens=4096)),
    waiting=(replace(ROW, request_id="prime-1", kind="prime"),),
    tier_bytes={"host": 2**33, "disk": 0},
    counters={"steps_total": 12.0},
    templates={"host": ("0f" * 32, "1e" * 32), "disk": ()},
    served=Served(1024, 16, 28, dense_above_ratio=0.9, mask_ring=1),
    pricing=Pricing(0.004, 0.12, 0.012, 2.6e-5, 3e-6, {"disk": 2.0}, 4096.0),
)


def large(i: int) -> WorkerStatus:
    """A record whose every part is told by `i`, of some 1 to 40 KB."""
    size = 1 + i % 40
    return replace(
        STATUS,
        worker=str(i),
        counters={"i": float(i)},
        running=tuple(replace(ROW, request_id=str(i), steps_left=i) for _ in range(size)),
        templates={"host": (str(i // 7),) * size},
    )


def write(writer: StatusWriter, status: WorkerStatus) -> WorkerStatus:
    """Write a status and return the one that readers should see from now on."""
    return replace(status, **writer.write(status)._asdict())


def is_whole(status: WorkerStatus) -> bool:
    i = int(status.worker)
    stamps = {"sequence": 0, "wall_ns": 0, "monotonic_ns": 0}
    return replace(status, **stamps) == large(i)  # type: ignore[arg-type]


def test_json_there_and_back():
    assert WorkerStatus.from_json(STATUS.to_json()) == STATUS
    assert json.loads(STATUS.to_json())["running"][0]["active_tokens"] == 103


def test_a_record_names_the_nodes_and_their_models() -> None:
    nodes = (NodeStatus("denoiser", "demo", "ready"), NodeStatus("upscaler", "big", "loading"))
    status = replace(STATUS, nodes=nodes)
    assert WorkerStatus.from_json(status.to_json()) == status
    assert STATUS.takes_edits
    assert not status.takes_edits
    assert status.ended is None
    nodes[1].state = "ready"
    assert status.takes_edits
    nodes[1].state = "failed"
    assert status.ended == "upscaler (big) has failed"
    assert not status.takes_edits
    assert replace(status, state="stopped").ended == "engine has stopped"


def test_a_record_without_nodes_is_read_as_before() -> None:
    values = json.loads(STATUS.to_json())
    del values["nodes"]
    for state, takes, ended in (
        ("ready", True, None),
        ("loading", False, None),
        ("failed", False, "engine has failed"),
    ):
        read = WorkerStatus.from_json(json.dumps({**values, "state": state}))
        assert (read.nodes, read.takes_edits, read.ended) == ((), takes, ended)


def test_fields_of_a_later_writer_are_skipped_and_missing_ones_take_defaults():
    values = json.loads(STATUS.to_json())
    values["new"] = 1
    values["running"][0]["new"] = [2]
    del values["counters"]
    del values["waiting"][0]["template_id"]
    read = WorkerStatus.from_json(json.dumps(values))
    assert read.running == STATUS.running
    assert read.counters == {}
    assert read.waiting[0].template_id == ""


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"null",
        b"[]",
        b'{"version":2}',
        b"{" * 10**5,
        b"[" * 10**6,
        b"\xff\xfe",
        STATUS.to_json().replace(b'"version":2', b'"version":3'),
        STATUS.to_json().replace(b'"ready"', b'"fine"'),
        STATUS.to_json().replace(b'"dense"', b'"thick"'),
        STATUS.to_json().replace(b'"templates":{', b'"templates":[],"x":{'),
        STATUS.to_json().replace(b'"step":0.004', b'"step":-1'),
    ],
    ids=range(12),
)
def test_what_is_no_record_is_a_value_error(raw: bytes):
    with pytest.raises(ValueError, match="not a status record"):
        WorkerStatus.from_json(raw)


def test_a_written_record_is_read_and_numbered_and_stamped(tmp_path: Path):
    writer, reader = StatusWriter(tmp_path / "s"), StatusReader(tmp_path / "s")
    assert reader.read() is None
    before_ns = time.monotonic_ns()
    for i in range(1, 6):
        written = write(writer, replace(STATUS, counters={"i": float(i)}))
        read = reader.read()
        assert read == written
        assert read is not None
        assert (read.sequence, read.counters["i"]) == (i, i)
    assert before_ns <= read.monotonic_ns <= time.monotonic_ns()
    assert 0.0 <= read.age_s() < 60.0
    assert read.age_s(read.monotonic_ns + 1_500_000_000) == 1.5
    assert abs(read.wall_ns - time.time_ns()) < 60e9
    raw = reader.read_json()
    assert raw is not None
    assert WorkerStatus.from_json(raw) == read


def test_a_record_that_outgrows_the_file_gets_a_larger_one(tmp_path: Path):
    writer, reader = StatusWriter(tmp_path / "s"), StatusReader(tmp_path / "s")
    for size in (1, 500, 2, 5000, 5001, 3):
        rows = tuple(replace(ROW, request_id=str(i)) for i in range(size))
        written = write(writer, replace(STATUS, running=rows))
        assert reader.read() == written
    assert os.listdir(tmp_path) == ["s"]


def test_what_changes_from_step_to_step_is_read_as_written(tmp_path: Path):
    """The same rows and record, changed in place, as the engine keeps them."""
    writer, reader = StatusWriter(tmp_path / "s"), StatusReader(tmp_path / "s")
    waiting = (replace(ROW, request_id='%s "{0}" é', kind="prime"),)
    status = replace(STATUS, running=(replace(ROW), replace(ROW, kind="dense")), waiting=waiting)
    for steps_left in (17, 16, 2, 1, 0):
        status.running[1].steps_left = steps_left
        status.counters = {
            "steps_total": 17 - steps_left,
            'odd %d "name".device': 1e-7 * steps_left,
        }
        status.tier_bytes = {"host": 2**40 + steps_left}
        if steps_left == 1:
            status.state, status.waiting = "draining", (*waiting, ROW)
        written = write(writer, status)
        assert reader.read() == written


def test_a_restarted_writer_is_followed_and_the_old_record_stays_until_then(tmp_path: Path):
    reader = StatusReader(tmp_path / "s")
    first = StatusWriter(tmp_path / "s")
    first.write(STATUS)
    last = write(first, replace(STATUS, state="failed"))
    first.close()
    second = StatusWriter(tmp_path / "s")
    assert reader.read() == last
    written = write(second, replace(STATUS, worker="again"))
    assert reader.read() == written
    assert written.sequence == 1
    (tmp_path / "s").unlink()
    assert reader.read() is None
    second.close()
    assert write(StatusWriter(tmp_path / "s"), STATUS) == reader.read()


def test_a_write_cut_short_leaves_the_record_before_it(tmp_path: Path):
    writer, reader = StatusWriter(tmp_path / "s"), StatusReader(tmp_path / "s")
    records = [write(writer, replace(STATUS, counters={"i": float(i)})) for i in range(4)]
    raw = bytearray((tmp_path / "s").read_bytes())
    newest = raw.index(records[-1].to_json())
    raw[newest + 100] ^= 1
    (tmp_path / "s").write_bytes(raw)
    assert reader.read() == records[-2]


@examples(200)
@given(
    damage=st.lists(st.tuples(st.integers(0, 40_000), st.integers(1, 255)), max_size=4),
    length=st.none() | st.integers(0, 40_000),
)
def test_a_damaged_file_gives_a_true_record_or_none(
    tmp_path_factory: pytest.TempPathFactory,
    damage: list[tuple[int, int]],
    length: int | None,
):
    path = tmp_path_factory.mktemp("s") / "s"
    writer = StatusWriter(path)
    records = [write(writer, replace(STATUS, counters={"i": float(i)})) for i in range(2)]
    writer.close()
    raw = bytearray(path.read_bytes())[:length]
    for offset, flip in damage:
        if offset < len(raw):
            raw[offset] ^= flip
    path.write_bytes(raw)
    reader = StatusReader(path)
    assert reader.read() in (None, *records)
    reader.close()


@pytest.mark.parametrize(
    "content", [b"", b"x", b"maskstat", fresh_rng(__name__).bytes(4096), bytes(4096)]
)
def test_a_foreign_file_gives_none(tmp_path: Path, content: bytes):
    (tmp_path / "s").write_bytes(content)
    reader = StatusReader(tmp_path / "s")
    assert reader.read() is None
    written = write(StatusWriter(tmp_path / "s"), STATUS)
    assert reader.read() == written


def test_what_is_no_file_gives_none(tmp_path: Path):
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "folder", tmp_path / "pipe", tmp_path / "folder" / "none"):
        assert StatusReader(path).read() is None


def test_a_writer_without_a_folder_raises_and_leaves_nothing(tmp_path: Path):
    with pytest.raises(OSError, match="none"):
        StatusWriter(tmp_path / "none" / "s").write(STATUS)
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "x").touch()
    with pytest.raises(OSError, match="taken"):
        StatusWriter(tmp_path / "taken").write(STATUS)
    assert os.listdir(tmp_path) == ["taken"]


def _write_until_killed(path: str) -> None:
    writer = StatusWriter(path)
    rng = fresh_random("writer")
    while True:
        writer.write(large(rng.randrange(10**6)))


def _read_until_stopped(path: str, stop: Any, results: Any) -> None:
    reader = StatusReader(path)
    whole = torn = 0
    slowest = 0.0
    while not stop.is_set() or whole + torn <= 100:
        start = time.thread_time()
        status = reader.read()
        slowest = max(slowest, time.thread_time() - start)
        if status is not None and is_whole(status):
            whole += 1
        else:
            torn += 1
    results.put((whole, torn, slowest))


def test_readers_of_a_busy_writer_that_is_killed_and_restarted_see_whole_records(tmp_path: Path):
    path = str(tmp_path / "s")
    StatusWriter(path).write(large(1))
    context = multiprocessing.get_context("spawn")
    stop, results = context.Event(), context.Queue()
    readers = [
        context.Process(target=_read_until_stopped, args=(path, stop, results)) for _ in range(2)
    ]
    for reader in readers:
        reader.start()
    status_reader = StatusReader(path)
    for _ in range(3):
        inode_before = os.stat(path).st_ino
        writer = context.Process(target=_write_until_killed, args=(path,))
        writer.start()
        # A new file, and enough records in it for readers to meet many writes.
        while True:
            status = status_reader.read()
            assert status is not None
            if os.stat(path).st_ino != inode_before and status.sequence > 1000:
                break
            time.sleep(0.01)
        assert writer.pid is not None
        os.kill(writer.pid, signal.SIGKILL)
        writer.join()
    stop.set()
    for _ in readers:
        whole, torn, slowest = results.get(timeout=60)
        assert torn == 0
        assert whole > 100
        assert slowest < 0.1  # CPU time of one read: no spinning on a writer
    for reader in readers:
        reader.join()
    last = status_reader.read()
    assert last is not None
    assert is_whole(last)
