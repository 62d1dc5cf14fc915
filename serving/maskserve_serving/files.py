"""The files of one worker: its configuration and its private folders."""

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
    """A worker's private folders, removed at the end.

    `root` is in memory and made anew at each start. `templates` is on disk: templates are the
    clients' and outlive a restart of the worker.
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
        """LoRAs in memory, which all workers of the supervisor share."""
        return self.root.parent / "adapters"

    @property
    def values(self) -> Path:
        """Values between workflow nodes, which all workers of the supervisor share."""
        return self.root.parent / "values"

    def prepare(self, tables: dict[str, Any]) -> Config:
        """Clear the folder, write the worker's configuration and return it as the worker reads it.

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
    """Make folders for the workers of one supervisor.

    The status record is in memory: an engine writes it at each step and is restarted if it is
    silent, and on a busy disk a write can take seconds.
    """
    memory = Path(tempfile.mkdtemp(prefix=_prefix(base_port), dir=_memory()))
    disk = Path(tempfile.mkdtemp(prefix=_prefix(base_port), dir=_disk()))
    names = [f"worker-{index}" for index in range(workers)]
    return [WorkerFiles(memory / name, disk / name) for name in names]


def workers_by_base() -> dict[int, int]:
    """Return base port -> number of workers, for the supervisors of this host.

    The ports of a worker that restarts are free for a while, but still reserved.
    """
    counts: dict[int, int] = {}
    for folder in Path(_memory()).glob(_prefix("*") + "*"):
        base = folder.name.split("-")[2]
        with suppress(OSError):  # it is being removed
            names = [child.name for child in folder.iterdir()]
            counts[int(base)] = sum(name.startswith("worker-") for name in names)
    return counts


def folders_of(files: list[WorkerFiles]) -> set[Path]:
    """Return the folders that `worker_files` made."""
    return {path.parent for worker in files for path in (worker.root, worker.templates)}


def hold(files: list[WorkerFiles]) -> list[int]:
    """Lock these folders against other `remove_stale` calls until the returned files are closed.

    The kernel closes them if the supervisor is killed.
    """
    descriptors = [os.open(folder, os.O_RDONLY) for folder in folders_of(files)]
    for folder in descriptors:
        with suppress(OSError):  # without locks, nothing is removed either
            fcntl.flock(folder, fcntl.LOCK_SH)
    return descriptors


def remove_stale(
    base_port: int, current: list[WorkerFiles], report: Callable[[str], None] = print
) -> None:
    """Remove files of killed supervisors at this base port, once their processes have ended.

    Raises:
        ServeError: another supervisor runs there; its ports are free until its models are loaded.
    """
    spared = folders_of(current)
    for parent in {_memory(), _disk()}:
        for folder in Path(parent).glob(_prefix(base_port) + "*"):
            if folder not in spared and not _removed_unless_locked(folder, report):
                raise ServeError(
                    f"another maskserve serve runs at port {base_port}; "
                    "stop it or choose another --base-port"
                )


def _removed_unless_locked(folder: Path, report: Callable[[str], None]) -> bool:
    """Return False if a running supervisor holds the folder; leave other users' folders."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        end_orphans(folder, report)
        shutil.rmtree(folder, ignore_errors=True)
    except BlockingIOError:
        return False
    except OSError:
        pass
    finally:
        os.close(descriptor)
    return True


def _prefix(base_port: int | str) -> str:
    return f"maskserve-run-{base_port}-"


def _disk() -> str:
    return tempfile.gettempdir()


def _memory() -> str:
    """Return a folder in memory, if this host has a writable one; else one on disk."""
    for folder in (os.environ.get("XDG_RUNTIME_DIR", ""), "/dev/shm"):
        if folder and os.access(folder, os.W_OK | os.X_OK):
            return folder
    return tempfile.gettempdir()


def read_tables(path: Path | None) -> dict[str, Any]:
    """Return the tables of the user's configuration file, checked."""
    if path is None:
        return {}
    load(path)
    # `load_config` returns no tables: read the file again.
    return tomllib.loads(path.read_text(encoding="utf-8"))


def load(path: Path) -> Config:
    try:
        return load_config(path)
    except ConfigError as error:
        raise ServeError(str(error)) from error


def checked(tables: dict[str, Any]) -> Config:
    """Return the configuration of these tables.

    Raises:
        ServeError: it is not valid.
    """
    try:
        return config_of(tables)
    except ConfigError as error:
        raise ServeError(str(error)) from error


def with_values(tables: dict[str, Any], section: str, **values: Any) -> dict[str, Any]:
    """Return `tables` with keys of a table set; `section` "" is the top level."""
    if not section:
        return {**tables, **values}
    return {**tables, section: {**tables.get(section, {}), **values}}
