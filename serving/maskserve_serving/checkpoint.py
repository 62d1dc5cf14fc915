"""Checkpoint files of `--model`, turned into folders in diffusers format (docs/models.md).

A folder is made once for a file and what stands beside it, and found again at the next start. It is
written aside and renamed, so it is whole or not there.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from maskserve_common.files.store import FileStore
from maskserve_engine.checkpoints.request import CheckpointRequest, Description, ModelReport
from maskserve_serving.engine_process import ask_engine
from maskserve_serving.errors import ServeError
from maskserve_serving.file_kind import ENDS, check_denoiser

_FOLDER = "maskserve_engine.checkpoints.folder"
_REPORT = "maskserve_engine.fitting.model_report"
T = TypeVar("T")
_FORMAT = 1
"""Changes when the same file would be converted otherwise."""


@dataclass(frozen=True, slots=True)
class CheckpointParts:
    """The parts beside a checkpoint file, as flags name it."""

    base: str = ""
    text_encoders: tuple[str, ...] = ()
    vae: str = ""
    cache: Path | None = None
    """Folder for the models' folders; None: checkpoint files are not read."""
    report: Callable[[str], None] = print

    def __bool__(self) -> bool:
        return bool(self.base or self.text_encoders or self.vae)


def is_checkpoint(model: str) -> bool:
    """Whether `--model` is a file.

    Raises:
        ServeError: it is a file of another kind; the text names the flag that takes it.
    """
    file = Path(model).expanduser()
    if not file.is_file():
        return False
    check_denoiser(file)
    return True


def name_of(file: Path) -> str:
    """Return a checkpoint file's name without its end."""
    return file.name.split(".safetensors")[0].removesuffix(".gguf")


def describe(file: Path) -> Description:
    """Describe a checkpoint by its header.

    Raises:
        ServeError: it is damaged or not served.
    """
    return _decoded(_ask(CheckpointRequest(str(file))), Description)


def report_of(request: CheckpointRequest) -> ModelReport:
    """Report on a model or a checkpoint without its weights (`model_report.report`).

    Raises:
        ServeError: it is damaged or not served.
    """
    return _decoded(_ask(request, _REPORT), ModelReport)


def _ask(request: CheckpointRequest, module: str = _FOLDER) -> str:
    return ask_engine(module, msgspec.json.encode(request))


def _decoded(output: str, form: type[T]) -> T:
    return msgspec.json.decode(output.strip().splitlines()[-1], type=form)


def folder_of(request: CheckpointRequest, parts: CheckpointParts) -> Path:
    """Return the folder of a checkpoint, made if it is not there.

    Args:
        request: the files and folders; its own `folder` is empty.
        parts: names the cache.

    Raises:
        ServeError: it cannot be made.
    """
    assert parts.cache is not None
    file = Path(request.file)
    paths = [request.file, request.base, request.vae, *request.text_encoders]
    identity = [_identity(Path(name)) for name in paths if name]
    words = repr((_FORMAT, request.weights, request.vae, request.text_encoders, identity))
    digest = hashlib.sha256(words.encode()).hexdigest()[:16]
    folder = parts.cache / f"{name_of(file)}-{digest}"
    if _is_whole(folder):
        return folder
    store = FileStore(parts.cache)
    try:
        with store.write_lock(folder.name, math.inf):  # another start of the model waits
            if not _is_whole(folder):
                _make(request, folder, store, parts.report)
    except OSError as error:
        raise ServeError(f"{parts.cache}: cannot be written ({error.strerror})") from error
    return folder


def _is_whole(folder: Path) -> bool:
    """Whether a folder is there, and none of its links ends nowhere."""
    return folder.is_dir() and all(path.exists() for path in folder.rglob("*"))


def _make(
    request: CheckpointRequest, folder: Path, store: FileStore, report: Callable[[str], None]
) -> None:
    _remove_abandoned(store)
    shutil.rmtree(folder, ignore_errors=True)
    aside = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=store.folder))
    try:
        if request.weights:
            report(f"{Path(request.file).name}: converted once, to {folder}")
        output = _ask(msgspec.structs.replace(request, folder=str(aside)))
        for line in output.splitlines():
            report(line)
        aside.rename(folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _remove_abandoned(store: FileStore) -> None:
    """Remove the folders aside of conversions that were killed; those that run hold a lock."""
    for aside in store.folder.glob(".*/"):
        name = aside.name.rpartition("-")[0].removeprefix(".") or aside.name
        with contextlib.suppress(TimeoutError), store.write_lock(name, 0.0):
            shutil.rmtree(aside, ignore_errors=True)


def _identity(path: Path) -> Sequence[object]:
    """Return what changes with a file or folder of weights."""
    try:
        if path.is_dir():
            files = sorted(child for child in path.glob("**/*") if child.is_file())
        else:
            files = [path, *sorted(path.parent.glob("*.safetensors"))][: 1 + _shards(path)]
        stats = [(str(file), file.stat()) for file in files]
    except OSError as error:
        raise ServeError(f"{path}: {error.strerror}") from error
    return [(os.path.abspath(name), stat.st_size, stat.st_mtime_ns) for name, stat in stats]


def _shards(path: Path) -> int:
    return 2**16 if path.name.endswith(ENDS[1]) else 0
