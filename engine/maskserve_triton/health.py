"""Whether a worker can answer, as its fronts see it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from maskserve_common.config import Config
from maskserve_common.errors import EngineFailed, MaskserveError, Overloaded
from maskserve_common.liveness import Processes, Silence, mean_step_s, silence_limit_s
from maskserve_common.status import StatusReader
from maskserve_triton.admission import STOPPED, AdmissionState

_PROCESSES_EVERY_S = 0.5


class Health:
    """Reads the worker's status record, process list and admission."""

    def __init__(self, config: Config, clock: Callable[[], float] = time.monotonic) -> None:
        self._config = config
        self._clock = clock
        self._reader = StatusReader(f"{config.runtime_dir}/status")
        self._admission = AdmissionState(config.runtime_dir)
        self._silence = Silence(clock)
        self._processes = Processes(config.runtime_dir)
        self._next_processes = 0.0
        self.step_s = 0.0
        """Mean seconds of a step so far."""
        self.silence_limit_s = 0.0
        """Seconds for which the engine, and all that waits for a step, may be silent."""
        self.in_engine: frozenset[str] = frozenset()
        """Ids of the edits in the engine."""
        self._unwell_process: str | None = None
        self._lock = threading.Lock()

    def problem(self) -> MaskserveError | None:
        """Why edits in flight must be answered with an error now; None if they may go on."""
        with self._lock:
            return self._find_problem()

    def close(self) -> None:
        with self._lock:
            self._reader.close()
            self._processes.close()

    def _find_problem(self) -> MaskserveError | None:
        if self._admission.state() == STOPPED:
            return Overloaded("the worker is stopping and its time to finish edits is over")
        status = self._reader.read()
        if status is None:
            return EngineFailed("the engine has not started")
        self.step_s = mean_step_s(status)
        self.in_engine = frozenset(row.request_id for row in (*status.running, *status.waiting))
        timeout_s = self._config.engine.heartbeat_timeout_s
        self.silence_limit_s = silence_limit_s(status, timeout_s)
        hung = self._silence.silence_fault(status, timeout_s)
        if hung is not None:
            return EngineFailed(f"the {hung}")
        if status.ended is not None:
            return EngineFailed(f"the {status.ended}")
        return self._process_problem()

    def _process_problem(self) -> MaskserveError | None:
        now_s = self._clock()
        if now_s >= self._next_processes:
            self._next_processes = now_s + _PROCESSES_EVERY_S
            self._unwell_process = self._processes.unwell()
        return None if self._unwell_process is None else EngineFailed(self._unwell_process)
