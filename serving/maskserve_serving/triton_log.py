"""The output of a worker's Triton: written to its log file, and searched for failures."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import IO

_TAIL_BYTES = 4 * 2**20
_READ_BYTES = 65536
_LAST_WORDS_S = 0.5

# Triton quotes a Python model's failure as "<type>: <sentence>\n\nAt:\n  <frames>".
_FAILED = re.compile(r"failed to load '([^']+)' version \d+: (\w+[\w ]*?): (.*)")
_RAISED = re.compile(_FAILED.pattern + r"(?:\\n|\n){2}At:")
_LOADED = re.compile(r"successfully loaded '([^']+)'")
_ABORTED = re.compile(r"^terminate called after throwing an instance of '([^']+)'", re.MULTILINE)
_ERROR_LINE = re.compile(
    r"^(?:E\d{4} [\d:.]+ \d+ [^\]]*\] ?|error: |maskserve-router: )\"?(.*?)\"?$"
)
# Written at every start on a machine without a GPU.
_HARMLESS = ("CudaDriverHelper", "CUDA driver version is insufficient")


def loaded_models(text: str) -> set[str]:
    """Return the names of the models that Triton reports as loaded."""
    return set(_LOADED.findall(text))


def refusal(text: str) -> str | None:
    """Return the error of a model that does not load, as one sentence; None: no model raised one.

    Triton waits for all other models to load before it ends. Its own reports about a model do not
    count: it may take a process for dead.
    """
    raised = _RAISED.search(text)
    return None if raised is None else _reason(raised)


def failure(text: str) -> str | None:
    """Return why the server did not start, as one sentence; None: the log does not tell."""
    failed = _FAILED.search(text)
    if failed is not None:
        return _reason(failed)
    aborted = _ABORTED.search(text)
    if aborted is not None:
        return f"tritonserver aborted ({aborted.group(1)})"
    errors = [match.group(1) for match in map(_ERROR_LINE.match, text.splitlines()) if match]
    errors = [e for e in errors if e.strip() and not any(words in e for words in _HARMLESS)]
    return _clean(errors[0]) if errors else None


def _reason(failed: re.Match[str]) -> str:
    return f"model {failed.group(1)} failed to load: {_clean(failed.group(3))}"


def _clean(sentence: str) -> str:
    return sentence.replace("\\n", "\n").split("\n")[0].strip().strip('"')


class TritonLog:
    """The output of one start of a worker, read from a pipe in a thread.

    A full or read-only disk does not stop the worker: output that cannot be written is dropped.
    `report` gets one line about it, and the log gets the number of dropped bytes once it can be
    written.
    """

    def __init__(self, path: Path, pipe: IO[bytes], report: Callable[[str], None]) -> None:
        self._path, self._pipe, self._report = path, pipe, report
        self._file: int | None = None
        self._dropped = 0
        self._tail = bytearray()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="triton-log", daemon=True)
        self._thread.start()

    def text(self) -> str:
        """Return the output so far, at most the newest `_TAIL_BYTES`."""
        with self._lock:
            return self._tail.decode("utf-8", errors="replace")

    def whole_text(self) -> str:
        """Return `text` after the server has ended, with its last output."""
        self._thread.join(_LAST_WORDS_S)
        return self.text()

    def _run(self) -> None:
        with self._pipe:
            while chunk := os.read(self._pipe.fileno(), _READ_BYTES):
                with self._lock:
                    self._tail += chunk
                    del self._tail[:-_TAIL_BYTES]
                self._write(chunk)
        if self._file is not None:
            os.close(self._file)

    def _write(self, data: bytes) -> None:
        try:
            if self._file is None:
                flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
                self._file = os.open(self._path, flags, 0o666)
            if self._dropped:
                os.write(self._file, f"\n[{self._dropped} bytes could not be written]\n".encode())
                self._dropped = 0
            os.write(self._file, data)
        except OSError as error:
            if not self._dropped:
                self._report(f"cannot write {self._path}: {error.strerror}; lines are lost")
            self._dropped += len(data)
