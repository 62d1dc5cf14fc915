"""One suite over all users of `FileStore`."""

from __future__ import annotations

import contextlib
import os
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch

from maskserve_client.commands import write_whole
from maskserve_common.config import Config
from maskserve_common.contracts.keys import Anchor
from maskserve_common.contracts.status_record import WorkerStatus
from maskserve_common.files.adapter_folder import AdapterFolder, NoRoom
from maskserve_common.files.store import FileStore, chosen_victims, make_private
from maskserve_common.status import StatusReader, StatusWriter
from maskserve_engine.cache.entries import AnchorEntry, BlockEntry, Coded
from maskserve_engine.cache.folder_tier import FolderTier
from maskserve_engine.cache.priming_prompt import PromptFile, write_priming_prompt
from maskserve_engine.cache.tier import Note
from maskserve_engine.stages.moments_folder import MomentsFolder
from maskserve_lora.catalogue import Catalogue, _Listing
from maskserve_lora.storage import Storage
from maskserve_triton.admission import AdmissionState, InFlight
from maskserve_triton.templates import StoredTemplates

ANCHOR = Anchor(1.0, 2.0, 3.0)
ID = "a" * 32


class Use(NamedTuple):
    """Something that keeps files in a folder."""

    put: Callable[[Path, int], object]
    """Brings content number n."""
    get: Callable[[Path], int | None]
    """The content's number; None: there is none."""
    private: bool = True
    """Whether nobody else is to read it."""


def _entry(number: int) -> AnchorEntry:
    tokens = torch.full((64, 256), float(number))
    return AnchorEntry(ANCHOR, (BlockEntry(hidden=Coded("model", tokens)),))


def _put_entry(folder: Path, number: int) -> None:
    put = FolderTier("host", folder, 10**9).put("key", _entry(number), Note("t", 1, 1.0))
    if not put:
        raise OSError("No space")


def _get_entry(folder: Path) -> int | None:
    response = FolderTier("host", folder, 10**9).get("key", ANCHOR)
    if response is None:
        return None
    hidden = response.blocks[0].hidden
    assert hidden is not None
    assert hidden.data.eq(hidden.data[0, 0]).all()
    return int(hidden.data[0, 0])


def _put_template(folder: Path, number: int) -> None:
    # A template's bytes are never rewritten: another content comes as another's place is free.
    templates = StoredTemplates(folder)
    templates.remove(ID)
    templates.put(ID, bytes([number]) * 10_000)


def _put_result(folder: Path, number: int) -> None:
    templates = StoredTemplates(folder)
    templates.remove(ID)
    templates.put_result(ID, bytes([number]) * 10_000, ["scope"])


def _get_template(folder: Path) -> int | None:
    response = StoredTemplates(folder).get(ID) if folder.is_dir() else None
    return None if response is None else _same(response)


def _same(content: bytes) -> int:
    assert content == content[:1] * len(content)
    return content[0]


def _put_adapter(folder: Path, number: int) -> None:
    adapters, version = AdapterFolder(folder, 10**9), f"{number:032x}"
    with adapters.write_lock("x", version, 60.0):
        adapters.write("x", version, 10_000, [bytes([number]) * 5_000] * 2)
        for file in adapters.files():
            if file.version != version:
                file.path.unlink(missing_ok=True)


def _get_adapter(folder: Path) -> int | None:
    for file in AdapterFolder(folder, 10**9).files():
        with contextlib.suppress(FileNotFoundError):
            return _same(file.path.read_bytes())
    return None


def _catalogue(folder: Path) -> Catalogue:
    return Catalogue(Config(), folder, Storage(str(folder), 1.0))


def _put_catalogue(folder: Path, number: int) -> None:
    _catalogue(folder)._write(_Listing({}, whole=True, problem=str(number)))


def _get_catalogue(folder: Path) -> int | None:
    problem = _catalogue(folder).problem
    return int(problem) if problem else None


def _put_prompt(folder: Path, number: int) -> None:
    write_priming_prompt({"a": np.full(5_000, number)}, folder)


def _get_prompt(folder: Path) -> int | None:
    arrays = PromptFile(folder).read()
    return None if arrays is None else int(arrays["a"][0])


def _get_moments(folder: Path) -> int | None:
    moments = MomentsFolder(folder).read(ID)
    return None if moments is None else int(moments[0])


def _put_moments(folder: Path, number: int) -> None:
    MomentsFolder(folder).write(ID, np.full(5_000, number, np.float32))


def _put_status(folder: Path, number: int) -> None:
    make_private(folder)  # whose folder is gone has nobody to read it: it does not come back
    writer = StatusWriter(folder / "status")
    writer.write(WorkerStatus(str(number), "m", "ready", max_rows=1, max_waiting=1))
    writer.close()


def _get_status(folder: Path) -> int | None:
    reader = StatusReader(folder / "status")
    status = reader.read()
    reader.close()
    return None if status is None else int(status.worker)


def _put_gate(folder: Path, number: int) -> None:
    with InFlight(folder, "edit"):
        AdmissionState(folder).drain() if number == 1 else AdmissionState(folder).stop()


def _get_gate(folder: Path) -> int | None:
    return {"open": None, "draining": 1, "stopped": 2}[AdmissionState(folder).state()]


def _put_picture(folder: Path, number: int) -> None:
    write_whole(folder / "out.png", bytes([number]) * 10_000)


def _get_picture(folder: Path) -> int | None:
    file = folder / "out.png"
    return _same(file.read_bytes()) if file.exists() else None


USES = {
    "entries": Use(_put_entry, _get_entry),
    "templates": Use(_put_template, _get_template),
    "results": Use(_put_result, _get_template),
    "adapters": Use(_put_adapter, _get_adapter),
    "catalogue": Use(_put_catalogue, _get_catalogue),
    "priming prompt": Use(_put_prompt, _get_prompt),
    "moments": Use(_put_moments, _get_moments),
    "status record": Use(_put_status, _get_status),
    "gate": Use(_put_gate, _get_gate),
    "the client's pictures": Use(_put_picture, _get_picture, private=False),
}


@pytest.fixture(params=USES)
def use(request: pytest.FixtureRequest) -> Use:
    return USES[request.param]


@pytest.fixture
def open_umask() -> Iterator[None]:
    umask = os.umask(0)
    yield
    os.umask(umask)


def test_what_was_put_last_is_there(use: Use, tmp_path: Path) -> None:
    assert use.get(tmp_path / "f") is None
    for number in (1, 2):
        use.put(tmp_path / "f", number)
        assert use.get(tmp_path / "f") == number


def test_nobody_else_may_look(use: Use, tmp_path: Path, open_umask: None) -> None:
    use.put(tmp_path / "f", 1)
    paths = [tmp_path / "f", *(tmp_path / "f").rglob("*")]
    assert len(paths) > 1
    names = {path.name for path in paths if stat.S_IMODE(path.stat().st_mode) & 0o077}
    assert names == (set() if use.private else {"out.png"})


def test_a_file_that_does_not_fit_leaves_what_was_there(
    use: Use, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use.put(tmp_path / "f", 1)

    def full(path: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", full)
        with pytest.raises((OSError, NoRoom), match="No space"):
            use.put(tmp_path / "f", 2)
    if use.put in (_put_template, _put_result):  # which had to make place before
        assert use.get(tmp_path / "f") is None
    else:
        assert use.get(tmp_path / "f") == 1
    assert FileStore(tmp_path / "f").abandoned_files() == []
    use.put(tmp_path / "f", 2)
    assert use.get(tmp_path / "f") == 2


def test_a_reader_sees_whole_files_only(use: Use, tmp_path: Path) -> None:
    use.put(tmp_path / "f", 1)
    ended, values = threading.Event(), set()

    def read() -> None:
        while not ended.is_set():
            values.add(use.get(tmp_path / "f"))

    reader = threading.Thread(target=read)
    reader.start()
    for turn in range(30):
        use.put(tmp_path / "f", 1 + turn % 2)
    ended.set()
    reader.join()
    assert values <= {1, 2, None}


# The store by itself.

KILLED = """
import sys, time
from maskserve_common.files.store import FileStore
store = FileStore(sys.argv[1])
with store.aside(4096) as new:
    new.file.write(b"half")
    new.file.flush()
    print("half", flush=True)
    time.sleep(60)
"""


def test_what_a_killed_writer_left_goes_and_what_a_living_one_writes_stays(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    writer = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE, env=environment
    )
    try:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"half\n"
        with store.aside() as aside, store.alone():
            assert len(store.abandoned_files()) == 2
            assert store.arriving() == 4096
            writer.kill()
            writer.wait()
            aside.keep_as("whole")
        with store.alone():
            assert store.abandoned_files() == []
        assert (tmp_path / "whole").exists()
    finally:
        writer.kill()
        writer.wait()
        if writer.stdout is not None:
            writer.stdout.close()


def test_one_at_a_time_brings_a_file(tmp_path: Path) -> None:
    file_store, other = FileStore(tmp_path), FileStore(tmp_path)
    with file_store.write_lock("x", 1.0):
        with pytest.raises(TimeoutError), other.write_lock("x", 0.0):
            raise AssertionError("both")
        with other.write_lock("y", 0.0):
            pass
    with other.write_lock("x", 0.0):
        pass
    assert list(tmp_path.iterdir()) == []


def test_threads_and_stores_take_turns(tmp_path: Path) -> None:
    stores = [FileStore(tmp_path), FileStore(tmp_path)]
    inside: list[int] = []

    def work(store: FileStore) -> None:
        for _ in range(20):
            with store.alone():
                inside.append(1)
                assert len(inside) == 1
                inside.pop()

    threads = [threading.Thread(target=work, args=(stores[n % 2],)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not inside


def test_as_many_go_as_must_in_their_order() -> None:
    sizes = {"old": 5, "older": 3, "new": 9}
    age = {"older": 0.0, "old": 1.0, "new": 2.0}
    assert chosen_victims(sizes, 0, age.__getitem__) == []
    assert chosen_victims(sizes, 3, age.__getitem__) == ["older"]
    assert chosen_victims(sizes, 4, age.__getitem__) == ["older", "old"]
    assert chosen_victims(sizes, 18, age.__getitem__) is None
