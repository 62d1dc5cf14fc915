"""Checkpoint files of `--model`, turned into folders in diffusers format (docs/adr/0087).

A folder is made once for a file and what stands beside it, and found again at the next start. It is
written aside and renamed, so it is whole or not there.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from maskserve_engine.checkpoints.request import CheckpointRequest, Description
from maskserve_serving.errors import ServeError

ENDS = (".safetensors", ".safetensors.index.json")
_MODULE = "maskserve_engine.checkpoints.folder"
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
        ServeError: it is a file of another kind.
    """
    file = Path(model).expanduser()
    if not file.is_file():
        return False
    if file.suffix == ".gguf":
        raise ServeError(
            f"--model: {file} is a GGUF file; accepted: the model's folder, with --gguf {file}"
        )
    if not file.name.endswith(ENDS):
        raise ServeError(
            f"--model: {file} is not a safetensors file; other formats are not read, as they may "
            "run code"
        )
    return True


def describe(file: Path) -> Description:
    """Describe a checkpoint by its header.

    Raises:
        ServeError: it is damaged or not served.
    """
    text = _run(CheckpointRequest(str(file)))
    return msgspec.json.decode(text.strip().splitlines()[-1], type=Description)


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
    named = [request.file, request.base, request.vae, *request.text_encoders]
    identity = [_identity(Path(name)) for name in named if name]
    words = repr((_FORMAT, request.weights, request.vae, request.text_encoders, identity))
    digest = hashlib.sha256(words.encode()).hexdigest()[:16]
    folder = parts.cache / f"{file.name.split('.safetensors')[0]}-{digest}"
    if folder.is_dir() and all(path.exists() for path in folder.rglob("*")):
        return folder
    shutil.rmtree(folder, ignore_errors=True)  # a link in it ends nowhere
    try:
        parts.cache.mkdir(parents=True, exist_ok=True)
        aside = Path(tempfile.mkdtemp(prefix=".", dir=parts.cache))
    except OSError as error:
        raise ServeError(f"{parts.cache}: cannot be written ({error.strerror})") from error
    try:
        if request.weights:
            parts.report(f"{file.name}: converted once, to {folder}")
        output = _run(msgspec.structs.replace(request, folder=str(aside)))
        for line in output.splitlines():
            parts.report(line)
        try:
            aside.rename(folder)
        except OSError:
            if not folder.is_dir():  # another start was first
                raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return folder


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


def _run(request: CheckpointRequest) -> str:
    """Return the output of the process that reads checkpoints."""
    with tempfile.NamedTemporaryFile(prefix="maskserve-checkpoint-", suffix=".json") as file:
        file.write(msgspec.json.encode(request))
        file.flush()
        command = [sys.executable, "-m", _MODULE, file.name]
        ended = subprocess.run(command, check=False, capture_output=True)
    if ended.returncode:
        raise ServeError(last_sentence(ended.stderr.decode(errors="replace")))
    return ended.stdout.decode()


def last_sentence(stderr: str) -> str:
    """Return the sentence of a process of ours that failed; libraries print much before it."""
    last = next(reversed(stderr.strip().splitlines()), "")
    head = "maskserve serve: "
    return last.removeprefix(head) if last.startswith(head) else stderr
