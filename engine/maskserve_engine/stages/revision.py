"""A digest of the served weights, for the names of cached activations."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import xxhash

from maskserve_core.config import Config
from maskserve_core.models.facts import read_json

_CACHED = ".maskserve-digests.json"
"""Beside the weights: file -> size, time of change, digest."""
_OF_STAGES = (
    "vae", "text_encoder", "text_encoder_2", "text_encoder_3", "tokenizer", "tokenizer_2",
    "tokenizer_3", "processor",
)  # fmt: skip
_PARTS = ("transformer", "unet", "scheduler", *_OF_STAGES)
_CHUNK = 2**24


def stages_revision(config: Config) -> str:
    """Of encoder and decoder: models that have it give the same moments, embeddings and pixels. So
    a service has it of the worker that asks it.
    """
    model = config.model
    pipeline = read_json(Path(model.path) / "model_index.json").get("_class_name")
    how = f"{pipeline} {model.max_sequence_length} {' '.join(model.fuse_loras)}"
    return model_revision(model.path, how, _OF_STAGES)


def model_revision(folder: str | Path, form: str = "", parts: Sequence[str] = _PARTS) -> str:
    """32 hexadecimal digits over every byte of every part that shapes activations.

    Entries outlive a process, so two trainings must never share a name. Digests of files are kept
    beside them and hold for as long as size and time of change do: tens of gigabytes are read at
    the first start only. A folder that cannot be written is read at each start.

    Args:
        folder: of the model.
        form: that the weights are brought to when they are loaded; empty: none.
        parts: folders in it.
    """
    folder = Path(folder)
    known, digest = _read(folder), xxhash.xxh3_128()
    # Others are those of who asks for other parts, or for a file.
    now = {name: held for name, held in known.items() if name.partition("/")[0] not in parts}
    for part in parts:
        for path in sorted(p for p in (folder / part).glob("*") if p.is_file()):
            name = f"{part}/{path.name}"
            now[name] = _about(path, known.get(name))
            digest.update(f"{name}:{now[name][0]}:{now[name][2]};".encode())
    if now != known:
        _write(folder, {**_read(folder), **now})  # processes of one worker start together
    if form:
        digest.update(f"weights:{form};".encode())
    return digest.hexdigest()


def file_digest(path: str | Path) -> str:
    """32 hexadecimal digits over a file of weights, kept beside it likewise.

    Raises:
        OSError: it cannot be read.
    """
    path = Path(path)
    known = _read(path.parent)
    about = _about(path, known.get(path.name))
    if about != known.get(path.name):
        _write(path.parent, {**known, path.name: about})
    return str(about[2])


def _about(path: Path, held: list[int | str] | None) -> list[int | str]:
    """A file's size, time of change and digest, which is the held one if the others still are."""
    about = path.stat()
    size_and_time: list[int | str] = [about.st_size, about.st_mtime_ns]
    if held is not None and held[:2] == size_and_time:
        return held
    return [*size_and_time, _digest(path)]


def _digest(path: Path) -> str:
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _read(folder: Path) -> dict[str, list[int | str]]:
    try:
        known = json.loads((folder / _CACHED).read_text(encoding="utf-8"))
        return {str(name): [int(a), int(b), str(c)] for name, (a, b, c) in known.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def _write(folder: Path, known: dict[str, list[int | str]]) -> None:
    aside = folder / f"{_CACHED}.{os.getpid()}"
    with suppress(OSError):
        aside.write_text(json.dumps(known), encoding="utf-8")
        aside.replace(folder / _CACHED)
