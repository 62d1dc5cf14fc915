"""The thread of a front that watches every edit in flight, and the worker's health.

It saves clients from hanging: it answers edits whose client cancels, whose deadline passes, or
whose worker cannot continue, whatever the pipeline does.
"""

from __future__ import annotations

import logging
import queue
import threading
import time

from maskserve_common.config import Config
from maskserve_common.errors import Cancelled, DeadlineExceeded, EngineFailed, MaskserveError
from maskserve_triton.answer import Answer
from maskserve_triton.call import Call, Calls
from maskserve_triton.cancels import Withdrawals
from maskserve_triton.health import Health
from maskserve_triton.traffic import Traffic

log = logging.getLogger("maskserve")

_HEALTH_EVERY_S = 0.1
_IDLE_S = 0.25
# However long steps are, a cancel or a passed deadline is answered within this time.
_LONGEST_PAUSE_S = 0.1


class Watcher:
    """Watches the edits of one front until closed.

    Args:
        config: configuration of the worker.
        name: name of the front.
        calls: edits in flight.
        withdrawals: ends edits without a waiting client.
        traffic: record of responses, which the front fills.
        lost_s: seconds after an edit has left the engine when its response counts as lost. Decoding
            and pasting take a moment, or longer on a CPU that decodes other edits first.
    """

    def __init__(
        self,
        config: Config,
        name: str,
        calls: Calls,
        withdrawals: Withdrawals,
        traffic: Traffic,
        lost_s: float = 60.0,
    ) -> None:
        self._lost_s = lost_s
        self._engine = config.engine
        self._calls, self._withdrawals, self._traffic = calls, withdrawals, traffic
        self._health = Health(config)
        self._stuck: MaskserveError | None = None
        self._problem: MaskserveError | None = None
        self._probes: queue.SimpleQueue[Answer] = queue.SimpleQueue()
        self._wake = threading.Event()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"{name}-watcher", daemon=True)
        self._thread.start()

    def problem(self) -> MaskserveError | None:
        """Why the worker cannot take an edit now; None if it can."""
        if self._problem is not None:
            # The last state may be over, as after the start.
            self._problem = self._health.problem() or self._stuck
        return self._problem

    def wake(self) -> None:
        """There is an edit to watch."""
        self._wake.set()

    def probe(self, answer: Answer) -> None:
        """Let the watcher itself answer: a front whose watcher hangs gives no answer."""
        self._probes.put(answer)
        self._wake.set()

    def close(self) -> None:
        self._closing.set()
        self._wake.set()
        self._thread.join()
        self._answer_probes()
        self._health.close()

    def _run(self) -> None:
        next_health = 0.0
        while not self._closing.is_set():
            try:
                now_s = time.monotonic()
                if now_s >= next_health:
                    next_health = now_s + _HEALTH_EVERY_S
                    self._check_worker()
                self._answer_probes()
                for call in self._calls.all():
                    self._check_call(call, now_s)
                self._withdrawals.repeat(now_s)
            except Exception as error:
                log.error("watcher: %s", error, exc_info=error)
            self._pause()

    def _pause(self) -> None:
        if self._calls:
            # A row is freed between two steps: to look more often is no use and takes from them.
            pause_s = min(self._health.step_s, _LONGEST_PAUSE_S)
            self._closing.wait(max(self._engine.watch_interval_s, pause_s))
        else:
            self._wake.wait(_IDLE_S)
            self._wake.clear()

    def _check_worker(self) -> None:
        self._problem = self._health.problem() or self._check_traffic()
        if self._problem is not None:
            self._calls.fail_all(self._problem)

    def _check_traffic(self) -> MaskserveError | None:
        limit_s = max(self._engine.stuck_timeout_s, self._health.silence_limit_s)
        self._stuck = self._traffic.stuck(self._calls.all(), self._health.in_engine, limit_s)
        return self._stuck

    def _check_call(self, call: Call, now: float) -> None:
        if call.request_id in self._health.in_engine:
            if not call.last_event:
                self._traffic.record_arrival()
            call.last_event = now
        if call.answer.cancelled():
            self._withdrawals.withdraw(call, Cancelled("the client cancelled the request"))
        elif call.too_late(now) and not call.answer.done:
            limit = call.edit.settings.deadline_ms
            message = f"{call.limit_name}: {limit} ms passed before the edit was done"
            self._withdrawals.withdraw(call, DeadlineExceeded(message))
        elif call.last_event and now - call.last_event > self._lost_s:
            # TRITON-2.51: an ensemble never ends in which a step fails while others are under way.
            call.answer.fail(EngineFailed("the edit was lost on its way back from the engine"))

    def _answer_probes(self) -> None:
        while not self._probes.empty():
            answer = self._probes.get()
            if self._stuck is None:
                answer.finish({"IMAGE": b"", "META": b"{}"})
            else:
                answer.fail(self._stuck)
