"""Digests of large files, each read once: they are kept beside the files."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

_DIGESTS_FILE = ".maskserve-digests.json"
"""File of digests: name -> size, time of change, digest."""
_CHUNK = 2**24


def file_digest(folder: Path, name: str) -> str:
    """Return 32 hexadecimal digits over a file's bytes, cached while its size and modification time
    stay the same. If the folder is not writable, each process reads the file once.

    Raises:
        OSError: it cannot be read.
    """
    about = (folder / name).stat()
    return _known(folder, name, about.st_size, about.st_mtime_ns)


@lru_cache(maxsize=4096)
def _known(folder: Path, name: str, size: int, changed: int) -> str:
    record = _read(folder).get(name)
    if record is not None and record[:2] == [size, changed]:
        return str(record[2])
    digest = _digest(folder / name)
    # Read again: processes of one worker start together.
    records = {
        file_name: record
        for file_name, record in _read(folder).items()
        if (folder / file_name).is_file()
    }
    _write(folder, {**records, name: [size, changed, digest]})
    return digest


def _digest(path: Path) -> str:
    import xxhash  # not at the top: routers and clients have neither weights nor this

    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _read(folder: Path) -> dict[str, list[int | str]]:
    try:
        records = json.loads((folder / _DIGESTS_FILE).read_text(encoding="utf-8"))
        return {str(name): [int(a), int(b), str(c)] for name, (a, b, c) in records.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def _write(folder: Path, digests: dict[str, list[int | str]]) -> None:
    aside = folder / f"{_DIGESTS_FILE}.{os.getpid()}"
    with suppress(OSError):
        aside.write_text(json.dumps(digests), encoding="utf-8")
        aside.replace(folder / _DIGESTS_FILE)
