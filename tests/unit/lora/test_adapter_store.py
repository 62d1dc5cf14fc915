"""Adapters on their way to a host: which there are, bringing them, and what goes wrong."""

from __future__ import annotations

import contextlib
import hashlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from msgspec import structs

from maskserve_common.config import Config
from maskserve_common.errors import AdapterNotFound, InvalidRequest, Overloaded
from maskserve_lora.base_layers import BaseLayers
from maskserve_lora.catalogue import Catalogue
from maskserve_lora.header_process import HeaderDescription
from maskserve_lora.lora_header import BadAdapter
from maskserve_lora.operations import AdapterOperations
from maskserve_lora.storage import CHUNK_BYTES, Storage, StorageFailed
from maskserve_lora.store import AdapterStore, describe_file
from tests.fakes.loras import OTHER_MODEL, lora, write

DEMO = Path(__file__).parents[3] / "assets" / "models" / "demo"


class Shelf(Storage):
    """A storage that can be slow, silent or gone; counts what is read."""

    def __init__(self, url: str, timeout_s: float = 5.0) -> None:
        super().__init__(url, timeout_s)
        self.takes_s = 0.0
        self.is_lost = False
        self.reads: list[tuple[str, int, int]] = []
        self.between: Any = None

    def read(self, path: str, begin: int, end: int) -> bytes:
        self.reads.append((path, begin, end))
        data = super().read(path, begin, end)
        if self.between is not None:
            self.between()
        return data

    def _file_system(self) -> tuple[Any, str]:
        time.sleep(self.takes_s)
        if self.is_lost:
            raise OSError("the network is unreachable")
        return super()._file_system()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    store = tmp_path / "store"
    store.mkdir()
    return store


def config_of(tmp_path: Path, **adapters: Any) -> Config:
    plain = Config()
    values = {"store": str(tmp_path / "store"), "host_dir": str(tmp_path / "host"), **adapters}
    return structs.replace(
        plain,
        model=structs.replace(plain.model, path=str(DEMO)),
        adapters=structs.replace(plain.adapters, **values),
        runtime_dir=str(tmp_path),
    )


@contextlib.contextmanager
def opened(tmp_path: Path, shelf: Storage | None = None, **adapters: Any) -> Iterator[AdapterStore]:
    config = config_of(tmp_path, **adapters)
    store = AdapterStore(config, shelf)
    try:
        yield store
    finally:
        store.close()


def fetched_bytes(store: AdapterStore, name: str) -> bytes:
    adapter = store.catalogue.find(name)
    adapter_file = store.fetch(name, adapter.version)
    raw = adapter_file.path.read_bytes()
    assert adapter_file.digest == hashlib.sha256(raw).hexdigest()
    return raw


# Which there are


def test_the_catalogue_tells_what_each_adapter_is(tmp_path: Path, folder: Path) -> None:
    raw = write(folder / "one.safetensors", lora(rank=7))
    write(folder / "two" / "pytorch_lora_weights.safetensors")
    write(folder / "bad.safetensors", lora(OTHER_MODEL, prefix="unet."))
    strays = ("notes.txt", ".hidden/x.safetensors", "a/.cache/x.safetensors", ".safetensors",
              "a/b/c/d/deep.safetensors")  # fmt: skip
    for stray in (*strays, "a b.safetensors", "-dash.safetensors", "two/other.safetensors"):
        write(folder / stray)
    with opened(tmp_path) as store:
        store.catalogue.scan()
        catalogue = store.catalogue.all()
        assert set(catalogue) == {"one", "two", "two--other", "bad", "a b", "-dash"}
        for name in ("a b", "-dash"):
            with pytest.raises(InvalidRequest, match="has a name that is not served"):
                store.catalogue.find(name)
        assert (catalogue["one"].rank, catalogue["one"].nbytes) == (7, len(raw))
        assert catalogue["one"].parts == ("denoiser",)
        assert fetched_bytes(store, "one") == raw
        assert fetched_bytes(store, "two")
        with pytest.raises(AdapterNotFound, match="no adapter three"):
            store.catalogue.find("three")


LAYOUTS = {
    "plain.safetensors": "plain",
    "upper.SAFETENSORS": "upper",
    "lightning/Qwen-Image-Lightning-4steps-V1.0.safetensors":
        "lightning--Qwen-Image-Lightning-4steps-V1.0",
    "org/repo/pytorch_lora_weights.safetensors": "org--repo",
    "org/repo/checkpoint-500/pytorch_lora_weights.safetensors": "org--repo--checkpoint-500",
    "models--org--repo/snapshots/0a1b/x.safetensors": "models--org--repo--snapshots--0a1b--x",
}  # fmt: skip


def test_files_in_folders_are_named_after_both(tmp_path: Path, folder: Path) -> None:
    raw = {
        name: write(folder / path, lora(seed=n)) for n, (path, name) in enumerate(LAYOUTS.items())
    }
    with opened(tmp_path) as store:
        store.catalogue.scan()
        assert set(store.catalogue.all()) == set(raw)
        for name, written in raw.items():
            assert fetched_bytes(store, name) == written


def test_a_listing_tells_of_a_file_that_another_of_its_name_hides(
    tmp_path: Path, folder: Path
) -> None:
    write(folder / "a--b.safetensors", lora(seed=1))
    write(folder / "c.safetensors")
    operations = AdapterOperations(config_of(tmp_path))

    def notes() -> dict[str, list[str]]:
        return {record["name"]: record["notes"] for record in operations.overview()["adapters"]}

    plain = notes()
    assert set(plain) == {"a--b", "c"}
    raw = write(folder / "a" / "b.safetensors", lora(seed=2))
    sentence = "hides a--b.safetensors, which has the same name; rename one"
    assert notes() == {**plain, "a--b": [sentence, *plain["a--b"]]}
    with opened(tmp_path) as store:
        store.catalogue.scan(at_once=True)
        assert fetched_bytes(store, "a--b") == raw
    (folder / "a--b.safetensors").unlink()
    assert notes() == plain
    operations.close()


def test_a_folder_is_checked_as_the_file_in_it(tmp_path: Path) -> None:
    write(tmp_path / "one" / "Any Name.SAFETENSORS")
    with pytest.raises(BadAdapter, match="name that is not served: 'Any Name'"):
        describe_file(tmp_path / "one")
    write(tmp_path / "two" / "mine.SAFETENSORS")
    assert describe_file(tmp_path / "two")["name"] == "mine"
    write(tmp_path / "two" / "other.safetensors")
    with pytest.raises(BadAdapter, match=r"each an adapter of its own: mine\S+, other"):
        describe_file(tmp_path / "two")
    (tmp_path / "none").mkdir()
    with pytest.raises(BadAdapter, match="is a folder without pytorch_lora_weights"):
        describe_file(tmp_path / "none")


def test_a_clock_that_is_set_back_hides_no_adapter(tmp_path: Path, folder: Path) -> None:
    """The last scan was an hour ahead of now."""
    with opened(tmp_path, rescan_s=1000.0) as store:
        store.catalogue.scan()
        write(folder / "new.safetensors")
        store.catalogue.scan()
        assert not store.catalogue.all()
        [page] = (tmp_path / "host").glob("catalogue-*.json")
        ahead = time.time() + 3600
        os.utime(page, (ahead, ahead))
        store.catalogue.scan()
        assert set(store.catalogue.all()) == {"new"}


def test_names_lead_nowhere_else(tmp_path: Path, folder: Path) -> None:
    write(tmp_path / "secret.safetensors")
    with opened(tmp_path) as store:
        store.catalogue.scan()
        for name in ("../secret", "..", "/etc/passwd", "s3://bucket/x", "", "a/b", "x" * 999):
            with pytest.raises(AdapterNotFound):
                store.catalogue.find(name)


def test_links_are_followed(tmp_path: Path, folder: Path) -> None:
    """Folders of models hold links to where the files are."""
    blob = tmp_path / "blobs" / "0a1b"
    raw = write(blob)
    (folder / "linked.safetensors").symlink_to(blob)
    (folder / "dangling.safetensors").symlink_to(tmp_path / "nowhere")
    os.utime(blob, (1.0, 1.0))
    with opened(tmp_path) as store:
        store.catalogue.scan()
        assert fetched_bytes(store, "linked") == raw
        version_before = store.catalogue.find("linked").version
        os.utime(blob, (2.0, 2.0))
        store.catalogue.scan(at_once=True)
        assert store.catalogue.find("linked").version != version_before


def test_a_link_to_a_folder_is_followed(tmp_path: Path, folder: Path) -> None:
    """As people join folders of several programs; a loop ends."""
    raw = write(tmp_path / "elsewhere" / "style" / "pytorch_lora_weights.safetensors")
    write(tmp_path / "elsewhere" / "x.safetensors")
    (folder / "joined").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "loop").symlink_to(folder)
    with opened(tmp_path) as store:
        store.catalogue.scan()
        assert {"joined--x", "joined--style"} <= set(store.catalogue.all())
        assert fetched_bytes(store, "joined--style") == raw


def test_a_folder_of_a_format_that_runs_code_is_listed_with_a_sentence(
    tmp_path: Path, folder: Path
) -> None:
    for name in ("old", "both"):
        (folder / name).mkdir()
        (folder / name / "adapter_model.bin").write_bytes(b"PK")
    write(folder / "both" / "adapter_model.safetensors")
    with opened(tmp_path) as store:
        store.catalogue.scan()
        assert not store.catalogue.find("both").problem
        with pytest.raises(InvalidRequest, match="save it as safetensors"):
            store.catalogue.find("old")


def test_a_url_is_a_storage_too(tmp_path: Path) -> None:
    memory, name = fsspec.filesystem("memory"), f"adapters-{tmp_path.name}"
    raw = write(tmp_path / "x.safetensors")
    memory.pipe_file(f"/{name}/x.safetensors", raw)
    memory.pipe_file(f"/{name}/y/pytorch_lora_weights.safetensors", raw)
    try:
        with opened(tmp_path, store=f"memory://{name}") as store:
            store.catalogue.scan()
            assert set(store.catalogue.all()) == {"x", "y"}
            assert fetched_bytes(store, "x") == fetched_bytes(store, "y") == raw
    finally:
        memory.rm(f"/{name}", recursive=True)


def test_a_header_that_was_read_costs_nothing_under_another_name_or_stamp(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that took ten seconds took them again each time its file was touched."""
    read: list[bytes] = []

    def describe(head: bytes, nbytes: int, config: bytes) -> HeaderDescription:
        read.append(head)
        return HeaderDescription(problem="takes longer than 10 s to read")

    slow = write(folder / "slow.safetensors")
    (folder / "same.safetensors").write_bytes(slow)
    with opened(tmp_path) as store:
        monkeypatch.setattr(store.catalogue._headers, "describe", describe)
        store.catalogue.scan()
        entry_before = store.catalogue.all()["slow"]
        (folder / "slow.safetensors").unlink()
        (folder / "slow.safetensors").write_bytes(slow)
        store.catalogue.scan(at_once=True)
        entries_after = store.catalogue.all()
        assert entries_after["slow"].version != entry_before.version
        assert {entry.problem for entry in entries_after.values()} == {entry_before.problem}
    assert len(read) == 1


def test_headers_are_read_once_per_version_and_host(tmp_path: Path, folder: Path) -> None:
    for name in "abc":
        write(folder / f"{name}.safetensors")
    shelf, second_shelf = Shelf(str(folder)), Shelf(str(folder))
    with opened(tmp_path, shelf, rescan_s=0.05) as store, opened(tmp_path, second_shelf) as second:
        store.catalogue.scan()
        assert len(shelf.reads) == 3
        second.catalogue.scan()
        assert set(second.catalogue.all()) == {"a", "b", "c"}
        assert not second_shelf.reads
        write(folder / "b.safetensors", lora(rank=9))
        store.catalogue.scan(at_once=True)
        assert len(shelf.reads) == 4
        assert second.catalogue.find("b").rank == 9


def test_a_storage_that_is_listed_in_the_background(tmp_path: Path, folder: Path) -> None:
    with opened(tmp_path, rescan_s=0.05) as store:
        with pytest.raises(Overloaded, match="still being listed"):
            store.catalogue.find("late")
        store.start()
        write(folder / "late.safetensors")
        deadline = time.monotonic() + 10
        while "late" not in store.catalogue.all():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        (folder / "late.safetensors").unlink()
        while "late" in store.catalogue.all():
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_without_a_store_adapters_are_refused(tmp_path: Path) -> None:
    with opened(tmp_path, store="") as store:
        store.start()
        with pytest.raises(InvalidRequest, match="not served here"):
            store.catalogue.find("x")


def test_bad_files_are_refused_by_name_and_others_are_served(tmp_path: Path, folder: Path) -> None:
    raw = write(folder / "good.safetensors")
    (folder / "cut.safetensors").write_bytes(raw[:-1])
    (folder / "empty.safetensors").write_bytes(b"")
    (folder / "large.safetensors").write_bytes(raw + b"\0" * 2**20)
    nan = lora()
    next(iter(nan.values()))[0, 0] = np.nan
    write(folder / "nan.safetensors", nan)
    with opened(tmp_path, host_bytes=2**20) as store:
        store.catalogue.scan()
        for name in ("cut", "empty", "large"):
            with pytest.raises(InvalidRequest, match=f"SETTINGS.loras: adapter {name} is"):
                store.catalogue.find(name)
        with pytest.raises(InvalidRequest, match="adapter nan holds NaN"):
            fetched_bytes(store, "nan")
        assert fetched_bytes(store, "good") == raw
        assert not [*store.host.folder.glob(".new/*"), *store.host.folder.glob(".lock-*")]


# Bringing them


def test_a_file_comes_through_the_disk_and_is_checked_there(tmp_path: Path, folder: Path) -> None:
    raw, shelf = write(folder / "x.safetensors"), Shelf(str(folder))
    with opened(tmp_path, shelf, disk_dir=str(tmp_path / "disk")) as store:
        store.catalogue.scan()
        fetched_bytes(store, "x")
        assert store.disk is not None
        assert [file.name for file in store.disk.files()] == ["x"]
        store.host.remove("x")
        shelf.is_lost = True
        assert fetched_bytes(store, "x") == raw  # from disk
        store.host.remove("x")
        [disk_file] = store.disk.files()
        data = bytearray(raw)
        data[-1] ^= 1
        disk_file.path.write_bytes(data)
        with pytest.raises(Overloaded, match="network is unreachable"):
            fetched_bytes(store, "x")
        assert not store.disk.files()
        shelf.is_lost = False
        assert fetched_bytes(store, "x") == raw


def test_one_fetch_serves_all_who_wait(tmp_path: Path, folder: Path) -> None:
    raw, shelf = write(folder / "x.safetensors"), Shelf(str(folder))
    with opened(tmp_path, shelf) as store, opened(tmp_path, shelf) as second_store:
        store.catalogue.scan()
        shelf.reads.clear()
        shelf.takes_s = 0.05
        contents: list[bytes] = []
        threads = [
            threading.Thread(
                target=lambda adapter_store=adapter_store: contents.append(
                    fetched_bytes(adapter_store, "x")
                )
            )
            for adapter_store in (store, second_store) * 4
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert contents == [raw] * 8
        assert len(shelf.reads) == 1


def test_what_is_begun_is_there_later(tmp_path: Path, folder: Path) -> None:
    write(folder / "x.safetensors")
    with opened(tmp_path) as store:
        store.catalogue.scan()
        adapter = store.catalogue.find("x")
        for _ in range(5):
            store.begin("x", adapter.version)
        deadline = time.monotonic() + 10
        while not store.host.files():
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_the_least_recently_used_makes_room(tmp_path: Path, folder: Path) -> None:
    size = len(write(folder / "a.safetensors"))
    for name in "bc":
        write(folder / f"{name}.safetensors")
    with opened(tmp_path, host_bytes=2 * size + 100) as store:
        store.catalogue.scan()
        fetched_bytes(store, "a")
        fetched_bytes(store, "b")
        os.utime(store.host.files()[0].path, (1, 1))
        reader = store.fetch("b", store.catalogue.find("b").version).path.open("rb")
        os.utime(store.fetch("a", store.catalogue.find("a").version).path, (9e9, 9e9))
        os.utime(store.fetch("b", store.catalogue.find("b").version).path, (1, 1))
        fetched_bytes(store, "c")
        assert sorted(file.name for file in store.host.files()) == ["a", "c"]
        with reader:
            assert len(reader.read()) == size  # evicted, and whole for who reads it


def test_what_is_pinned_stays(tmp_path: Path, folder: Path) -> None:
    size = len(write(folder / "a.safetensors"))
    write(folder / "b.safetensors")
    with opened(tmp_path, host_bytes=size + 100) as store:
        store.catalogue.scan()
        store.host.pin("a", pinned=True)
        fetched_bytes(store, "a")
        with pytest.raises(Overloaded, match="no room"):
            fetched_bytes(store, "b")
        assert [file.name for file in store.host.files()] == ["a"]
        store.host.pin("a", pinned=False)
        fetched_bytes(store, "b")
        assert [file.name for file in store.host.files()] == ["b"]


def test_what_a_dead_process_left_is_swept(tmp_path: Path, folder: Path) -> None:
    size = len(write(folder / "x.safetensors"))
    with opened(tmp_path, host_bytes=size + 100) as store:
        store.catalogue.scan()
        store.host.folder.mkdir(exist_ok=True)
        stale_file = store.host.folder / ".new" / f"dead@{'0' * 32}"
        stale_file.write_bytes(b"\0" * size)
        fetched_bytes(store, "x")
        assert not stale_file.exists()


# What goes wrong


def test_a_silent_storage_costs_its_time_and_no_more(tmp_path: Path, folder: Path) -> None:
    raw = write(folder / "x.safetensors")
    write(folder / "here.safetensors")
    shelf, silent = Shelf(str(folder), timeout_s=0.5), threading.Event()
    with opened(tmp_path, shelf) as store:
        store.catalogue.scan()
        content = fetched_bytes(store, "here")
        shelf._file_system = lambda: silent.wait(200) and Storage._file_system(shelf)  # type: ignore[assignment, method-assign, return-value]
        begun = time.monotonic()
        with pytest.raises(Overloaded, match=r"SETTINGS.loras: adapter x .*no answer within 0.5 s"):
            fetched_bytes(store, "x")
        assert time.monotonic() - begun < 100.0
        silent.set()
        assert fetched_bytes(store, "here") == content
        del shelf._file_system  # type: ignore[method-assign]
        assert fetched_bytes(store, "x") == raw


def test_few_calls_are_stuck_at_once(folder: Path) -> None:
    shelf = Storage(str(folder), timeout_s=0.01)
    shelf._file_system = lambda: time.sleep(1.0)  # type: ignore[assignment, method-assign, return-value]
    threads_before = threading.active_count()
    for _ in range(40):
        with pytest.raises(StorageFailed):
            shelf.files()
    assert threading.active_count() - threads_before <= 16


def test_a_storage_that_is_gone_fails_what_is_not_here(tmp_path: Path, folder: Path) -> None:
    write(folder / "x.safetensors")
    write(folder / "y.safetensors")
    shelf = Shelf(str(folder))
    with opened(tmp_path, shelf) as store:
        store.catalogue.scan()
        fetched_bytes(store, "x")
        shelf.is_lost = True
        store.catalogue.scan(at_once=True)
        assert "unreachable" in store.catalogue.problem
        fetched_bytes(store, "x")
        with pytest.raises(Overloaded, match="unreachable"):
            fetched_bytes(store, "y")
        with pytest.raises(Overloaded, match="unreachable"):
            store.catalogue.find("unknown")
        shelf.is_lost = False
        store.catalogue.scan(at_once=True)
        fetched_bytes(store, "y")


def test_a_folder_that_is_not_there_is_no_empty_one(tmp_path: Path) -> None:
    with opened(tmp_path, store=str(tmp_path / "nowhere")) as store:
        store.catalogue.scan()
        with pytest.raises(Overloaded, match="there is no folder"):
            store.catalogue.find("x")


def test_an_adapter_replaced_before_it_came_is_another(tmp_path: Path, folder: Path) -> None:
    write(folder / "x.safetensors")
    with opened(tmp_path) as store:
        store.catalogue.scan()
        old = store.catalogue.find("x")
        raw = write(folder / "x.safetensors")
        with pytest.raises(Overloaded, match="replaced; send the edit again"):
            store.fetch("x", old.version)
        assert store.catalogue.find("x").version != old.version
        assert fetched_bytes(store, "x") == raw
        with pytest.raises(Overloaded, match="replaced"):
            store.fetch("x", old.version)
        (folder / "x.safetensors").unlink()
        store.host.remove("x")
        with pytest.raises(AdapterNotFound):
            fetched_bytes(store, "x")


def test_an_adapter_that_is_here_serves_on_after_it_was_replaced(
    tmp_path: Path, folder: Path
) -> None:
    raw = write(folder / "x.safetensors")
    with opened(tmp_path) as store:
        store.catalogue.scan()
        old = store.catalogue.find("x")
        fetched_bytes(store, "x")
        new = write(folder / "x.safetensors")
        store.catalogue.scan(at_once=True)
        assert store.fetch("x", old.version).path.read_bytes() == raw
        assert fetched_bytes(store, "x") == new


def test_pieces_of_two_files_make_no_adapter(tmp_path: Path, folder: Path) -> None:
    """The file is replaced by one of the same size between two of its pieces."""
    wide = {"transformer_blocks.0.attn.to_q": (2**15, 2**15)}
    path = folder / "x.safetensors"
    first, second = write(path, lora(wide, rank=40)), write(path, lora(wide, rank=40))
    assert len(first) == len(second) > CHUNK_BYTES
    path.write_bytes(first)
    shelf = Shelf(str(folder))
    with opened(tmp_path, shelf) as store:
        headers: Any = store.catalogue._headers
        shapes = {name: (outputs, inputs) for name, (inputs, outputs) in wide.items()}
        store.catalogue._base = headers._base = BaseLayers({"denoiser": shapes})
        store.catalogue.scan()
        shelf.between = lambda: path.write_bytes(second)
        with pytest.raises(Overloaded, match="replaced"):
            fetched_bytes(store, "x")
        assert not store.host.files()
        shelf.between = None
        store.catalogue.scan(at_once=True)
        assert fetched_bytes(store, "x") == second


def test_a_full_medium_fails_that_adapter_only(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(folder / "x.safetensors")
    with opened(tmp_path) as store:
        store.catalogue.scan()

        def full(*_: Any) -> None:
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(os, "posix_fallocate", full)
            with pytest.raises(Overloaded, match="No space left"):
                fetched_bytes(store, "x")
        fetched_bytes(store, "x")


def test_a_damaged_catalogue_is_made_anew(tmp_path: Path, folder: Path) -> None:
    write(folder / "x.safetensors")
    with opened(tmp_path) as store:
        store.catalogue.scan()
        [file] = store.host.folder.glob("catalogue-*.json")
        file.write_bytes(b'{"adapters": 3')
    with opened(tmp_path) as store:
        with pytest.raises(Overloaded):
            store.catalogue.find("x")
        store.catalogue.scan(at_once=True)
        fetched_bytes(store, "x")


def test_a_killed_process_leaves_no_lock(tmp_path: Path, folder: Path) -> None:
    raw = write(folder / "x.safetensors")
    with opened(tmp_path) as store:
        store.catalogue.scan()
        version = store.catalogue.find("x").version
        program = (
            "import sys, time\n"
            "from maskserve_common.files.adapter_folder import AdapterFolder\n"
            "folder, version = sys.argv[1:]\n"
            "with AdapterFolder(folder, 2**30).write_lock('x', version, 1.0):\n"
            "    print('held', flush=True)\n"
            "    time.sleep(60)\n"
        )
        arguments = [sys.executable, "-c", program, str(store.host.folder), version]
        paths = os.pathsep.join(sys.path)
        holder = subprocess.Popen(
            arguments, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": paths}
        )
        try:
            assert holder.stdout is not None
            assert holder.stdout.readline() == b"held\n"
            holder.kill()
            assert fetched_bytes(store, "x") == raw
        finally:
            holder.kill()
            holder.wait()
            if holder.stdout is not None:
                holder.stdout.close()


def test_the_catalogue_is_saved_while_it_is_read(tmp_path: Path, folder: Path) -> None:
    """Adapters of a large storage can be used before the last header is read."""
    for name in "ab":
        write(folder / f"{name}.safetensors")
    shelf = Shelf(str(folder))
    snapshots: list[set[str]] = []
    with opened(tmp_path) as store:
        shelf.between = lambda: snapshots.append(set(store.catalogue.all()))
        Catalogue(config_of(tmp_path), store.host.folder, shelf, save_every_s=0.0).scan()
    assert snapshots == [set(), {"a"}]
