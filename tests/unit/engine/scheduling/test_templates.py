"""The folder of registered templates, and their names."""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from maskserve_common.contracts.keys import template_id
from maskserve_common.errors import Overloaded
from maskserve_triton.templates import KeptTemplates, RegisteredImages
from tests.fakes.pictures import scene

A, B, C, D = (letter * 32 for letter in "abcd")


def test_templates_are_kept_listed_and_removed(tmp_path: Path) -> None:
    folder = KeptTemplates(tmp_path / "deep" / "templates")
    assert folder.ids() == []
    assert folder.get(A) is None
    folder.put(B, b"second")
    folder.put(A, b"first")
    assert folder.ids() == [A, B]
    assert KeptTemplates(tmp_path / "deep" / "templates").get(A) == b"first"
    assert folder.remove(A)
    assert not folder.remove(A)
    assert folder.ids() == [B]


def test_a_kept_template_is_not_rewritten(tmp_path: Path) -> None:
    folder = KeptTemplates(tmp_path)
    folder.put(A, b"as registered")
    folder.put(A, b"the same pixels in another file")
    assert folder.get(A) == b"as registered"


@pytest.mark.parametrize("name", ["../" + "a" * 32, "", "A" * 32, "a" * 15, ".new-x"])
def test_only_digests_are_file_names(tmp_path: Path, name: str) -> None:
    folder = KeptTemplates(tmp_path)
    for call in (folder.get, folder.remove):
        with pytest.raises(ValueError, match="template id"):
            call(name)
    with pytest.raises(ValueError, match="template id"):
        folder.put(name, b"")


def test_strangers_and_leftovers_in_the_folder_are_no_templates(tmp_path: Path) -> None:
    (tmp_path / ".new-123").write_bytes(b"half written")
    (tmp_path / "README").write_bytes(b"hello")
    assert KeptTemplates(tmp_path).ids() == []


def test_a_write_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("os.fsync", full)
    folder = KeptTemplates(tmp_path)
    with pytest.raises(OSError, match="disk full"):
        folder.put(A, b"image")
    assert {path.name for path in tmp_path.iterdir()} == {".lock", "results"}


def test_readers_never_see_half_a_template(tmp_path: Path) -> None:
    whole = bytes(range(256)) * 4096
    folder = KeptTemplates(tmp_path)
    seen: list[bytes | None] = []
    done = threading.Event()

    def read() -> None:
        while not done.is_set():
            seen.append(folder.get(A))

    reader = threading.Thread(target=read)
    reader.start()
    for _ in range(30):
        folder.put(A, whole)
        folder.remove(A)
    done.set()
    reader.join()
    assert set(seen) <= {None, whole}


def test_template_ids_name_pixels_and_size() -> None:
    picture = scene(12, 10)
    name = template_id(picture)
    assert len(name) == 32
    assert set(name) <= set("0123456789abcdef")
    assert template_id(picture.copy()) == name
    assert template_id(picture[:, ::-1][:, ::-1]) == name
    other = picture.copy()
    other[3, 3, 1] ^= 1
    assert template_id(other) != name
    assert template_id(np.ascontiguousarray(picture.reshape(10, 12, 3))) != name


def test_the_folder_is_bounded(tmp_path: Path) -> None:
    folder = KeptTemplates(tmp_path, max_bytes=10)
    folder.put(A, b"123456")
    folder.put(A, b"123456")  # there already: takes no more room
    with pytest.raises(Overloaded, match="evict templates first"):
        folder.put(B, b"12345")
    assert folder.ids() == [A]
    folder.remove(A)
    folder.put(B, b"12345")


def test_templates_may_go_while_another_is_put(tmp_path: Path) -> None:
    class Shared(RegisteredImages):
        def ids(self) -> list[str]:
            names = super().ids()
            (tmp_path / A).unlink()  # somebody else's hand
            return names

    folder = KeptTemplates(tmp_path, max_bytes=100)
    folder.put(A, b"first")
    Shared(tmp_path, max_bytes=100).put(B, b"second", ())
    assert folder.ids() == [B]


def test_the_bound_holds_for_threads_too(tmp_path: Path) -> None:
    folder = KeptTemplates(tmp_path, max_bytes=1000)
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
    return {path.name for path in folder.iterdir()}


def used_before(folder: Path, name: str, seconds: float) -> None:
    then = time.time() - seconds
    os.utime(folder / "results" / name, (then, then))


def test_results_expire_unless_they_are_used_or_registered(tmp_path: Path) -> None:
    folder = KeptTemplates(tmp_path, result_expires_s=60)
    for name in (A, B, C):
        folder.put_result(name, b"picture", ["k1"])
        used_before(tmp_path, name, 50)
    assert folder.get(A, "k1") == b"picture"  # used: its time begins anew
    folder.put(B, b"picture", ["k1"])
    left = folder.expires_s(A)
    assert left is not None
    assert left > 55
    assert folder.expires_s(B) is None
    used_before(tmp_path, C, 61)
    assert folder.get(C, "k1") is None
    folder.expire()
    assert folder.ids() == [A, B]
    assert names(tmp_path / "results") == {".lock", A, B, f"{A}.k1", f"{B}.k1"}
    assert names(tmp_path) == {".lock", "results", B, f"{B}.k1"}


def test_results_make_room_for_newer_ones_and_for_no_registered_template(tmp_path: Path) -> None:
    folder = KeptTemplates(tmp_path, max_bytes=10, max_result_bytes=10)
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
    assert names(tmp_path) == {A, f"{A}.unscoped", ".lock", "results"}
    assert names(tmp_path / "results") == {A, f"{A}.unscoped", ".lock"}


def test_a_result_equal_to_a_registered_template_expires_for_its_owner_alone(
    tmp_path: Path,
) -> None:
    folder = KeptTemplates(tmp_path, result_expires_s=60)
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
    folder = KeptTemplates(tmp_path)
    folder.put(A, b"picture", owners)
    folder.put(A, b"picture", ["k2"])
    assert folder.disown(A, "k2") is False
    assert folder.disown(A, "k2") is None
    assert folder.get(A, owners[0] if owners else "") == b"picture"
    assert folder.owners(A) == sorted(owners)


def test_a_template_from_before_owners_were_written_down_is_not_a_keys(tmp_path: Path) -> None:
    (tmp_path / A).write_bytes(b"picture")
    folder = KeptTemplates(tmp_path)
    folder.put(A, b"picture", ["k1"])
    assert folder.disown(A, "k1") is False
    assert folder.get(A) == b"picture"


def test_a_template_goes_with_its_last_owner(tmp_path: Path) -> None:
    folder = KeptTemplates(tmp_path)
    folder.put(A, b"picture", ["k1", "shared"])
    folder.put(A, b"picture", ["k2"])
    assert folder.disown(A, "k1") is False
    folder.put_result(A, b"picture", ["k2"])
    assert folder.disown(A, "k2") is True
    assert names(tmp_path) == {".lock", "results"}
    assert names(tmp_path / "results") == {".lock"}


def test_one_key_may_not_fill_the_room_for_templates(tmp_path: Path) -> None:
    folder = KeptTemplates(tmp_path, max_bytes=12)
    folder.put(A, b"123", ["greedy"])
    folder.put(B, b"123", ["greedy"])
    with pytest.raises(Overloaded, match="registered images of this key take 6 bytes"):
        folder.put(C, b"123", ["greedy"])
    folder.put(C, b"123", ["modest"])
    folder.put(D, b"123")  # an operator's own may take what is left


def test_results_of_one_key_make_room_for_each_other_and_not_of_others(tmp_path: Path) -> None:
    folder = KeptTemplates(tmp_path, max_result_bytes=12)
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
        KeptTemplates(tmp_path / name, results=shared, max_result_bytes=10, result_expires_s=60)
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
