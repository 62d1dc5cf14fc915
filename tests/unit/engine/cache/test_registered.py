"""Files that a device reads by itself: what is registered, for how long, and what if it may not."""

from __future__ import annotations

import gc
import logging
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from maskserve_engine.cache.entry_file import OpenFile
from maskserve_engine.cache.folder_tier import FolderTier
from maskserve_engine.cache.registered import Registered, Registrar, on_tmpfs
from tests.fakes.cuda_runtime import CPU, Passed, Runtime
from tests.fakes.entries import ANCHORS, NOTE, random_entry
from tests.support.draws import fresh_rng
from tests.support.eventually import eventually


@pytest.fixture
def runtime() -> Runtime:
    return Runtime()


@pytest.fixture
def registrar(runtime: Runtime) -> Iterator[Registrar]:
    registrar = Registrar(CPU, runtime)
    yield registrar
    registrar.close()
    assert not runtime.ranges


def file_of(path: Path, content: bytes) -> OpenFile:
    path.write_bytes(content)
    return OpenFile(path)


def registered(registrar: Registrar, file: OpenFile) -> Registered:
    register = registrar.register(file.descriptor, file.nbytes)
    assert register is not None
    return register


def test_the_whole_file_is_registered_as_it_is(
    tmp_path: Path, registrar: Registrar, runtime: Runtime
) -> None:
    content = fresh_rng().bytes(10_000)
    file = file_of(tmp_path / "file", content)
    (tmp_path / "file").unlink()  # evicted before it was registered
    registration = registered(registrar, file)
    assert registration.memory is not None
    assert runtime.ranges == {registration.memory.data_ptr(): 10_000}
    assert registrar.nbytes == 10_000
    assert registration.memory.numpy().tobytes() == content
    del registration
    eventually("unregistered", lambda: not runtime.ranges)
    assert registrar.nbytes == 0


def test_it_stays_registered_until_the_last_copy_is_done(
    tmp_path: Path, registrar: Registrar, runtime: Runtime
) -> None:
    files = [file_of(tmp_path / name, b"x" * 5000) for name in "ab"]
    slow, quick = [registered(registrar, file) for file in files]
    on_its_way = Passed(passed=False)
    slow.record_copy(Passed())
    slow.record_copy(on_its_way)
    content = slow.memory
    del slow, quick
    gc.collect()
    with pytest.raises(AssertionError):
        eventually("unregistered", lambda: len(runtime.ranges) == 0, timeout_s=0.3)
    assert content is not None
    assert runtime.holds(content)
    on_its_way.passes.set()
    eventually("unregistered", lambda: not runtime.ranges)


def test_an_evicted_entry_is_let_go_with_its_last_reader(
    tmp_path: Path, registrar: Registrar, runtime: Runtime
) -> None:
    def register(file: OpenFile) -> None:
        file.registered = registrar.register(file.descriptor, file.nbytes)

    tier = FolderTier("host", tmp_path, 10**8, opened=register)
    assert tier.put("k", random_entry(0), NOTE)
    entry = tier.open("k", ANCHORS[0])
    assert entry is not None
    assert list(runtime.ranges.values()) == [entry.file.nbytes]
    row = entry.blocks[0].part("kv")  # what a load holds of it
    tier.evict("k")
    del entry
    assert runtime.ranges
    assert row
    del row
    eventually("unregistered", lambda: not runtime.ranges)


@pytest.mark.parametrize("errors", [{"refuses": 2}, {"refuses": 801}])
def test_a_refusal_is_told_once_and_nothing_is_asked_for_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, errors: dict[str, int]
) -> None:
    runtime = Runtime(**errors)
    registrar = Registrar(CPU, runtime)
    with caplog.at_level(logging.WARNING):
        for name in "abc":
            file = file_of(tmp_path / name, b"x" * 100)
            assert registrar.register(file.descriptor, file.nbytes) is None
    assert runtime.calls == 1
    [line] = caplog.messages
    assert f"error {errors['refuses']}" in line
    registrar.close()


def test_a_file_that_may_not_be_mapped_is_a_refusal(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, runtime: Runtime
) -> None:
    file = file_of(tmp_path / "file", b"x" * 100)
    os.truncate(tmp_path / "file", 10)
    registrar = Registrar(CPU, runtime)
    assert registrar.register(file.descriptor, file.nbytes) is None
    assert runtime.calls == 0
    assert "truncated" in caplog.text
    registrar.close()


def test_nothing_is_registered_of_an_empty_file(
    tmp_path: Path, registrar: Registrar, runtime: Runtime
) -> None:
    file = file_of(tmp_path / "file", b"")
    assert registrar.register(file.descriptor, 0) is None
    assert runtime.calls == 0


def test_a_closed_registrar_has_let_go_of_what_is_still_held(
    tmp_path: Path, runtime: Runtime
) -> None:
    registrar = Registrar(CPU, runtime)
    file = file_of(tmp_path / "file", b"x" * 100)
    registration = registered(registrar, file)
    registrar.close()
    assert not runtime.ranges
    assert registration.memory is None
    assert registrar.register(file.descriptor, file.nbytes) is None
    registrar.close()


def test_many_threads_that_open_and_drop_leave_nothing(tmp_path: Path) -> None:
    runtime = Runtime()
    registrar = Registrar(CPU, runtime)
    files = [file_of(tmp_path / str(n), b"x" * (1000 + n)) for n in range(8)]

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        registrations: dict[int, Registered] = {}
        for number in rng.integers(0, len(files), 60).tolist():
            mine = registrations.pop(number, None)
            if mine is None:
                registrations[number] = registered(registrar, files[number])
                registrations[number].record_copy(Passed())

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert runtime.total > 60
    eventually("unregistered", lambda: not runtime.ranges)
    registrar.close()


def test_where_files_are_memory() -> None:
    assert on_tmpfs("/dev/shm")
    assert on_tmpfs("/dev/shm/not/there/yet")
    assert not on_tmpfs("/proc")
    assert not on_tmpfs(str(Path(torch.__file__).parent))
