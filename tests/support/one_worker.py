"""A server with one worker that stays up."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from maskserve_serving.options import ServeOptions
from maskserve_serving.supervisor import Supervisor
from maskserve_serving.worker import WorkerProcess


@contextmanager
def one_worker(options: ServeOptions) -> Iterator[WorkerProcess]:
    """Serve with these options. The worker must not restart meanwhile."""
    with Supervisor(options) as running:
        [worker] = running.workers
        yield worker
        assert worker.restarts == 0
