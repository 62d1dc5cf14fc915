"""What `edit` and `edit_stream` do: answer for a pipeline that cannot answer for itself.

Neither a cancel nor the death of a model's process crosses a Triton ensemble, so each front
watches both and answers by itself. Threads of one front:

    execute       takes requests in and hands them on, without waiting
    pool          one thread per edit in flight, blocked in the pipeline's responses
    watcher       looks at every edit for a cancel or deadline, and at the worker's health
    listener      withdraws edits that `control` names
    cancels       tells the denoiser to free the rows of edits nobody waits for
    metrics       publishes how edits ended

A pool thread whose denoiser died stays blocked for good; the watcher has answered its client.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from maskserve_core.config import Config
from maskserve_core.contracts.facts import ModelFacts
from maskserve_core.contracts.settings import parse_settings
from maskserve_core.contracts.settings_rules import accept_edit
from maskserve_core.contracts.tensors import PICTURES
from maskserve_core.errors import (
    Cancelled,
    DeadlineExceeded,
    EngineFailed,
    InvalidRequest,
    MaskserveError,
    Overloaded,
    guarded,
)
from maskserve_core.triton.acks import AckSender
from maskserve_core.triton.answer import Answer
from maskserve_core.triton.call import Call, bounded
from maskserve_core.triton.cancels import CancelListener
from maskserve_core.triton.health import Health
from maskserve_core.triton.metrics import FrontMetrics, MetricsThread
from maskserve_core.triton.pipeline import ask_denoiser, run_edit
from maskserve_core.triton.request_log import RequestLog
from maskserve_core.triton.tensor_io import read_bytes, read_elements
from maskserve_core.triton.tracing import TRACEPARENT, Tracer, make_tracer
from maskserve_core.triton.traffic import Traffic, is_probe
from maskserve_core.worker.admission import OPEN, Admission, InFlight
from maskserve_core.worker.logs import about
from maskserve_core.worker.observations import Observations

log = logging.getLogger("maskserve")

_HEALTH_EVERY_S = 0.1
_IDLE_S = 0.25
# However long steps are, a client that cancels or whose deadline passes has its answer by then.
_SELDOM_S = 0.1
# What comes after the engine takes a moment, or many on a CPU that decodes for others first.
_LOST_S = 60.0
# The cancel of an edit that has not reached the denoiser yet finds nothing there: say it again.
_CANCEL_EVERY_S = 0.05
_CANCEL_THREADS = 4


class Front:
    """One front model.

    Args:
        api: triton_python_backend_utils.
        config: of this worker.
        facts: of the served model.
        name: of the front.
        streaming: whether progress and previews are sent on.
        tracer: by default, as the configuration says.
    """

    def __init__(
        self,
        api: Any,
        config: Config,
        facts: ModelFacts,
        name: str,
        *,
        streaming: bool,
        tracer: Tracer | None = None,
    ) -> None:
        self._api = api
        self._config = config
        self._facts = facts
        self._name = name
        self._streaming = streaming
        self._admission = Admission(config.runtime_dir)
        self._in_flight = InFlight(config.runtime_dir, name)
        self._health = Health(config)
        self._traffic = Traffic()
        self._stuck: MaskserveError | None = None
        self._problem: MaskserveError | None = None
        self._probes: queue.SimpleQueue[Answer] = queue.SimpleQueue()
        self._calls: dict[str, Call] = {}
        self._lock = threading.Lock()
        self._withdrawing = threading.Lock()
        self._wake = threading.Event()
        self._closing = threading.Event()
        self._observations = Observations()
        metrics = FrontMetrics(api, config.worker, name, self._observations)
        self._metrics = MetricsThread(metrics)
        self._tracer = tracer or make_tracer(config, name)
        self._pool = ThreadPoolExecutor(config.engine.front_threads, f"{name}-pool")
        self._cancels = ThreadPoolExecutor(_CANCEL_THREADS, f"{name}-cancels")
        self._watcher = threading.Thread(target=self._watch, name=f"{name}-watcher", daemon=True)
        self._watcher.start()
        self._listener = CancelListener(config.runtime_dir, name, self.withdraw)

    def execute(self, requests: list[Any]) -> None:
        """Take requests in; each is answered later, exactly once."""
        for request in requests:
            if is_probe(request):
                self._probes.put(Answer(self._api, request.get_response_sender()))
                self._wake.set()
                continue
            self._in_flight.enter()
            span = self._tracer.open("pipeline", request)
            request_log = RequestLog(self._name, self._observations, self._in_flight.leave, span)
            answer = Answer(self._api, request.get_response_sender(), request_log.answered)
            try:
                self._accept(request, answer, request_log)
            except Exception as error:
                answer.fail(guarded(request_log.request_id, error))

    def withdraw(self, request_id: str) -> bool:
        """Answer an edit that somebody cancels by its id; False if it is answered or not here."""
        with self._lock:
            call = self._calls.get(request_id)
        if call is None or not self._withdraw(call, Cancelled("the edit was cancelled")):
            return False
        self._cancels.submit(self._cancel, call)
        return True

    def close(self) -> None:
        """Stop the threads; edits still in flight are answered."""
        self._listener.close()
        self._closing.set()
        self._wake.set()
        self._watcher.join()
        self._answer_probes()
        self._fail_all(Overloaded("the worker is stopping"))
        self._metrics.close()
        self._tracer.close()
        self._health.close()
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._cancels.shutdown(wait=False, cancel_futures=True)

    def _accept(self, request: Any, answer: Answer, request_log: RequestLog) -> None:
        pictures = {
            declared.name: read_elements(self._api, request, declared) for declared in PICTURES
        }
        prompt, settings = [read_bytes(self._api, request, name) for name in ("PROMPT", "SETTINGS")]
        asked, limit_name = bounded(parse_settings(settings), request, streaming=self._streaming)
        request_log.request_id = asked.request_id or ""
        edit = accept_edit(asked, prompt, self._facts, self._config)
        if self._admission.state() != OPEN:
            raise Overloaded("the worker is draining and takes no new edits")
        if self._problem is not None:
            # What the watcher last saw may be over, as after the start.
            problem = self._problem = self._health.problem() or self._stuck
            if problem is not None:
                answer.fail(problem)
                return
        call = Call(edit, pictures, answer, limit_name, request_log.span.traceparent)
        with self._lock:
            held = self._calls.get(call.request_id)
            # A client may send the id again as soon as it has its answer.
            if held is not None and (held.withdrawn or not held.answer.done):
                raise InvalidRequest(
                    "SETTINGS.request_id", "names an edit that is in flight", "a fresh id"
                )
            self._calls[call.request_id] = call
        self._wake.set()
        self._pool.submit(self._run, call)

    # The pool

    def _run(self, call: Call) -> None:
        try:
            if not call.answer.done:
                self._relay(call)
                call.answer.fail(EngineFailed("the pipeline ended without an answer"))
        except Exception as error:
            call.answer.fail(guarded(call.request_id, error))
        finally:
            if call.sent:
                self._traffic.ended()
            with self._lock:
                if self._calls.get(call.request_id) is call:
                    del self._calls[call.request_id]

    def _relay(self, call: Call) -> None:
        settings, parameters = call.edit.settings, {TRACEPARENT: call.traceparent}
        more = settings.progress or settings.preview_every
        acks = AckSender(self._config.runtime_dir) if more else None
        call.sent = True
        for event in run_edit(self._api, call.inputs(), parameters, call.request_id, acks):
            call.heard = time.monotonic()
            self._traffic.returned()
            if event.kind == "final":
                call.answer.finish({"IMAGE": event.image, "META": event.meta})
            elif self._streaming:
                call.answer.event(event.kind, {"IMAGE": event.image, "META": event.meta})

    # The watcher

    def _watch(self) -> None:
        next_health = 0.0
        while not self._closing.is_set():
            try:
                now = time.monotonic()
                if now >= next_health:
                    next_health = now + _HEALTH_EVERY_S
                    problem = self._problem = self._health.problem() or self._look_at_traffic()
                    if problem is not None:
                        self._fail_all(problem)
                self._answer_probes()
                for call in self._snapshot():
                    self._look_at(call, now)
            except Exception as error:
                # The watcher is what saves clients from hanging: it must outlive a surprise.
                log.error("watcher: %s", error, exc_info=error)
            self._pause()

    def _pause(self) -> None:
        if self._calls:
            # A row is freed between two steps: to look more often is no use and takes from them.
            often = min(self._health.step_s, _SELDOM_S)
            self._closing.wait(max(self._config.engine.watch_interval_s, often))
        else:
            self._wake.wait(_IDLE_S)
            self._wake.clear()

    def _look_at(self, call: Call, now: float) -> None:
        if call.request_id in self._health.held:
            if not call.heard:
                self._traffic.arrived()
            call.heard = now
        if call.answer.cancelled():
            self._withdraw(call, Cancelled("the client cancelled the request"))
        elif call.too_late(now) and not call.answer.done:
            limit = call.edit.settings.deadline_ms
            late = f"{call.limit_name}: {limit} ms passed before the edit was done"
            self._withdraw(call, DeadlineExceeded(late))
        elif call.heard and now - call.heard > _LOST_S:
            # Triton 2.51 never ends an ensemble in which a step fails while others are under way.
            call.answer.fail(EngineFailed("the edit was lost on its way back from the engine"))
        if call.withdrawn and not call.cancelling and now >= call.next_cancel:
            call.cancelling = True
            call.next_cancel = now + _CANCEL_EVERY_S
            self._cancels.submit(self._cancel, call)

    def _look_at_traffic(self) -> MaskserveError | None:
        limit_s = max(self._config.engine.stuck_timeout_s, self._health.silence_limit_s)
        self._stuck = self._traffic.stuck(self._snapshot(), self._health.held, limit_s)
        return self._stuck

    def _answer_probes(self) -> None:
        """By the thread that clients rely on: a front whose watcher hangs gives no answer."""
        while not self._probes.empty():
            answer = self._probes.get()
            if self._stuck is None:
                answer.finish({"IMAGE": b"", "META": b"{}"})
            else:
                answer.fail(self._stuck)

    def _withdraw(self, call: Call, error: MaskserveError) -> bool:
        """Answer it with `error`; False when it has been answered already."""
        with self._withdrawing:
            before = call.withdrawn
            # Said before the client hears of it: its next edit may have the same id.
            call.withdrawn = True
            answered = call.answer.fail(error)
            call.withdrawn = before or answered
        return answered

    def _cancel(self, call: Call) -> None:
        try:
            if self._calls.get(call.request_id) is not call:
                return  # it has ended, and the id may be another edit's by now
            ask_denoiser(self._api, {"op": "cancel", "request_id": call.request_id})
        except MaskserveError as error:
            log.warning("cancel: %s", error, extra=about(call.request_id))
        except Exception as error:
            log.error("cancel: %s", error, exc_info=error, extra=about(call.request_id))
        finally:
            call.cancelling = False

    def _fail_all(self, problem: MaskserveError) -> None:
        for call in self._snapshot():
            call.answer.fail(problem)

    def _snapshot(self) -> list[Call]:
        with self._lock:
            return list(self._calls.values())
