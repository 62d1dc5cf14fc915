"""A digest of the served weights, for the names of cached activations."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path

import xxhash

_PARTS = ("transformer", "unet", "vae", "text_encoder", "text_encoder_2", "scheduler")
_CACHED = ".maskserve-digests.json"
"""Beside the weights: file -> size, time of change, digest."""
_CHUNK = 2**24


def model_revision(folder: str | Path, form: str = "") -> str:
    """32 hexadecimal digits over every byte of every part that shapes activations.

    Entries outlive a process, so two trainings must never share a name. Digests of files are kept
    beside them and hold for as long as size and time of change do: tens of gigabytes are read at
    the first start only. A folder that cannot be written is read at each start.

    Args:
        folder: of the model.
        form: that the weights are brought to when they are loaded; empty: none.
    """
    folder = Path(folder)
    known, digest = _read(folder), xxhash.xxh3_128()
    now: dict[str, list[int | str]] = {}
    for part in _PARTS:
        for path in sorted(p for p in (folder / part).glob("*") if p.is_file()):
            name, about = f"{part}/{path.name}", path.stat()
            held = known.get(name, [0, 0, ""])
            fresh = held[:2] == [about.st_size, about.st_mtime_ns]
            of_file = str(held[2]) if fresh else _digest(path)
            now[name] = [about.st_size, about.st_mtime_ns, of_file]
            digest.update(f"{name}:{about.st_size}:{of_file};".encode())
    if now != known:
        _write(folder, now)
    if form:
        digest.update(f"weights:{form};".encode())
    return digest.hexdigest()


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
