"""The folder of registered templates, and their names."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from maskserve_common.contracts.keys import template_id
from maskserve_common.errors import Overloaded
from maskserve_triton.templates import RegisteredImages, StoredTemplates
from tests.fakes.pictures import scene

A, B, C, D = (letter * 32 for letter in "abcd")


def test_templates_are_kept_listed_and_removed(tmp_path: Path) -> None:
    folder = StoredTemplates(tmp_path / "deep" / "templates")
    assert folder.ids() == []
    assert folder.get(A) is None
    folder.put(B, b"second")
    folder.put(A, b"first")
    assert folder.ids() == [A, B]
    assert StoredTemplates(tmp_path / "deep" / "templates").get(A) == b"first"
    assert folder.remove(A)
    assert not folder.remove(A)
    assert folder.ids() == [B]


def test_a_kept_template_is_not_rewritten(tmp_path: Path) -> None:
    folder = StoredTemplates(tmp_path)
    folder.put(A, b"as registered")
    folder.put(A, b"the same pixels in another file")
    assert folder.get(A) == b"as registered"


@pytest.mark.parametrize("name", ["../" + "a" * 32, "", "A" * 32, "a" * 15, ".new-x"])
def test_only_digests_are_file_names(tmp_path: Path, name: str) -> None:
    folder = StoredTemplates(tmp_path)
    for call in (folder.get, folder.remove):
        with pytest.raises(ValueError, match="template id"):
            call(name)
    with pytest.raises(ValueError, match="template id"):
        folder.put(name, b"")


def test_strangers_and_leftovers_in_the_folder_are_no_templates(tmp_path: Path) -> None:
    (tmp_path / ".new-123").write_bytes(b"half written")
    (tmp_path / "README").write_bytes(b"hello")
    assert StoredTemplates(tmp_path).ids() == []


def test_a_write_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("os.fsync", full)
    folder = StoredTemplates(tmp_path)
    with pytest.raises(OSError, match="disk full"):
        folder.put(A, b"image")
    assert names(tmp_path) == {"results"}


def test_readers_never_see_half_a_template(tmp_path: Path) -> None:
    whole = bytes(range(256)) * 4096
    folder = StoredTemplates(tmp_path)
    contents: list[bytes | None] = []
    event = threading.Event()

    def read() -> None:
        while not event.is_set():
            contents.append(folder.get(A))

    reader = threading.Thread(target=read)
    reader.start()
    for _ in range(30):
        folder.put(A, whole)
        folder.remove(A)
    event.set()
    reader.join()
    assert set(contents) <= {None, whole}


def test_template_ids_name_pixels_and_size() -> None:
    picture = scene(12, 10)
    name = template_id(picture)
    assert len(name) == 32
    assert set(name) <= set("0123456789abcdef")
    assert template_id(picture.copy()) == name
    assert template_id(picture[:, ::-1][:, ::-1]) == name
    copy = picture.copy()
    copy[3, 3, 1] ^= 1
    assert template_id(copy) != name
    assert template_id(np.ascontiguousarray(picture.reshape(10, 12, 3))) != name


def test_the_folder_is_bounded(tmp_path: Path) -> None:
    folder = StoredTemplates(tmp_path, max_bytes=10)
    folder.put(A, b"123456")
    folder.put(A, b"123456")  # there already: takes no more room
    with pytest.raises(Overloaded, match="evict templates first"):
        folder.put(B, b"12345")
    assert folder.ids() == [A]
    folder.remove(A)
    folder.put(B, b"12345")


def test_templates_may_go_while_another_is_put(tmp_path: Path) -> None:
    """By somebody else's hand: what there is is counted from the folder where no sums are."""

    class Shared(RegisteredImages):
        def ids(self) -> list[str]:
            names = super().ids()
            (tmp_path / A).unlink(missing_ok=True)
            return names

    folder = StoredTemplates(tmp_path, max_bytes=100)
    folder.put(A, b"first")
    (tmp_path / ".sums").unlink()
    Shared(tmp_path, max_bytes=100).put(B, b"second", ())
    assert folder.ids() == [B]


def test_the_bound_holds_for_threads_too(tmp_path: Path) -> None:
    folder = StoredTemplates(tmp_path, max_bytes=1000)
    barrier = threading.Barrier(8)

    def put(number: int) -> bool:
        barrier.wait()
        try:
            folder.put(f"{number:032x}", b"x" * 300)
        except Overloaded:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(put, range(8))) == 3
    assert len(folder.ids()) == 3


def names(folder: Path) -> set[str]:
    """Names of files, and `NAME.OWNER` for each owner."""
    owners = {f"{path.parent.name}.{path.name}" for path in folder.glob(".owners/*/*/*")}
    hidden = {".lock", ".new", ".sums", ".owners"}
    return {path.name for path in folder.iterdir()} - hidden | owners


def used_before(folder: Path, name: str, seconds: float) -> None:
    now_s = time.time() - seconds
    os.utime(folder / "results" / name, (now_s, now_s))


def test_results_expire_unless_they_are_used_or_registered(tmp_path: Path) -> None:
    folder = StoredTemplates(tmp_path, result_expires_s=60)
    for name in (A, B, C):
        folder.put_result(name, b"picture", ["k1"])
        used_before(tmp_path, name, 50)
    assert folder.get(A, "k1") == b"picture"  # used: its time begins anew
    folder.put(B, b"picture", ["k1"])
    expires_s = folder.expires_s(A)
    assert expires_s is not None
    assert expires_s > 55
    assert folder.expires_s(B) is None
    used_before(tmp_path, C, 61)
    assert folder.get(C, "k1") is None
    folder.expire()
    assert folder.ids() == [A, B]
    assert names(tmp_path / "results") == {A, B, f"{A}.k1", f"{B}.k1"}
    assert names(tmp_path) == {"results", B, f"{B}.k1"}


def test_results_make_room_for_newer_ones_and_for_no_registered_template(tmp_path: Path) -> None:
    folder = StoredTemplates(tmp_path, max_bytes=10, max_result_bytes=10)
    folder.put(D, b"0123456789")
    for age, name in enumerate((A, B, C)):
        folder.put_result(name, b"1234")
        used_before(tmp_path, name, 10 - age)
    assert folder.ids() == [B, C, D]
    folder.get(B)
    folder.put_result(A, b"1234")
    assert folder.ids() == [A, B, D]
    with pytest.raises(Overloaded, match="max_result_bytes"):
        folder.put_result(C, b"12345678901")
    assert folder.ids() == [A, B, D]
    with pytest.raises(Overloaded, match="max_template_bytes"):
        folder.keep(A)
    folder.remove(D)
    folder.keep(A)
    assert folder.expires_s(A) is None
    assert folder.remove(B)
    assert names(tmp_path) == {A, f"{A}.unscoped", "results"}
    assert names(tmp_path / "results") == {A, f"{A}.unscoped"}


def test_a_result_equal_to_a_registered_template_expires_for_its_owner_alone(
    tmp_path: Path,
) -> None:
    folder = StoredTemplates(tmp_path, result_expires_s=60)
    folder.put(A, b"picture", ["k1"])
    folder.put_result(A, b"picture", ["k2"])
    assert folder.expires_s(A) is None
    assert folder.expires_s(A, "k1") is None
    assert folder.expires_s(A, "k2") is not None
    assert folder.owners(A) == ["k1", "k2"]
    used_before(tmp_path, A, 61)
    assert folder.get(A, "k2") is None
    folder.expire()
    assert folder.get(A, "k1") == b"picture"
    assert folder.owners(A) == ["k1"]


@pytest.mark.parametrize("owners", [(), ("shared",), ("k1",), ("k1", "shared")])
def test_what_others_have_outlives_a_key_that_registers_and_evicts(
    tmp_path: Path, owners: tuple[str, ...]
) -> None:
    """A key registered the same picture and evicted it: templates that were registered at the
    worker itself, or for all, were gone.
    """
    folder = StoredTemplates(tmp_path)
    folder.put(A, b"picture", owners)
    folder.put(A, b"picture", ["k2"])
    assert folder.disown(A, "k2") is False
    assert folder.disown(A, "k2") is None
    assert folder.get(A, owners[0] if owners else "") == b"picture"
    assert folder.owners(A) == sorted(owners)


def test_a_template_from_before_owners_were_written_down_is_not_a_keys(tmp_path: Path) -> None:
    (tmp_path / A).write_bytes(b"picture")
    folder = StoredTemplates(tmp_path)
    folder.put(A, b"picture", ["k1"])
    assert folder.disown(A, "k1") is False
    assert folder.get(A) == b"picture"


def test_a_template_goes_with_its_last_owner(tmp_path: Path) -> None:
    folder = StoredTemplates(tmp_path)
    folder.put(A, b"picture", ["k1", "shared"])
    folder.put(A, b"picture", ["k2"])
    assert folder.disown(A, "k1") is False
    folder.put_result(A, b"picture", ["k2"])
    assert folder.disown(A, "k2") is True
    assert names(tmp_path) == {"results"}
    assert names(tmp_path / "results") == set()


def test_one_key_may_not_fill_the_room_for_templates(tmp_path: Path) -> None:
    folder = StoredTemplates(tmp_path, max_bytes=12)
    folder.put(A, b"123", ["greedy"])
    folder.put(B, b"123", ["greedy"])
    with pytest.raises(Overloaded, match="registered images of this key take 6 bytes"):
        folder.put(C, b"123", ["greedy"])
    folder.put(C, b"123", ["modest"])
    folder.put(D, b"123")  # an operator's own may take what is left


def test_results_of_one_key_make_room_for_each_other_and_not_of_others(tmp_path: Path) -> None:
    folder = StoredTemplates(tmp_path, max_result_bytes=12)
    folder.put_result(A, b"123", ["modest"])
    used_before(tmp_path, A, 50)
    greedy = [f"{n:032x}" for n in range(20)]
    for number, name in enumerate(greedy):
        folder.put_result(name, b"123", ["greedy"])
        used_before(tmp_path, name, 40 - number)
    assert folder.get(A, "modest") == b"123"
    assert folder.ids() == sorted([A, greedy[-1]])


def test_workers_that_share_a_folder_of_results_share_these_alone(tmp_path: Path) -> None:
    """Rules are those of one worker: owners, expiry, the bound and each key's share."""
    shared = tmp_path / "shared"
    first, second = (
        StoredTemplates(tmp_path / name, results=shared, max_result_bytes=10, result_expires_s=60)
        for name in ("0", "1")
    )
    first.put_result(A, b"1234", ["k1"])
    first.put(B, b"registered", ["k1"])
    assert second.ids() == [A]
    assert second.get(A, "k1") == b"1234"
    assert second.get(A, "k2") is None
    assert not second.shows(A, "k2")
    assert second.disown(A, "k2") is None
    second.put_result(C, b"1234", ["k1"])
    second.put_result(D, b"1234", ["k2"])  # k1's makes room
    assert first.ids() == [B, C, D]
    second.keep(C)  # is registered there, and expires here
    os.utime(shared / C, (0, 0))
    assert first.get(C, "k1") is None
    assert second.get(C, "k1") == b"1234"
    assert second.disown(D, "k2") is True
    assert first.get(D) is None


def counted_calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Numbers of system calls that look at files; a listing counts each file that it finds."""
    counts: Counter[str] = Counter()
    listdir, stat = os.listdir, os.stat

    def listing(*args: Any) -> list[Any]:
        file_names = listdir(*args)
        counts["listed"] += len(file_names)
        return file_names

    def looking(*args: Any, **named: Any) -> os.stat_result:
        counts["stats"] += 1
        return stat(*args, **named)

    def scanning(*_: Any) -> Any:
        raise AssertionError("a folder is listed by another call than os.listdir")

    monkeypatch.setattr(os, "listdir", listing)
    monkeypatch.setattr(os, "stat", looking)
    monkeypatch.setattr(os, "scandir", scanning)
    return counts


@pytest.mark.parametrize("full", [False, True])
def test_what_one_file_costs_does_not_grow_with_those_that_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, full: bool
) -> None:
    """Each put and each eviction listed the folder, and took a lock for as long."""
    spent = []
    for file_count in (20, 200):
        path = tmp_path / str(file_count)
        most = 4 * file_count if full else 10**6
        folder = StoredTemplates(path, max_result_bytes=most)
        for number in range(file_count):
            folder.put(f"{number:032x}", b"1234", ["k1"])
            folder.put_result(f"{number:032x}", b"1234", [f"k{number % 2}"])
        folder = StoredTemplates(path, max_result_bytes=most)
        folder.put_result(D, b"1234", ["k1"])  # the first of a process may list
        with monkeypatch.context() as patch:
            counts = counted_calls(patch)
            for number, name in enumerate((A, B, C)):
                folder.put(name, b"1234", ["k2"])
                folder.put_result(name, b"1234", [f"k{number % 2}"])
                folder.put(name, b"1234", ["k3"])
                assert folder.get(name, "k3") == b"1234"
                assert folder.owners(name)
                assert folder.sharing(name)
                folder.disown(name, "k2")
                folder.remove(name)
        spent.append(counts)
    assert spent[0] == spent[1]


def test_owners_that_an_earlier_version_wrote_down_are_theirs(tmp_path: Path) -> None:
    for name in (A, f"{A}.k1", f"{A}.shared", B, f"{B}.k2", ".new-abc"):
        (tmp_path / name).write_bytes(b"" if "." in name else b"picture")
    folder = StoredTemplates(tmp_path)
    assert folder.owners(A) == ["k1", "shared"]
    assert folder.disown(B, "k2") is True
    assert names(tmp_path) == {A, f"{A}.k1", f"{A}.shared", "results"}


def test_a_change_that_is_cut_short_is_counted_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = StoredTemplates(tmp_path, max_bytes=10)

    class Killed(BaseException):
        pass

    def killed(*_: Any, **__: Any) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(RegisteredImages, "_mark", killed)
        with pytest.raises(Killed):
            folder.put(A, b"123456")
    with pytest.raises(Overloaded, match="take 6 bytes"):
        StoredTemplates(tmp_path, max_bytes=10).put(B, b"12345")
