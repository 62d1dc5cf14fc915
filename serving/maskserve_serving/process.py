"""A process that the supervisor runs: started, listened to, watched and ended."""

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
from maskserve_serving.heartbeat import Heartbeat, says_ready
from maskserve_serving.orphans import RUN_DIR
from maskserve_serving.supervisor_log import SupervisorLog
from maskserve_serving.triton_log import TritonLog, failure, refusal


class Process(ABC):
    """One server. All methods belong to one thread but those said to be for any.

    Args:
        name: as the person at the terminal knows it.
        program: what runs, in messages.
        http_url: where it says whether it lives and is ready.
        output: file of what it says.
        run_dir: the supervisor's folder, by which its processes are found if it is killed.
        say: where progress goes, a line at a time.
    """

    def __init__(
        self,
        name: str,
        program: str,
        http_url: str,
        output: Path,
        run_dir: Path,
        say: Callable[[str], None],
    ) -> None:
        self.name, self.http_url, self.output = name, http_url, output
        self.log = SupervisorLog()
        self.restarts = 0
        """Since it was first ready."""
        self.loaded_in_s = 0.0
        """What the newest start took until it was ready."""
        self._program, self._run_dir, self._say = program, run_dir, say
        self._process: subprocess.Popen[bytes] | None = None
        self._said: TritonLog | None = None
        self._started = 0.0
        self._heartbeat = Heartbeat(http_url)
        self._no_beat = Silence()

    @property
    def pid(self) -> int | None:
        """Its process id while it runs; for any thread."""
        return None if self._process is None else self._process.pid

    def say(self, what: str) -> None:
        """Tell the person at the terminal; for any thread."""
        try:
            self._say(f"{self.name}: {what}")
        except OSError:
            pass  # standard output is a full disk, or nobody reads it any more

    # Start

    def check_log(self) -> None:
        """Raise a ServeError if its log cannot be written; later that is no reason to stop."""
        try:
            self.output.parent.mkdir(parents=True, exist_ok=True)
            self.output.open("ab").close()
        except OSError as error:
            raise ServeError(f"--log-dir: cannot write {self.output}: {error.strerror}") from error

    @abstractmethod
    def check_ports(self) -> None:
        """Raise a ServeError that names the first port somebody else listens on."""

    @abstractmethod
    def start(self) -> None:
        """Start it; it is not ready when this returns.

        Raises:
            ServeError: a port is taken or the configuration is not valid.
        """

    def launch(self, command: Sequence[str], env: Mapping[str, str]) -> None:
        """Run a command that ends when this process does."""
        launcher = str(Path(__file__).with_name("launch.py"))
        self._process = subprocess.Popen(
            [sys.executable, launcher, str(os.getpid()), *command],
            env={**env, RUN_DIR: str(self._run_dir)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            # A group of its own: Ctrl-C at the terminal is for the supervisor alone, and what it
            # starts itself can be ended together with it.
            start_new_session=True,
        )
        assert self._process.stdout is not None
        self._said = TritonLog(self.output, self._process.stdout, self.say)
        self._started = time.monotonic()

    @property
    def loading_s(self) -> float:
        return time.monotonic() - self._started

    def said(self) -> str:
        """What it has said since it was started."""
        return "" if self._said is None else self._said.text()

    @abstractmethod
    def progress(self) -> str:
        """How far its start is, in words."""

    def ready(self) -> bool:
        """Whether it says that it can serve."""
        return says_ready(self.http_url)

    def refused(self) -> str | None:
        """Which of its models does not load, and why, in words; None if it said so of none."""
        why = refusal(self.said())
        return None if why is None else f"{why}; the log is {self.output}"

    def stalled(self) -> str | None:
        """What it waits for in vain at its start, in words; None if nothing."""
        return None

    def settle(self) -> str | None:
        """What is left to do once it is ready; what went wrong, in words."""
        self._heartbeat, self._no_beat = Heartbeat(self.http_url), Silence()
        self._heartbeat.start()
        return None

    # Health

    def exit_reason(self) -> str | None:
        """Why it ended, in words; None while it runs."""
        if self._process is None or self._process.poll() is None:
            return None
        code = self._process.returncode
        by = f"signal {-code}" if code < 0 else f"exit code {code}"
        why = None if self._said is None else failure(self._said.whole_text())
        return f"{why or f'{self._program} ended ({by})'}; the log is {self.output}"

    def aborted(self) -> bool:
        """Whether it ended itself by abort(), which no configuration makes it do."""
        return self._process is not None and self._process.poll() == -signal.SIGABRT

    @abstractmethod
    def sick(self) -> str | None:
        """What keeps it from serving once it was ready, in words; None if nothing does."""

    def unresponsive(self, limit_s: float) -> str | None:
        """Whether it is stopped, or has not answered for so long; in words, None if neither."""
        unwell = None if self.pid is None else process_unwell(self.pid)
        if unwell is not None:
            return f"{self._program} {unwell}"
        silent_s = self._no_beat.silent_s(self._heartbeat.beats)
        if silent_s > limit_s:
            return f"{self._program} has not answered for {silent_s:.1f} s"
        return None

    @abstractmethod
    def in_flight(self) -> int:
        """Edits accepted and not answered; for any thread."""

    # Stop

    @abstractmethod
    def finish_edits(self, grace_s: float | None) -> bool:
        """Refuse new edits and wait for the accepted ones; whether all were finished in time.

        `grace_s`: None takes the configuration's.
        """

    def terminate(self) -> None:
        """End it in an orderly way, and by force if it takes too long."""
        self.end_within(EXIT_TIMEOUT_S + 5)
        self.kill()

    def end_within(self, limit_s: float) -> bool:
        """Tell it to end; whether it did, or has nothing more to do."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            end = time.monotonic() + limit_s
            while self._process.poll() is None and not self.closed():
                if time.monotonic() > end:
                    return False
                time.sleep(0.02)
        return True

    def closed(self) -> bool:
        """Whether all that it had to finish after SIGTERM is done, though it has not ended yet."""
        return False

    def kill(self) -> None:
        """End it and what it started at once, and clean up; for any thread."""
        self._heartbeat.stop()
        if self._process is not None:
            self.signal_group()
            self._process.wait()

    def signal_group(self) -> None:
        """SIGKILL to it and what it started; for any thread and signal handlers."""
        if self._process is not None:
            try:
                os.killpg(self._process.pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                pass

    def remove_files(self) -> None:
        """Remove what belongs to it alone, once it has ended."""
        self.log.close()
