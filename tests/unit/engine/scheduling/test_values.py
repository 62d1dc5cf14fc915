"""The folder of values that pass between the nodes of workflows."""

from __future__ import annotations

import errno
import gc
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from maskserve_benchmarks.checkout import CHECKOUT
from maskserve_common.config import LimitsConfig, ValuesConfig
from maskserve_common.errors import InvalidRequest, TemplateNotFound
from maskserve_common.files import values as values_module
from maskserve_common.files.store import FileStore
from maskserve_common.files.values import NO_VALUES, Values, parse
from maskserve_common.imaging.images import (
    as_file,
    decode_image,
    decode_mask,
    encode_png,
    plain_picture,
    read_size,
)
from tests.support.draws import fresh_rng

LIMITS = LimitsConfig()


def values(folder: Path, **more: Any) -> Values:
    return Values(ValuesConfig(str(folder), **{"least_bytes": 1, **more}))


def left(folder: Path) -> set[str]:
    """Names of values, of files on their way, of owners, and of runs that are not over."""
    names = {path.name for path in folder.iterdir() if not path.name.startswith(".")}
    return names.union(
        *([p.name for p in folder.glob(at)] for at in (".new/*", ".owners/*/*/*", ".open/*"))
    )


def maps(folder: Path) -> int:
    return Path("/proc/self/maps").read_text().count(str(folder))


def test_who_shares_the_folder_reads_what_another_has_put(tmp_path: Path) -> None:
    maker, reader = values(tmp_path), values(tmp_path)
    assert maker.host == reader.host != ""
    maker.begin("k1", "run")
    name = maker.put([b"he", memoryview(b"llo")], "k1", "run")
    assert name is not None
    assert bytes(reader.read(name, "k1")) == b"hello"
    assert reader.stored() == maker.stored()
    assert (reader.stored().count, reader.stored().bytes) == (1, 5)
    assert maker.put([b"hello"], "k1", "run") == name
    value = reader.read(name, "k1")
    maker.end("k1", "run")
    assert bytes(value) == b"hello"  # who has mapped it has it
    assert left(tmp_path) == set()
    assert maps(tmp_path) == 1
    del value
    gc.collect()
    assert maps(tmp_path) == 0
    with pytest.raises(TemplateNotFound, match="is not known here"):
        reader.read(name, "k1")
    assert values(tmp_path / "other").host != maker.host


def test_a_value_of_another_key_is_as_if_it_were_not_there(tmp_path: Path) -> None:
    folder = values(tmp_path)
    folder.begin("k1", "run")
    folder.begin("k2", "run")
    name = folder.put([b"secret"], "k1", "run")
    assert name is not None
    messages = []
    for element in (name, name.replace(name[6:10], b"0000")):
        with pytest.raises(TemplateNotFound) as refused:
            folder.read(element, "k2")
        messages.append(str(refused.value).replace(element[6:18].decode(), ""))
    assert messages[0] == messages[1]
    named_value = parse(name)
    assert named_value is not None
    assert not folder.share([named_value[0]], "k2", "run")
    folder.end("k2", "run")
    assert folder.share([named_value[0]], "k1", "run")
    assert folder.put([b"secret"], "k2", "run") is None  # that run is over
    folder.begin("k2", "run")
    assert folder.put([b"secret"], "k2", "run") == name  # who has the bytes may name them
    assert bytes(folder.read(name, "k2")) == b"secret"
    folder.end("k1", "run")
    assert bytes(folder.read(name, "k2")) == b"secret"
    assert bytes(folder.read(name, "")) == b"secret"  # who sees all templates, too


def test_what_comes_behind_the_end_of_its_run_is_not_kept(tmp_path: Path) -> None:
    """A node's server was still at work when its run was cancelled."""
    folder, starts = values(tmp_path), threading.Barrier(5)
    folder.begin("", "run")

    def put(number: int) -> None:
        starts.wait()
        for i in range(20):
            folder.put([b"%d %d" % (number, i)], "", "run")

    threads = [threading.Thread(target=put, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    starts.wait()
    folder.end("", "run")
    for thread in threads:
        thread.join()
    assert left(tmp_path) == set()


def test_values_go_with_the_last_run_that_has_them(tmp_path: Path) -> None:
    folder = values(tmp_path)
    for run in ("a", "b"):
        folder.begin("k", run)
    names = [folder.put([part], "k", "a") for part in (b"one", b"two")]
    plain = [parse(name or b"") for name in names]
    assert all(plain)
    one, two = (named_value[0] for named_value in plain if named_value is not None)
    assert folder.share([one], "k", "b")
    folder.free([one, two], "k", "a")
    assert bytes(folder.read(names[0] or b"", "k")) == b"one"
    assert folder.stored().count == 1
    assert not folder.share([one, two], "k", "b")
    folder.end("k", "b")
    assert folder.stored().count == 0


def test_runs_whose_router_died_expire(tmp_path: Path) -> None:
    folder = values(tmp_path, expires_s=60)
    for run in ("dead", "alive"):
        folder.begin("k", run)
        assert folder.put([run.encode()], "k", run)
    now_s = time.time() - 61
    os.utime(tmp_path / ".open" / "k-dead", (now_s, now_s))
    assert folder.share([], "k", "alive")
    assert {name for name in left(tmp_path) if "dead" in name} == set()
    assert folder.stored().count == 1


def test_what_a_killed_router_had_expires_where_no_other_run_comes(tmp_path: Path) -> None:
    """It stayed until the next one."""
    dies = "from tests.unit.engine.scheduling.test_values import die; die()"
    killed = subprocess.run([sys.executable, "-c", dies, str(tmp_path)], cwd=CHECKOUT, check=False)
    assert killed.returncode == -signal.SIGKILL
    host = values(tmp_path, expires_s=60)
    assert host.stored().count == 1
    now_s = time.time() - 61
    os.utime(tmp_path / ".open" / "k-dead", (now_s, now_s))
    assert values(tmp_path, expires_s=60).stored().count == 0
    assert left(tmp_path) == set()


def test_what_has_expired_is_gone_when_somebody_asks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to a minute later it was still there."""
    begin = time.time()
    now = begin
    clock = SimpleNamespace(time=lambda: now, monotonic=lambda: now)
    monkeypatch.setattr(values_module, "time", clock)
    folder = values(tmp_path, expires_s=10)
    for run, used in (("first", begin - 4), ("second", begin)):
        folder.begin("k", run)
        assert folder.put([run.encode()], "k", run)
        os.utime(tmp_path / ".open" / f"k-{run}", (used, used))
    for after, value_count in ((0, 2), (5.9, 2), (6.1, 1), (9.9, 1), (10.1, 0)):
        now = begin + after
        assert folder.stored().count == value_count


def die() -> None:
    """End as a router that is killed while a run has a value."""
    folder = values(Path(sys.argv[1]))
    folder.begin("k", "dead")
    assert folder.put([b"picture"], "k", "dead")
    os.kill(os.getpid(), signal.SIGKILL)


def test_what_finds_no_room_goes_as_bytes_and_the_log_says_so_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = values(tmp_path, max_bytes=10)
    folder.begin("k", "run")
    assert folder.put([bytes(10)], "k", "run")
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert folder.put([b"more"], "k", "run") is None
        assert len(caplog.records) == 1
        assert "[values] max_bytes, 10" in caplog.text

        def full(*_: object) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        other = values(tmp_path)
        monkeypatch.setattr(os, "posix_fallocate", full)
        for _ in range(3):
            assert other.put([b"other"], "k", "run") is None
        assert len(caplog.records) == 2
        assert "No space left" in caplog.text
    assert folder.stored().count == 1
    assert not [*tmp_path.glob(".new/*")]


def test_one_key_may_not_fill_the_folder(tmp_path: Path) -> None:
    folder = values(tmp_path, max_bytes=120)
    for key in ("greedy", "modest"):
        folder.begin(key, "run")
    puts = [folder.put([b"%d" % i * 10], "greedy", "run") for i in range(9)]
    assert puts[:3].count(None) == 0
    assert puts.count(None) >= 3
    assert folder.put([b"m" * 30], "modest", "run")


def test_small_values_and_those_of_no_run_go_as_bytes(tmp_path: Path) -> None:
    folder = values(tmp_path, least_bytes=6)
    folder.begin("k", "run")
    assert folder.put([b"small"], "k", "run") is None
    assert folder.put([b"larger"], "k", "") is None
    assert NO_VALUES.put([b"larger"], "k", "run") is None
    assert NO_VALUES.read(b"value:x", "k") == b"value:x"
    assert NO_VALUES.stored().host == ""
    assert folder.read(b"\x89PNG", "k") == b"\x89PNG"
    unwritable = values(Path("/proc/nowhere"))
    assert unwritable.host == ""


@pytest.mark.parametrize("shape", [(5, 7), (5, 7, 3), (1, 1)])
def test_plain_pictures_are_what_their_png_is(shape: tuple[int, ...]) -> None:
    pixels = fresh_rng().integers(0, 256, shape, np.uint8)
    plain, png = b"".join(plain_picture(pixels)), encode_png(pixels)
    assert as_file(memoryview(plain)) == png == as_file(png)
    for read in (decode_image, decode_mask):
        a, b = (read(encoded, "IMAGE", LIMITS) for encoded in (memoryview(plain), png))
        for name in ("pixels", "alpha", "luminance"):
            field_value: Any = getattr(a, name, None)
            np.testing.assert_array_equal(field_value, getattr(b, name, None))
    assert decode_image(plain, "IMAGE", LIMITS).template_id == (
        decode_image(png, "IMAGE", LIMITS).template_id
    )
    assert read_size(plain, "IMAGE", LIMITS) == shape[:2]
    small = LimitsConfig(max_side=8, max_pixels=64)
    large = b"".join(plain_picture(np.zeros((9, 2), np.uint8)))
    for refused in (large, encode_png(np.zeros((9, 2), np.uint8))):
        with pytest.raises(InvalidRequest, match="IMAGE: is 2x9 pixels; accepted: sides of up to"):
            decode_image(refused, "IMAGE", small)
    with pytest.raises(InvalidRequest, match="MASK: is "):
        decode_mask(plain, "MASK", LIMITS, (3, 3))
    with pytest.raises(InvalidRequest):
        decode_image(plain[:-1], "IMAGE", LIMITS)


def test_a_lock_that_another_process_keeps_holds_nobody_up(tmp_path: Path) -> None:
    """As a node server that is stopped while it has it: values go as bytes, and calls return."""
    config = ValuesConfig(str(tmp_path / "values"), least_bytes=1)
    folder = Values(config, wait_s=0.5)
    folder.begin("a", "run")
    reference = folder.put([b"a value"], "a", "run")
    assert reference is not None
    with FileStore(config.folder).alone():
        began = time.monotonic()
        for _ in range(20):
            folder.begin("a", "other")
            assert folder.put([b"another"], "a", "run") is None
            assert not folder.share([], "a", "run")
            folder.free([], "a", "run")
            folder.end("a", "other")
        assert time.monotonic() - began < 25.0  # 50 s, where each call waits
        assert bytes(folder.read(reference, "a")) == b"a value"  # readers take no lock
    folder._closed_until = 0.0
    assert folder.put([b"another"], "a", "run") is not None


def test_what_a_run_costs_does_not_grow_with_those_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each value that was put, read or let go listed all that there were."""
    spent = []
    for value_count in (10, 200):
        folder = values(tmp_path / str(value_count))
        folder.begin("k", "long")
        for number in range(value_count):
            assert folder.put([b"%d" % number], "k", "long")
        assert folder.stored().count == value_count
        looks, listdir = Counter[str](), os.listdir

        def listing(*args: Any, looks: Counter[str] = looks, listdir: Any = listdir) -> list[Any]:
            names = listdir(*args)
            looks["listed"] += len(names)
            return list(names)

        with monkeypatch.context() as patch:
            patch.setattr(os, "listdir", listing)
            patch.setattr(os, "scandir", None)
            folder.begin("k2", "run")
            name = folder.put([b"a value"], "k2", "run")
            assert name is not None
            assert bytes(folder.read(name, "k2")) == b"a value"
            named_value = parse(name)
            assert named_value is not None
            assert folder.share([named_value[0]], "k2", "run")
            assert folder.stored().count == value_count + 1
            folder.free([named_value[0]], "k2", "run")
            folder.end("k2", "run")
        spent.append(looks)
    assert spent[0] == spent[1]
