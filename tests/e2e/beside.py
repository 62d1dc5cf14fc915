"""Beside bad requests: an edit that is repeated, and processes that must live on."""

from __future__ import annotations

import threading

import psutil

from serving.worker import Worker
from tests.e2e.calls import Grpc, pixels, plain_edit


class Beside:
    """An edit that is repeated while bad requests come in."""

    def __init__(self, url: str) -> None:
        self._grpc = Grpc(url)
        self._stop = threading.Event()
        self._pictures: list[bytes] = []
        self._errors: list[Exception] = []
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Beside:
        self._expected = self._edit()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(60)
        self._grpc.close()

    def check(self) -> None:
        """Every edit came back, and with the same pixels."""
        assert self._errors == []
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
    """The worker's processes and log, from one moment on."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._ids = self._living()
        self._log_start = worker.spec.log.stat().st_size

    def check(self) -> None:
        """The same processes are alive, and none of them met an exception nobody foresaw."""
        assert self._worker.restarts == 0
        assert self._living() == self._ids
        with self._worker.spec.log.open("rb") as log:
            log.seek(self._log_start)
            said = log.read()
        assert b"Traceback" not in said, said[said.index(b"Traceback") - 500 :][:3000].decode()

    def _living(self) -> set[tuple[int, float]]:
        assert self._worker.pid is not None
        server = psutil.Process(self._worker.pid)
        return {(p.pid, p.create_time()) for p in (server, *server.children(recursive=True))}
