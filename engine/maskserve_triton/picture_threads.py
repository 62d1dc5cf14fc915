"""The `execute` of a model that works on whole pictures, in threads of its process.

A picture of many megapixels takes a hundred times as long as a small one. So small pictures do not
wait for large ones: each kind has its threads, those of large pictures also give way to everything
else on the machine, and in both the keys take turns. Pillow and numpy work without Python's lock.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from maskserve_common.errors import guarded
from maskserve_common.niceness import Niceness
from maskserve_common.tracing import Stage, Tracer, parent_of
from maskserve_triton.answer import Answer, answer_all
from maskserve_triton.fair_threads import FairThreads
from maskserve_triton.tensor_io import Outputs

LARGE_PIXELS = 2**21
"""More pixels make a picture a large one."""
_THREADS = 2
"""Threads of each kind. A thread with a picture of 50 megapixels takes half a gigabyte."""


@dataclass(frozen=True, slots=True)
class PictureJob:
    """The work on the pictures of one request.

    It reads nothing from Triton's memory, which is reused once `execute` returns.
    """

    key: str
    """Scope of the client's key."""
    pixels: Callable[[], int]
    """Returns the number of pixels from the headers; raises what `work` raises."""
    work: Callable[[], Outputs]
    """Makes the outputs."""
    failed: Callable[[Exception], Outputs] | None = None
    """Makes the outputs for an error of `work`; None: a Triton error."""


class PictureThreads:
    """Answers requests of Triton when their jobs are done.

    Args:
        api: triton_python_backend_utils.
        tracer: records a span for each job.
        name: name of the span and of the threads.
        read: reads a request. Returns its job, or its outputs if there is nothing to do.
    """

    def __init__(
        self, api: Any, tracer: Tracer, name: str, read: Callable[[Any], PictureJob | Outputs]
    ) -> None:
        self._api, self._tracer, self._name, self._read = api, tracer, name, read
        self._small = FairThreads(_THREADS, None, name, short_jobs=True)
        self._large = FairThreads(
            _THREADS, None, f"{name}-large", Niceness.LARGE_PICTURES, short_jobs=True
        )

    def execute(self, requests: list[Any]) -> None:
        """Take requests in."""
        answer_all(self._api, requests, self._take)

    def close(self) -> None:
        """Begin no more jobs."""
        self._small.close()
        self._large.close()

    def _take(self, request: Any, answer: Answer) -> None:
        job = self._read(request)
        if not isinstance(job, PictureJob):
            answer.finish(job)
            return
        run = partial(self._run, job, answer, parent_of(request))
        self._small.submit(job.key, partial(self._begin, job, run))

    def _begin(self, job: PictureJob, run: Callable[[], None]) -> None:
        """Run a job if its picture is small, or else pass it to the other threads."""
        with suppress(Exception):
            if job.pixels() > LARGE_PIXELS:
                self._large.submit(job.key, run)
                return
        run()

    def _run(self, job: PictureJob, answer: Answer, parent: str) -> None:
        begin, error = time.time_ns(), None
        try:
            outputs = job.work()
        except Exception as problem:
            error = problem
        self._tracer.record(parent, [Stage(self._name, begin, time.time_ns(), error=error)])
        if error is None:
            answer.finish(outputs)
        elif job.failed is None:
            answer.fail(guarded("", error))
        else:
            answer.finish(job.failed(error))
