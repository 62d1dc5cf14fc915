"""One worker: a Triton server of our models, its files, its shared memory and its log."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from dataclasses import replace
from typing import Any

from maskserve_core.config import Config, cores
from maskserve_core.worker.admission import Admission
from maskserve_core.worker.liveness import (
    Processes,
    Silence,
    process_unwell,
    signed_in_for_s,
)
from maskserve_core.worker.status import StatusReader
from maskserve_serving.command import EXIT_TIMEOUT_S, command, environment, gpu_of_worker
from maskserve_serving.errors import ServeError
from maskserve_serving.files import checked, with_values, worker_files
from maskserve_serving.heartbeat import Heartbeat, says_ready
from maskserve_serving.options import ServeOptions
from maskserve_serving.ports import check_free
from maskserve_serving.runtime import Runtime
from maskserve_serving.shm_cleanup import region_prefix, remove_regions
from maskserve_serving.spec import Spec
from maskserve_serving.supervisor_log import SupervisorLog
from maskserve_serving.tracing import trace_arguments, untrace
from maskserve_serving.triton_log import TritonLog, failure, loaded_models

# A model's process signs in as the last thing it does to load; Triton hears of it at once.
_UNHEARD_S = 30.0
# After the last answer left a front, Triton still has to write it to its socket.
_LAST_ANSWER_S = 0.3


class Worker:
    """A worker's process. All methods belong to one thread but those said to be for any."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self.config = Config()
        self.log = SupervisorLog()
        self.restarts = 0
        """Since it was first ready."""
        self.loaded_in_s = 0.0
        """What the newest start took until the worker was ready."""
        self._process: subprocess.Popen[bytes] | None = None
        self._said: TritonLog | None = None
        self._started = 0.0
        self._status = StatusReader(spec.files.status)
        self._silence = Silence()
        self._processes = Processes(spec.files.runtime)
        self._heartbeat = Heartbeat(self.http_url)
        self._no_beat = Silence()

    # What any thread may ask

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def http_url(self) -> str:
        return f"http://{_reachable(self.spec.options.host)}:{self.spec.ports.http}"

    @property
    def grpc_url(self) -> str:
        return f"{_reachable(self.spec.options.host)}:{self.spec.ports.grpc}"

    @property
    def metrics_url(self) -> str:
        return f"http://{_reachable(self.spec.options.host)}:{self.spec.ports.metrics}/metrics"

    @property
    def pid(self) -> int | None:
        """Process id of tritonserver while it runs."""
        return None if self._process is None else self._process.pid

    @property
    def admission(self) -> Admission:
        return Admission(self.spec.files.runtime)

    # Start

    def start(self) -> None:
        """Start the server; it is not ready when this returns.

        Raises:
            ServeError: a port is taken or the configuration is not valid.
        """
        spec = self.spec
        check_free(spec.options.host, spec.ports)
        prefix = region_prefix(spec.ports.http)
        remove_regions(prefix)
        folders = {
            "runtime_dir": str(spec.files.runtime),
            "templates_dir": str(spec.files.templates),
        }
        tables = with_values(spec.with_log(spec.tables), "", worker=self.name, **folders)
        self.config = spec.files.prepare(tables)
        if self.config.model.torch_threads == 0:
            threads = max(1, cores() // spec.options.workers)
            self.config = spec.files.prepare(with_values(tables, "model", torch_threads=threads))
        self._status.close()
        self._processes.close()
        self._status, self._silence = StatusReader(spec.files.status), Silence()
        gpu = gpu_of_worker(spec.index, spec.options.workers)
        trace = trace_arguments(self.config.trace, self.name)
        self.log.open(self.config)
        self._process = subprocess.Popen(
            command(spec.options, self.config, spec.runtime, spec.ports, prefix, trace),
            env=environment(spec.runtime, spec.files.config, gpu),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            # A group of its own: Ctrl-C at the terminal is for the supervisor alone, and the stub
            # processes can be ended together with their server.
            start_new_session=True,
        )
        assert self._process.stdout is not None
        self._said = TritonLog(spec.log, self._process.stdout, self.say)
        self._started = time.monotonic()

    def say(self, what: str) -> None:
        """Tell the person at the terminal; for any thread."""
        try:
            self.spec.options.say(f"{self.name}: {what}")
        except OSError:
            pass  # standard output is a full disk, or nobody reads it any more

    @property
    def loading_s(self) -> float:
        return time.monotonic() - self._started

    def loaded(self) -> set[str]:
        """Names of the models loaded so far."""
        return set() if self._said is None else loaded_models(self._said.text())

    def ready(self) -> bool:
        """Whether Triton says that it and every model are ready."""
        return says_ready(self.http_url)

    def unheard(self) -> str | None:
        """The loaded model that Triton waits for in vain, in words; None if there is none.

        A machine that stalls for a second while models load makes Triton 2.51 take a process for
        dead: it reads nothing more from it, and waits for it to end.
        """
        loaded = self.loaded()
        for model, age_s in signed_in_for_s(self.spec.files.runtime).items():
            if age_s > _UNHEARD_S and model not in loaded:
                return f"tritonserver does not notice that {model} is loaded"
        return None

    def settle(self) -> str | None:
        """What is left to do once it is ready; what went wrong, in words."""
        self._heartbeat, self._no_beat = Heartbeat(self.http_url), Silence()
        self._heartbeat.start()
        return untrace(self.http_url) if self.config.trace.otlp_url else None

    def exit_reason(self) -> str | None:
        """Why the server ended, in words; None while it runs."""
        if self._process is None or self._process.poll() is None:
            return None
        code = self._process.returncode
        by = f"signal {-code}" if code < 0 else f"exit code {code}"
        why = None if self._said is None else failure(self._said.whole_text())
        return f"{why or f'tritonserver ended ({by})'}; the log is {self.spec.log}"

    def aborted(self) -> bool:
        """Whether the server ended itself by abort(), which no configuration makes it do."""
        return self._process is not None and self._process.poll() == -signal.SIGABRT

    # Health

    def sick(self) -> str | None:
        """What keeps a worker that was ready from serving, in words; None if nothing does."""
        limit_s = self.config.engine.heartbeat_timeout_s
        server = None if self.pid is None else process_unwell(self.pid)
        if server is not None:
            return f"tritonserver {server}"
        silent_s = self._no_beat.silent_s(self._heartbeat.beats)
        if silent_s > limit_s:
            return f"tritonserver has not answered for {silent_s:.1f} s"
        status = self._status.read()
        if status is None:
            return "it has no status record"
        hung = self._silence.too_long(status, limit_s)
        if hung is not None:
            return f"its {hung}"
        if status.state in ("failed", "stopped"):
            return f"its engine has {status.state}"
        return self._processes.unwell()

    def in_flight(self) -> int:
        """Edits that the fronts have accepted and not answered."""
        return self.admission.in_flight()

    # Stop

    def finish_edits(self, grace_s: float) -> bool:
        """Refuse new edits and wait for the accepted ones; whether all were finished in time.

        Past the grace the fronts answer what is left with an error.
        """
        if self._process is None or self._process.poll() is not None:
            return True
        admission = self.admission
        admission.drain()
        finished = self._await_idle(grace_s)
        if not finished:
            admission.stop()
            self._await_idle(2.0)
        time.sleep(_LAST_ANSWER_S)
        return finished

    def _await_idle(self, limit_s: float) -> bool:
        end = time.monotonic() + limit_s
        while self.in_flight() > 0:
            if time.monotonic() > end or self.exit_reason() is not None:
                return False
            time.sleep(0.02)
        return True

    def terminate(self) -> None:
        """End the server in an orderly way, and by force if it takes too long."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(EXIT_TIMEOUT_S + 5)
            except subprocess.TimeoutExpired:
                pass
        self.kill()

    def kill(self) -> None:
        """End the server and its stub processes at once, and clean up; for any thread."""
        self._heartbeat.stop()
        if self._process is None:
            return
        self.signal_group()
        self._process.wait()
        remove_regions(region_prefix(self.spec.ports.http))

    def signal_group(self) -> None:
        """SIGKILL to the server and its stub processes; for any thread and signal handlers."""
        if self._process is not None:
            try:
                os.killpg(self._process.pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                pass

    def remove_files(self) -> None:
        self._status.close()
        self._processes.close()
        self.spec.files.remove()


def make_workers(options: ServeOptions, runtime: Runtime, tables: dict[str, Any]) -> list[Worker]:
    """One worker per index, none started."""
    options = replace(options, log_dir=options.log_dir.resolve())
    files = worker_files(options.base_port, options.workers)
    return [Worker(Spec(i, options, runtime, tables, own)) for i, own in enumerate(files)]


def check_logs(workers: list[Worker]) -> None:
    """Raise a ServeError if a log cannot be written; later that would be no reason to stop."""
    for spec in (worker.spec for worker in workers):
        try:
            spec.log.parent.mkdir(parents=True, exist_ok=True)
            spec.log.open("ab").close()
        except OSError as error:
            raise ServeError(f"--log-dir: cannot write {spec.log}: {error.strerror}") from error
        SupervisorLog.check(checked(spec.with_log(spec.tables)))


def check_ports(workers: list[Worker]) -> None:
    for worker in workers:
        check_free(worker.spec.options.host, worker.spec.ports)


def _reachable(host: str) -> str:
    return {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
