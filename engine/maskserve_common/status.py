"""The status record between processes (design §4).

The engine writes the record at each step; `control`, the fronts and probes read it from other
processes and never wait for the engine. `status_record` defines its content.

The file is a head and two slots, written alternately, each with its length and checksum:

    | magic, version, slot bytes | slot 0: head, record | slot 1: the same |

A reader takes the newest slot with a correct checksum. So an unfinished write, or one that a kill
cut short, costs only that record. Both sides use positioned reads and writes of the shared page
cache, not a mapping: if somebody truncates the file or fills the tmpfs, that is an error to handle,
where a mapping would end the process with SIGBUS.
"""

from __future__ import annotations

import os
import struct
import time
import zlib
from pathlib import Path

from msgspec.structs import replace

from maskserve_common.contracts.status_record import VERSION, RowStatus, Stamp, WorkerStatus
from maskserve_common.files.store import FileStore

__all__ = ["RowStatus", "Stamp", "StatusReader", "StatusWriter", "WorkerStatus"]

_FILE_MAGIC = b"maskstat"
_FILE_HEAD = struct.Struct("<8sII")  # magic, version, bytes per slot
_SLOT_HEAD = struct.Struct("<QII")  # sequence; bytes and CRC-32 of the record
_FIRST_SLOT = 64
_SMALLEST_SLOT = 16 * 1024
_LARGEST_SLOT = 2**30
_READ_TRIES = 16


def _slot_offset(sequence: int, slot_bytes: int) -> int:
    return _FIRST_SLOT + (sequence % 2) * slot_bytes


def _write_all(file: int, data: bytes, offset: int) -> None:
    written = os.pwrite(file, data, offset)
    if written != len(data):
        raise OSError(f"status record: wrote {written} of {len(data)} bytes")


class StatusWriter:
    """Writes the record of one worker; the only writer of its path, used from one thread.

    The file appears with the first record. A writer that restarts, or whose records outgrow the
    file, replaces it as a whole.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._file: int | None = None
        self._slot_bytes = 0
        self._sequence = 0

    def write(self, status: WorkerStatus) -> Stamp:
        """Publish `status` with new stamps and return them; the stamps that it has are ignored.

        Raises:
            OSError: the file cannot be written; readers keep the previous record.
        """
        stamp = Stamp(self._sequence + 1, time.time_ns(), time.monotonic_ns())
        encoded = replace(status, **stamp._asdict()).to_json()
        head = _SLOT_HEAD.pack(stamp.sequence, len(encoded), zlib.crc32(encoded))
        record = head + encoded
        if self._file is None or len(record) > self._slot_bytes:
            self._replace_file(record, stamp.sequence)
        else:
            _write_all(self._file, record, _slot_offset(stamp.sequence, self._slot_bytes))
        self._sequence = stamp.sequence
        return stamp

    def close(self) -> None:
        """Close the file, which keeps its last record."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _replace_file(self, record: bytes, sequence: int) -> None:
        slot_bytes = _SMALLEST_SLOT
        while slot_bytes < 2 * len(record):
            slot_bytes *= 2
        # Space for both slots is allocated now, so that later records always have it.
        self.path.parent.stat()  # a removed folder must not come back
        with FileStore(self.path.parent, is_shared=True).aside(_FIRST_SLOT + 2 * slot_bytes) as new:
            file = new.file.fileno()
            _write_all(file, _FILE_HEAD.pack(_FILE_MAGIC, VERSION, slot_bytes), 0)
            _write_all(file, record, _slot_offset(sequence, slot_bytes))
            new.keep_as(self.path.name)
            self.close()
            self._file, self._slot_bytes = os.dup(file), slot_bytes


class StatusReader:
    """Reads the record of one worker from any process; follows a file that is replaced."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._file: int | None = None
        self._identity: tuple[int, int] | None = None
        self._slot_bytes = 0

    def read(self) -> WorkerStatus | None:
        """Return the newest complete record; None: there is none (no file, another format, a
        damaged file).
        """
        raw = self.read_json()
        if raw is None:
            return None
        try:
            return WorkerStatus.from_json(raw)
        except ValueError:
            return None

    def read_json(self) -> bytes | None:
        """Return the record as JSON bytes, to be passed on without being parsed."""
        # If the writer writes both slots while the reader copies, neither is complete: read again.
        for _ in range(_READ_TRIES):
            try:
                if not self._follow():
                    return None
                raw = self._newest()
            except OSError:
                raw = None
            if raw is not None:
                return raw
        return None

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
        self._file = self._identity = None

    def _follow(self) -> bool:
        """Reopen the file if another one has its path now; return False if there is none to
        read.
        """
        try:
            stat = os.stat(self.path)
        except OSError:
            self.close()
            return False
        # The inode of an open file is not given to another file.
        if self._identity == (stat.st_dev, stat.st_ino):
            return True
        self.close()
        self._file = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        file_stat = os.fstat(self._file)
        head = os.pread(self._file, _FILE_HEAD.size, 0)
        if len(head) < _FILE_HEAD.size:
            return False
        magic, version, slot_bytes = _FILE_HEAD.unpack(head)
        if magic != _FILE_MAGIC or version != VERSION or not 0 < slot_bytes <= _LARGEST_SLOT:
            return False
        self._identity, self._slot_bytes = (file_stat.st_dev, file_stat.st_ino), slot_bytes
        return True

    def _newest(self) -> bytes | None:
        assert self._file is not None
        heads = []
        for slot in (0, 1):
            offset = _FIRST_SLOT + slot * self._slot_bytes
            head = os.pread(self._file, _SLOT_HEAD.size, offset)
            if len(head) == _SLOT_HEAD.size:
                heads.append((_SLOT_HEAD.unpack(head), offset + _SLOT_HEAD.size))
        for (_, size, checksum), offset in sorted(heads, reverse=True):
            if not 0 < size <= self._slot_bytes - _SLOT_HEAD.size:
                continue
            raw = os.pread(self._file, size, offset)
            if zlib.crc32(raw) == checksum:
                return raw
        return None
