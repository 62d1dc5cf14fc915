"""A worker's process dies, stops or fails under load. The tests measure the clients' messages and
the time until it serves again.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass

from geventhttpclient.response import HTTPConnectionClosed
from tritonclient.utils import InferenceServerException

from maskserve_benchmarks.triton_calls import Grpc, Http, Stream
from maskserve_serving.supervisor import STEADY_S
from tests.support.faults.sabotage import ORDER
from tests.support.faults.worker_site import Site, until

CLIENTS = 5
RETURN_BAR_S = 60.0
"""Seconds that a worker may take to return beyond its load time: some four times what a quiet
machine takes, so that a busy one passes, too."""
PATIENCE_S = 60.0
LOAD_S = 300.0


@dataclass(frozen=True, slots=True)
class WorkerFault:
    """A fault in one process of a worker."""

    name: str
    inject: Callable[[Site], None]
    code: str = "[ENGINE_FAILED]"
    """A part of the clients' messages; empty if no process of ours is left to answer."""
    answer_bar_s: float = 5.0


@dataclass(frozen=True, slots=True)
class WorkerTrial:
    """The result of a fault. Times are seconds from the fault."""

    messages: tuple[str, ...]
    """Distinct messages that clients got."""
    serves_s: float
    """Seconds until an edit succeeded again."""
    load_s: float
    """Seconds that the restarted worker took to load."""
    as_told: bool
    """Whether every client got the fault's message in time."""


def worker_faults() -> list[WorkerFault]:
    """Every fault that the tests try."""
    kill, stop = signal.SIGKILL, signal.SIGSTOP
    return [
        WorkerFault("denoiser killed", _signal("denoiser", kill)),
        WorkerFault("denoiser stopped", _signal("denoiser", stop)),
        WorkerFault("engine raises at every step", _sabotage("raise")),
        # Only a timeout tells a hanging step from a slow one.
        WorkerFault("engine hangs in a step", _sabotage("hang"), answer_bar_s=12.0),
        WorkerFault("encoder killed", _signal("encoder", kill)),
        WorkerFault("encoder stopped", _signal("encoder", stop)),
        WorkerFault("decoder killed", _signal("decoder", kill)),
        WorkerFault("decoder stopped", _signal("decoder", stop)),
        WorkerFault("preprocess killed", _signal("preprocess", kill)),
        WorkerFault("postprocess killed", _signal("postprocess", kill)),
        WorkerFault("control killed", _signal("control", kill)),
        WorkerFault("front `edit` killed", _signal("edit", kill), code=""),
        WorkerFault("front `edit_stream` killed", _signal("edit_stream", kill), code=""),
        WorkerFault("tritonserver killed", _signal("tritonserver", kill), code=""),
        WorkerFault("tritonserver stopped", _signal("tritonserver", stop), code=""),
        WorkerFault("the supervisor surprised, denoiser killed", _surprise),
        # This one is the last, because the logs stay full.
        WorkerFault("the disk of the logs full, denoiser killed", _fill_log_disk),
    ]


def try_worker_fault(site: Site, fault: WorkerFault) -> WorkerTrial:
    """Run five long edits, cause the fault, and watch until an edit succeeds again.

    Raises:
        TimeoutError: a client was never answered, or the worker did not return.
    """
    harm = threading.Event()
    restarts = site.worker.restarts
    if restarts:
        time.sleep(STEADY_S + 1.0)  # a sooner failure delays the restart
    with ThreadPoolExecutor(CLIENTS) as pool:
        answers = begin_visits(site, pool, harm)
        harm.set()
        began = time.monotonic()
        fault.inject(site)
        ends = [answer.result(PATIENCE_S) for answer in answers]
    # This edits all the time: an engine gives up only after failed steps of several clients.
    serves = until(
        "it serves again", lambda: site.serves() and site.worker.restarts > restarts, LOAD_S
    )
    messages = [message for _, message in ends]
    answered_s = max(at for at, _ in ends) - began
    return WorkerTrial(
        messages=tuple(sorted(set(messages))),
        serves_s=serves - began,
        load_s=site.worker.loaded_in_s,
        as_told=answered_s <= fault.answer_bar_s
        # An edit may succeed just before its worker is found unhealthy.
        and all(message == "done" or fault.code in message for message in messages),
    )


def _signal(model: str, number: signal.Signals) -> Callable[[Site], None]:
    return lambda site: site.process(model).send_signal(number)


def _surprise(site: Site) -> None:
    """Raise an unexpected exception for a second, each time the supervisor checks the worker."""
    health_problem, end = site.worker.health_problem, time.monotonic() + 1.0

    def surprise() -> str | None:
        if time.monotonic() < end:
            raise ValueError("a surprise")
        return health_problem()

    site.worker.health_problem = surprise  # type: ignore[method-assign]
    site.process("denoiser").kill()


def _fill_log_disk(site: Site) -> None:
    """Make the log's disk full: /dev/full opens, and every write to it fails for lack of space."""
    for log in site.worker.spec.options.log_dir.glob(f"{site.worker.name}.*"):
        log.unlink()
        log.symlink_to("/dev/full")
    site.process("denoiser").kill()


def _sabotage(how: str) -> Callable[[Site], None]:
    def inject(site: Site) -> None:
        scratch = site.worker.spec.files.runtime / f".{ORDER}"
        scratch.write_text(how)
        scratch.rename(scratch.with_name(ORDER))

    return inject


def begin_visits(
    site: Site, pool: Executor, harm: threading.Event
) -> list[Future[tuple[float, str]]]:
    """Let clients edit until the fault. Returns when each edit has a row.

    Each result is the time.monotonic() of the client's last answer, and its message.
    """
    answers = [
        pool.submit(_visit, call, site, f"doomed-{number}-{time.monotonic_ns()}", harm)
        for number, call in enumerate((_unary, _unary, _unary, _over_http, _stream))
    ]
    until("the edits run", lambda: _all_run(site, answers), PATIENCE_S)
    return answers


def _all_run(site: Site, answers: list[Future[tuple[float, str]]]) -> bool:
    """Whether every client's edit has a row. Raises a client's error if it failed."""
    for answer in answers:
        if answer.done():
            raise LookupError(f"a client ended before the fault: {answer.result()[1]}")
    status = site.status()
    return status is not None and len(status.running) == len(answers)


def _visit(
    call: Callable[[Site, str], str], site: Site, name: str, harm: threading.Event
) -> tuple[float, str]:
    """Edit again and again until the fault. Returns the time and the message of the last answer."""
    number, message = 0, "done"
    while message == "done" and not harm.is_set():
        number += 1
        message = call(site, f"{name}-{number}").replace(f"{name}-{number}", "…")
    return time.monotonic(), message


def _unary(site: Site, name: str) -> str:
    with closing(Grpc(site.worker.grpc_url)) as client:
        return _outcome_of(lambda: client.edit(site.inputs(name), PATIENCE_S))


def _over_http(site: Site, name: str) -> str:
    with closing(Http(site.worker.http_url, PATIENCE_S)) as client:
        try:
            return _outcome_of(lambda: client.edit(site.inputs(name)))
        except (OSError, HTTPConnectionClosed) as error:
            return f"HTTP: {error}"


def _stream(site: Site, name: str) -> str:
    with closing(Stream(site.worker.grpc_url)) as opened:
        opened.send(site.inputs(name))
        return _outcome_of(lambda: opened.next(PATIENCE_S))


def _outcome_of(call: Callable[[], object]) -> str:
    try:
        call()
    except InferenceServerException as error:
        return str(error.message())
    return "done"
