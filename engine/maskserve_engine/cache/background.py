"""A thread for slow work on files and networks, in the background."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

_log = logging.getLogger(__name__)


class Background:
    """Runs jobs one after the other. A job that fails is logged and does not affect the others.
    `idle` is called when no job has come for `idle_s` seconds.
    """

    def __init__(
        self, name: str, idle: Callable[[], object] = lambda: None, idle_s: float = 1.0
    ) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._idle, self._idle_s = idle, idle_s
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._lock, self._started = threading.Lock(), False

    @property
    def pending(self) -> int:
        """Number of jobs that have not begun."""
        return self._jobs.qsize()

    def submit(self, job: Callable[[], object]) -> None:
        """Run a job after those before it; the first one starts the thread."""
        with self._lock:
            if not self._started:
                self._started = True
                self._thread.start()
        self._jobs.put(job)

    def settle(self, timeout_s: float) -> bool:
        """Wait until the jobs submitted so far are done; return False after `timeout_s`."""
        done = threading.Event()
        self.submit(done.set)
        return done.wait(timeout_s)

    def close(self, timeout_s: float) -> None:
        """End the thread after the submitted jobs; wait for it up to `timeout_s`."""
        if self._started:
            self._jobs.put(None)
            self._thread.join(timeout_s)

    def _run(self) -> None:
        while True:
            job: Callable[[], object] | None
            try:
                job = self._jobs.get(timeout=self._idle_s)
            except queue.Empty:
                job = self._idle
            if job is None:
                return
            try:
                job()
            except Exception:
                _log.exception("a job of %s failed", self._thread.name)
