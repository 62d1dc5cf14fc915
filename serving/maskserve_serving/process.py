"""A process that the supervisor starts, watches and ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from maskserve_common.liveness import Silence, process_unwell
from maskserve_serving.command import EXIT_TIMEOUT_S
from maskserve_serving.errors import ServeError
from maskserve_serving.heartbeat import Heartbeat, is_ready
from maskserve_serving.orphans import RUN_DIR
from maskserve_serving.ports import Ports
from maskserve_serving.supervisor_log import SupervisorLog
from maskserve_serving.triton_log import TritonLog, failure, refusal


def spawn(
    command: Sequence[str], env: Mapping[str, str], run_dir: Path, output: int
) -> subprocess.Popen[bytes]:
    """Run a command that ends when the thread that calls this does.

    Args:
        command: program and arguments.
        env: its environment.
        run_dir: folder of the supervisor, by which the process is found if that is killed.
        output: PIPE or DEVNULL of `subprocess`.
    """
    launcher = str(Path(__file__).with_name("launch.py"))
    return subprocess.Popen(
        [sys.executable, launcher, str(os.getpid()), *command],
        env={**env, RUN_DIR: str(run_dir)},
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        # A group of its own: Ctrl-C at the terminal reaches only the supervisor, and its own child
        # processes can be ended together with it. No session of its own: Linux weighs sessions
        # alike, so the router's niced threads would not give way to a worker's steps.
        process_group=0,
    )


class Process(ABC):
    """One server. All methods belong to one thread, except those marked for any thread.

    Args:
        name: name at the terminal.
        program: program that runs, for messages.
        http_url: URL for its health and readiness.
        output: file of its output.
        run_dir: folder of the supervisor, by which its processes are found if it is killed.
        report: receives progress, a line at a time.
    """

    ports: Ports

    def __init__(
        self,
        name: str,
        program: str,
        http_url: str,
        output: Path,
        run_dir: Path,
        report: Callable[[str], None],
    ) -> None:
        self.name, self.http_url, self.output = name, http_url, output
        self.log = SupervisorLog()
        self.restarts = 0
        """Restarts since it was first ready."""
        self.loaded_in_s = 0.0
        """Seconds of the newest start until it was ready."""
        self._program, self._run_dir, self._report = program, run_dir, report
        self._process: subprocess.Popen[bytes] | None = None
        self._log: TritonLog | None = None
        self._started = 0.0
        self._heartbeat = Heartbeat(http_url)
        self._server_silence = Silence()

    @property
    def pid(self) -> int | None:
        """Its process id while it runs. For any thread."""
        return None if self._process is None else self._process.pid

    def report(self, message: str) -> None:
        """Write a line at the terminal. For any thread."""
        try:
            self._report(f"{self.name}: {message}")
        except OSError:
            pass  # a full disk, or a closed pipe

    # Start.

    def check_log(self) -> None:
        """Raise a ServeError if its log cannot be written; later this does not stop it."""
        try:
            self.output.parent.mkdir(parents=True, exist_ok=True)
            self.output.open("ab").close()
        except OSError as error:
            raise ServeError(f"--log-dir: cannot write {self.output}: {error.strerror}") from error

    @abstractmethod
    def check_ports(self) -> None:
        """Raise a ServeError that names the first port in use."""

    @abstractmethod
    def start(self) -> None:
        """Start it; it is not ready when this returns.

        Raises:
            ServeError: a port is taken or the configuration is not valid.
        """

    def launch(self, command: Sequence[str], env: Mapping[str, str]) -> None:
        """Run a command that ends when this process does."""
        self._process = spawn(command, env, self._run_dir, subprocess.PIPE)
        assert self._process.stdout is not None
        self._log = TritonLog(self.output, self._process.stdout, self.report)
        self._started = time.monotonic()

    @property
    def loading_s(self) -> float:
        return time.monotonic() - self._started

    def last_words(self) -> str:
        """Return its output since it was started."""
        return "" if self._log is None else self._log.text()

    @abstractmethod
    def progress(self) -> str:
        """Return the progress of its start, in words."""

    def ready(self) -> bool:
        """Return True if it reports that it is ready."""
        return is_ready(self.http_url)

    def refused(self) -> str | None:
        """Return which of its models does not load, and why, in words; None: no such report."""
        why = refusal(self.last_words())
        return None if why is None else f"{why}; the log is {self.output}"

    def stalled(self) -> str | None:
        """Return what its start waits for in vain, in words; None: nothing."""
        return None

    def finish_start(self) -> str | None:
        """Finish its start once it is ready; return an error text, or None."""
        self._heartbeat, self._server_silence = Heartbeat(self.http_url), Silence()
        self._heartbeat.start()
        return None

    # Health.

    def exit_reason(self) -> str | None:
        """Return why it ended, in words; None while it runs."""
        if self._process is None or self._process.poll() is None:
            return None
        code = self._process.returncode
        by = f"signal {-code}" if code < 0 else f"exit code {code}"
        why = None if self._log is None else failure(self._log.whole_text())
        return f"{why or f'{self._program} ended ({by})'}; the log is {self.output}"

    def aborted(self) -> bool:
        """Return True if it called abort(), which no configuration causes."""
        return self._process is not None and self._process.poll() == -signal.SIGABRT

    @abstractmethod
    def health_problem(self) -> str | None:
        """Return why it no longer serves, in words; None: it serves."""

    def unresponsive(self, limit_s: float) -> str | None:
        """Return in words that it is stopped or has not answered for `limit_s`; None: neither."""
        unwell = None if self.pid is None else process_unwell(self.pid)
        if unwell is not None:
            return f"{self._program} {unwell}"
        silent_s = self._server_silence.silent_s(self._heartbeat.beats)
        if silent_s > limit_s:
            return f"{self._program} has not answered for {silent_s:.1f} s"
        return None

    @abstractmethod
    def in_flight(self) -> int:
        """Return the number of edits accepted and not answered. For any thread."""

    # Stop.

    @abstractmethod
    def finish_edits(self, grace_s: float | None) -> bool:
        """Refuse new edits and wait for the accepted ones. Return False: some were not finished.

        `grace_s`: seconds to wait; None takes the configuration's.
        """

    def terminate(self) -> None:
        """End it in order, and by force if that takes too long."""
        self.end_within(EXIT_TIMEOUT_S + 5)
        self.kill()

    def end_within(self, limit_s: float) -> bool:
        """Tell it to end. Return False: it still has work after `limit_s`."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            end = time.monotonic() + limit_s
            while self._process.poll() is None and not self.closed():
                if time.monotonic() > end:
                    return False
                time.sleep(0.02)
        return True

    def closed(self) -> bool:
        """Return True if it has finished its work after SIGTERM, even if it has not ended yet."""
        return False

    def kill(self) -> None:
        """Kill it and its child processes at once, and clean up. For any thread."""
        self._heartbeat.stop()
        if self._process is not None:
            self.signal_group()
            self._process.wait()

    def signal_group(self) -> None:
        """Send SIGKILL to it and its child processes. For any thread and signal handlers."""
        if self._process is not None:
            try:
                os.killpg(self._process.pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                pass

    def remove_files(self) -> None:
        """Remove its own files, once it has ended."""
        self.log.close()
