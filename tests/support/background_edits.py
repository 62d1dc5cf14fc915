"""A repeated edit, and the worker's processes, which must survive bad requests."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import psutil

from maskserve_serving.worker import WorkerProcess
from tests.support.calls import Grpc, pixels, plain_edit


class BackgroundEdits:
    """An edit that is repeated while bad requests come in."""

    def __init__(self, url: str) -> None:
        self._grpc = Grpc(url)
        self._stop = threading.Event()
        self._pictures: list[bytes] = []
        self._errors: list[Exception] = []
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> BackgroundEdits:
        self._expected = self._edit()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(60)
        self._grpc.close()
        assert not self._thread.is_alive(), "the edit beside is not answered"

    def check(self) -> None:
        """Check that every edit came back with the same pixels."""
        assert not self._errors, self._errors[:3]
        assert len(self._pictures) >= 3
        expected = pixels(self._expected).astype(int)
        for picture in set(self._pictures):
            assert (abs(pixels(picture) - expected) <= 1).all()

    def _edit(self) -> bytes:
        return self._grpc.edit(plain_edit(num_inference_steps=8))[0]

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self._pictures.append(self._edit())
            except Exception as error:
                self._errors.append(error)


class Processes:
    """The worker's processes and its two logs, starting now."""

    def __init__(self, worker: WorkerProcess) -> None:
        self._worker = worker
        self._ids = self._living()
        self._triton, self._server_log = Log(worker.spec.log), Log(Path(worker.config.log.file))

    def check(self) -> None:
        """Check that the same processes are alive and that none of them had an unexpected
        exception.
        """
        assert self._worker.restarts == 0
        assert self._living() == self._ids
        # Triton's log has exceptions that our code did not catch; the JSON lines have the others.
        text = self._triton.tail()
        at = text.find(b"Traceback")
        assert at < 0, text[max(0, at - 500) :][:3000].decode()
        lines: list[dict[str, Any]] = [
            json.loads(line) for line in self._server_log.tail().splitlines()
        ]
        assert lines
        grave = ("ERROR", "CRITICAL")
        problems = [line for line in lines if line["level"] in grave or "exc" in line]
        assert not problems, problems[:3]

    def _living(self) -> set[tuple[int, float]]:
        assert self._worker.pid is not None
        server = psutil.Process(self._worker.pid)
        return {(p.pid, p.create_time()) for p in (server, *server.children(recursive=True))}


class Log:
    """A file that grows. Only text after this moment counts."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._start = path.stat().st_size

    def tail(self) -> bytes:
        with self._path.open("rb") as log:
            log.seek(self._start)
            return log.read()
