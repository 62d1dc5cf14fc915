"""The files one worker lives with: its configuration and its private folder."""

from __future__ import annotations

import fcntl
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

import tomli_w

from maskserve_common.config import Config, ConfigError
from maskserve_common.config_file import config_of, load_config
from maskserve_serving.errors import ServeError
from maskserve_serving.orphans import end_orphans


@dataclass(frozen=True, slots=True)
class WorkerFiles:
    """A worker's private folders, removed at the end: one in memory, made anew at each start, and
    one on disk for templates, which are the clients' and outlive a restart of the worker.
    """

    root: Path
    templates: Path

    @property
    def config(self) -> Path:
        return self.root / "config.toml"

    @property
    def runtime(self) -> Path:
        """`runtime_dir`: status record, gate, process ids."""
        return self.root / "runtime"

    @property
    def status(self) -> Path:
        return self.runtime / "status"

    @property
    def entries(self) -> Path:
        """Host tier of cached activations, which all workers of the supervisor share."""
        return self.root.parent / "entries"

    @property
    def adapters(self) -> Path:
        """LoRAs in memory, likewise."""
        return self.root.parent / "adapters"

    @property
    def values(self) -> Path:
        """Values between the nodes of workflows, likewise."""
        return self.root.parent / "values"

    def prepare(self, tables: dict[str, Any]) -> Config:
        """Clear the folder and write the worker's configuration; returns it as the worker sees it.

        Raises:
            ServeError: the configuration is not valid.
        """
        shutil.rmtree(self.runtime, ignore_errors=True)
        self.runtime.mkdir(parents=True, mode=0o700)
        self.config.write_text(tomli_w.dumps(tables), encoding="utf-8")
        return load(self.config)

    def remove(self) -> None:
        shutil.rmtree(self.root, ignore_errors=True)
        shutil.rmtree(self.templates, ignore_errors=True)


def worker_files(base_port: int, workers: int) -> list[WorkerFiles]:
    """Fresh folders for the workers of one supervisor.

    An engine writes its status record at each step, and whoever finds it silent restarts it: on a
    disk that is busy with something else, a write can take seconds.
    """
    memory = Path(tempfile.mkdtemp(prefix=_prefix(base_port), dir=_memory()))
    disk = Path(tempfile.mkdtemp(prefix=_prefix(base_port), dir=_disk()))
    names = [f"worker-{index}" for index in range(workers)]
    return [WorkerFiles(memory / name, disk / name) for name in names]


def workers_by_base() -> dict[int, int]:
    """How many workers the supervisors of this host have, by base port. The ports of one that is
    being started again are free for a while, and still not anybody's.
    """
    counts: dict[int, int] = {}
    for folder in Path(_memory()).glob(_prefix("*") + "*"):
        base = folder.name.split("-")[2]
        with suppress(OSError):  # it is being removed
            names = [child.name for child in folder.iterdir()]
            counts[int(base)] = sum(name.startswith("worker-") for name in names)
    return counts


def folders_of(files: list[WorkerFiles]) -> set[Path]:
    """The folders that `worker_files` made."""
    return {path.parent for worker in files for path in (worker.root, worker.templates)}


def hold(files: list[WorkerFiles]) -> list[int]:
    """Have every other `remove_stale` stop at these folders until the returned files are closed.

    The kernel closes them if the supervisor is killed.
    """
    descriptors = [os.open(folder, os.O_RDONLY) for folder in folders_of(files)]
    for folder in descriptors:
        with suppress(OSError):  # where nothing can be locked, nothing is removed either
            fcntl.flock(folder, fcntl.LOCK_SH)
    return descriptors


def remove_stale(
    base_port: int, own: list[WorkerFiles], say: Callable[[str], None] = print
) -> None:
    """Remove what killed supervisors left at this base port, once their processes have ended.

    Raises:
        ServeError: another supervisor lives there; its ports are free until its models are loaded.
    """
    spared = folders_of(own)
    for parent in {_memory(), _disk()}:
        for folder in Path(parent).glob(_prefix(base_port) + "*"):
            if folder not in spared and not _removed_unless_held(folder, say):
                raise ServeError(
                    f"another maskserve serve runs at port {base_port}; "
                    "stop it or choose another --base-port"
                )


def _removed_unless_held(folder: Path, say: Callable[[str], None]) -> bool:
    """False: a living supervisor's. What is another user's is left, and in nobody's way."""
    try:
        opened = os.open(folder, os.O_RDONLY)
    except OSError:
        return True
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        end_orphans(folder, say)
        shutil.rmtree(folder, ignore_errors=True)
    except BlockingIOError:
        return False
    except OSError:
        pass
    finally:
        os.close(opened)
    return True


def _prefix(base_port: int | str) -> str:
    return f"maskserve-run-{base_port}-"


def _disk() -> str:
    return tempfile.gettempdir()


def _memory() -> str:
    """A folder in memory, where this host has one that may be written."""
    for folder in (os.environ.get("XDG_RUNTIME_DIR", ""), "/dev/shm"):
        if folder and os.access(folder, os.W_OK | os.X_OK):
            return folder
    return tempfile.gettempdir()


def read_tables(path: Path | None) -> dict[str, Any]:
    """The tables of the user's configuration file, checked."""
    if path is None:
        return {}
    load(path)
    # load_config has read the file as TOML; read it again for the tables themselves.
    return tomllib.loads(path.read_text(encoding="utf-8"))


def load(path: Path) -> Config:
    try:
        return load_config(path)
    except ConfigError as error:
        raise ServeError(str(error)) from error


def checked(tables: dict[str, Any]) -> Config:
    """The configuration that these tables make.

    Raises:
        ServeError: it is not valid.
    """
    try:
        return config_of(tables)
    except ConfigError as error:
        raise ServeError(str(error)) from error


def with_values(tables: dict[str, Any], section: str, **values: Any) -> dict[str, Any]:
    """`tables` with some keys of a table set; "" is the top level."""
    if not section:
        return {**tables, **values}
    return {**tables, section: {**tables.get(section, {}), **values}}
